"""Packages: manifest, files, integrity, loading, refit, and the copy proof."""

from inlay.package.loader import LoadedPackage, load_package

__all__ = ["LoadedPackage", "load_package"]

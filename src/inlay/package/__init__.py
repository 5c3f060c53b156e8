"""Packages: manifest, files, integrity checks, loading, refit and copy proof."""

from inlay.package.loader import LoadedPackage, load_package

__all__ = ["LoadedPackage", "load_package"]

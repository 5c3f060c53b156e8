"""Configuration: YAML layers resolved into one, with where each value came from."""

from inlay.config.layers import Entry, Resolved, Setting, resolve

__all__ = ["Entry", "Resolved", "Setting", "resolve"]

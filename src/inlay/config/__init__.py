"""Configuration: YAML layers resolved into one, with where each value came from."""

from inlay.config.layers import Entry, Kept, Resolved, Setting, resolve

__all__ = ["Entry", "Kept", "Resolved", "Setting", "resolve"]

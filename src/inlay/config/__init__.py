"""Configuration: YAML layers resolved into one, with the origin of each value."""

from inlay.config.layers import ConfigFile, ResolvedConfig, Setting, TransformEntry, default_aliases, resolve_config

__all__ = ["ConfigFile", "ResolvedConfig", "Setting", "TransformEntry", "default_aliases", "resolve_config"]

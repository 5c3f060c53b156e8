"""Configuration: YAML layers resolved into one, with where each value came from."""

from inlay.config.layers import ConfigFile, ResolvedConfig, Setting, TransformEntry, resolve_config

__all__ = ["ConfigFile", "ResolvedConfig", "Setting", "TransformEntry", "resolve_config"]

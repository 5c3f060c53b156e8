"""The version of Inlay."""

__version__ = "0.1.0"

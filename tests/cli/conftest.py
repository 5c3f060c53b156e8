"""Fixtures of the server's tests that commands need too."""

from tests.serve.conftest import package

__all__ = ["package"]

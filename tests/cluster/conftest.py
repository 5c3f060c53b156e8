from __future__ import annotations

from tests.serve.conftest import engine, package

__all__ = ["engine", "package"]

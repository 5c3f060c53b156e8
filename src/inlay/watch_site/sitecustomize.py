"""Python runs this file at startup if its folder is in PYTHONPATH, as `inlay watch` sets it.

It starts the watch, and then runs the `sitecustomize` that it hides.
"""

import importlib.machinery
import importlib.util
import os
import sys

_HERE = os.path.dirname(os.path.abspath(__file__))
try:
    from inlay.watch_startup import install

    install()
except ImportError as error:  # another environment than that of `inlay watch`
    print(f"inlay: nothing is watched in {sys.executable}: {error}", file=sys.stderr)
_paths = [each for each in sys.path if os.path.abspath(each or ".") != _HERE]
_hidden = importlib.machinery.PathFinder.find_spec("sitecustomize", _paths)
if _hidden is not None and _hidden.loader is not None:
    _hidden.loader.exec_module(importlib.util.module_from_spec(_hidden))

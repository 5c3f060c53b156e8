"""Capture a Program from a module, a Hugging Face folder or id, or a GGUF file."""

from inlay.capture.export import capture
from inlay.capture.huggingface.static_cache import with_static_cache
from inlay.capture.model_spec import Identity, identify, open_model
from inlay.capture.source_model import Example, SourceModel

__all__ = ["Example", "Identity", "SourceModel", "capture", "identify", "open_model", "with_static_cache"]

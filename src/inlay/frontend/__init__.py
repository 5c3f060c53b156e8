"""Capture a Program from a module, a Hugging Face folder or id, or a GGUF file."""

from inlay.frontend.export import capture
from inlay.frontend.huggingface.static_cache import with_static_cache
from inlay.frontend.model_spec import Identity, identify, open_model
from inlay.frontend.source_model import Example, SourceModel

__all__ = ["Example", "Identity", "SourceModel", "capture", "identify", "open_model", "with_static_cache"]

"""From a module, a Hugging Face folder or id, or a GGUF file to a Program."""

from inlay.capture.capture import capture
from inlay.capture.hf_cache import with_static_cache
from inlay.capture.model import Example, Model
from inlay.capture.source import Identity, identify, open_model

__all__ = ["Example", "Identity", "Model", "capture", "identify", "open_model", "with_static_cache"]

"""From a module, a Hugging Face folder or id, or a GGUF file to a Program."""

from inlay.capture.capture import capture
from inlay.capture.model import Example, Model
from inlay.capture.source import open_model

__all__ = ["Example", "Model", "capture", "open_model"]

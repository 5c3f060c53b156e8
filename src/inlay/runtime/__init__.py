"""The runtime of packages: language models, text encoders, sampling, sessions and outputs."""

from inlay.runtime.encoder import Encoder, load_encoder
from inlay.runtime.language_model import LanguageModel, load
from inlay.runtime.outputs import Completion, FinishReason, TokenOutput
from inlay.runtime.sampling import Sampling
from inlay.runtime.session import Session

__all__ = [
    "Completion",
    "Encoder",
    "FinishReason",
    "LanguageModel",
    "Sampling",
    "Session",
    "TokenOutput",
    "load",
    "load_encoder",
]

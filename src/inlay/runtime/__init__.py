"""The runtime of packages: language models, sampling, sessions and outputs."""

from inlay.runtime.language_model import LanguageModel, load
from inlay.runtime.outputs import Completion, FinishReason, TokenOutput
from inlay.runtime.sampling import Sampling
from inlay.runtime.session import Session

__all__ = ["Completion", "FinishReason", "LanguageModel", "Sampling", "Session", "TokenOutput", "load"]

"""Running packages: sampling, text, sessions."""

from inlay.runtime.model import LanguageModel, load
from inlay.runtime.pieces import Completion, Finish, Piece
from inlay.runtime.sampling import Sampling
from inlay.runtime.session import Session

__all__ = ["Completion", "Finish", "LanguageModel", "Piece", "Sampling", "Session", "load"]

"""One answer in the making: which token comes next, the text it adds, and whether it was the last."""

from __future__ import annotations

from typing import TYPE_CHECKING

from inlay.errors import UsageError
from inlay.runtime.pieces import Finish, Likelihood
from inlay.runtime.sampling import draw
from inlay.runtime.stops import StopStrings

if TYPE_CHECKING:
    import torch

    from inlay.runtime.request import Request
    from inlay.runtime.text import Text


class Writer:
    """The answer to a request, token by token; `room` is how many tokens a sequence can hold."""

    def __init__(self, request: Request, text: Text, room: int) -> None:
        check_room(len(request.prompt), room, request.max_tokens)
        self.request = request
        self.history = list(request.prompt)
        """The prompt and what was written."""
        self.left = min(request.max_tokens, room - len(request.prompt) + 1)  # the last token need not go in
        self.likely = request.sampling.greedy and request.sampling.repetition_penalty == 1
        """Whether the likeliest token is taken, whatever came before."""
        self._generator = None if request.sampling.greedy else request.sampling.generator()
        self._stops, self._stream = StopStrings(request.stop), text.decoder()
        self._ends: frozenset[int] = frozenset() if request.ignore_eos else text.eos

    def draw(self, scores: torch.Tensor) -> int:
        """The next token, given the scores of all."""
        return draw(scores, self.history, self.request.sampling, self._generator)

    def likelihood(self, scores: torch.Tensor, token: int) -> Likelihood:
        """How likely a token was, and as many others as the request asks for."""
        logs = scores.log_softmax(-1)
        values, tokens = logs.topk(min(self.request.logprobs or 0, len(logs)))
        return Likelihood(float(logs[token]), tuple(zip(tokens.tolist(), values.tolist(), strict=True)))

    def add(self, token: int) -> tuple[str, Finish | None]:
        """Take a token: the text that became certain, and why the answer ends, if it does."""
        self.history.append(token)
        self.left -= 1
        ended = Finish.EOS if token in self._ends else Finish.LENGTH if self.left == 0 else None
        shown = self._stops.add("" if ended is Finish.EOS else self._stream.add(token))
        if ended and not self._stops.found:
            shown += self._stops.add(self._stream.finish())
        if self._stops.found:
            ended = Finish.STOP
        elif ended:
            shown += self._stops.finish()
        return shown, ended

    def rest(self) -> str:
        """Text that was held back, when the answer is broken off."""
        return self._stops.add(self._stream.finish()) + self._stops.finish()


def check_room(prompt: int, room: int, max_tokens: int) -> None:
    """Refuse what cannot be answered."""
    if max_tokens < 1:
        raise UsageError(f"max_tokens is {max_tokens}, but at least one token has to be made.", "Ask for 1 or more.")
    if prompt == 0:
        raise UsageError("The prompt is empty, and this model has no begin token.", "Write something.")
    if prompt > room:
        raise UsageError(
            f"The prompt has {prompt} tokens, but the package holds {room}.",
            "Shorten the prompt, or build the package for longer texts.",
        )

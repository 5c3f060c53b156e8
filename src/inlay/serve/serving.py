"""What all routes share: the engine, and what is allowed and counted around it."""

from __future__ import annotations

import asyncio
from functools import cached_property
from time import time
from typing import TYPE_CHECKING

from inlay.serve.convert import Bounds, longest_token
from inlay.serve.keys import Keys
from inlay.serve.logs import Lines
from inlay.serve.metrics import Metrics
from inlay.serve.places import Places
from inlay.serve.spelling import Spelling

if TYPE_CHECKING:
    from inlay.runtime.engine import Engine
    from inlay.serve.logs import Record
    from inlay.serve.settings import Settings


class Serving:
    """One engine that is being served."""

    def __init__(self, engine: Engine, settings: Settings, fingerprint: str, lines: Lines | None = None) -> None:
        self.engine, self.settings, self.fingerprint = engine, settings, fingerprint
        self.keys = Keys(settings.keys)
        most = settings.max_concurrent or engine.slots + engine.settings.queue
        self.places = Places(most, min(most, engine.slots))
        prompt = min(settings.max_prompt or engine.room, engine.room)
        tokenizer = engine.text.tokenizer
        self.bounds = Bounds(
            prompt,
            min(settings.max_tokens or engine.room, engine.room),
            tokenizer.get_vocab_size(),
            prompt * longest_token(tokenizer),
        )
        self.lines = lines or Lines()
        self.metrics = Metrics(engine.counts, lambda: self.places.held)
        engine.watch(self.metrics)
        self.created = int(time())
        self.draining = False
        """Whether new requests are turned away, because the server is about to end."""
        self.closing = asyncio.Event()
        """Everything is answered: what goes on without end ends now."""

    @cached_property
    def spelling(self) -> Spelling:
        """How single tokens are written."""
        return Spelling(self.engine.text)

    def done(self, record: Record) -> None:
        """A request was dealt with: count it, and write a line about it."""
        self.metrics.done(record)
        if record.route != "GET /healthz" and record.route != "GET /readyz":
            self.lines.write(record.fields())

"""The objects that all routes share: engine, limits, admission control, metrics and log."""

from __future__ import annotations

import asyncio
from functools import cached_property
from time import time
from typing import TYPE_CHECKING

from inlay.serve.http.admission import AdmissionControl
from inlay.serve.http.api_keys import Keys
from inlay.serve.http.errors import LONGEST_ECHO, ApiError
from inlay.serve.http.metrics import Metrics
from inlay.serve.http.request_builder import RequestLimits, longest_token
from inlay.serve.http.request_log import LogWriter
from inlay.serve.http.token_text import TokenText

if TYPE_CHECKING:
    from inlay.runtime.engine import Engine
    from inlay.serve.http.request_log import RequestRecord
    from inlay.serve.http.settings import ServerSettings


HEALTH_CHECKS = frozenset({"GET /healthz", "GET /readyz", "GET /health"})


class ServerContext:
    """The shared state of a server with one engine."""

    def __init__(
        self, engine: Engine, settings: ServerSettings, fingerprint: str, log_writer: LogWriter | None = None
    ) -> None:
        self.engine, self.settings, self.fingerprint = engine, settings, fingerprint
        self.keys = Keys(settings.keys)
        most = settings.max_concurrent or engine.slots + engine.settings.max_waiting
        self.admission = AdmissionControl(most, min(most, engine.slots))
        prompt = min(settings.max_prompt or engine.max_seq_len, engine.max_seq_len)
        tokenizer = engine.text.tokenizer
        self.limits = RequestLimits(
            prompt,
            min(settings.max_tokens or engine.max_seq_len, engine.max_seq_len),
            tokenizer.get_vocab_size(),
            prompt * longest_token(tokenizer),
        )
        self.log_writer = log_writer or LogWriter()
        self.metrics = Metrics(engine, settings.name, lambda: self.admission.active)
        engine.add_observer(self.metrics)
        self.created = int(time())
        self.is_draining = False
        """Whether the server is shutting down and rejects new requests."""
        self.shutdown_event = asyncio.Event()
        """Set when all requests are finished; endless streams, such as KV events, stop then."""

    @cached_property
    def token_text(self) -> TokenText:
        """The text of single tokens, for logprobs."""
        return TokenText(self.engine.text)

    def check_model(self, name: str | None) -> None:
        """Raise an error if a request names another model. Some routes need no name."""
        if name is not None and name != self.settings.name:
            message = f"Model {name[:LONGEST_ECHO]!r} not found; this server serves {self.settings.name!r}."
            raise ApiError(404, message, param="model", code="model_not_found")

    def log_request(self, record: RequestRecord) -> None:
        """Count a finished request and log it. Health checks are not logged."""
        self.metrics.count_request(record)
        if record.route not in HEALTH_CHECKS:
            self.log_writer.write(record.fields())

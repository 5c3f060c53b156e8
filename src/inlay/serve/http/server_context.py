"""The objects that all routes share: engine, limits, admission control, metrics and log."""

from __future__ import annotations

import asyncio
from functools import cached_property
from time import time
from typing import TYPE_CHECKING, Protocol

from inlay.serve.http.admission import AdmissionControl
from inlay.serve.http.api_keys import Keys
from inlay.serve.http.errors import LONGEST_ECHO, ApiError
from inlay.serve.http.metrics import Metrics
from inlay.serve.http.request_builder import RequestLimits, longest_token
from inlay.serve.http.request_log import LogWriter
from inlay.serve.http.token_text import TokenText

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from inlay.runtime.measurements import Observer
    from inlay.runtime.request import Request, RequestHandle
    from inlay.runtime.settings import EngineSettings
    from inlay.runtime.text_codec import TextCodec
    from inlay.serve.http.request_log import RequestRecord
    from inlay.serve.http.settings import ServerSettings


HEALTH_CHECKS = frozenset({"GET /healthz", "GET /readyz", "GET /health"})


class ServedEngine(Protocol):
    """What the server needs of an engine: `Engine`, or the engines of a cluster."""

    text: TextCodec
    settings: EngineSettings
    slots: int
    max_seq_len: int

    def submit(self, request: Request, loop: asyncio.AbstractEventLoop | None = None) -> RequestHandle:
        """Accept a request, or raise an error."""

    def add_observer(self, observer: Observer) -> None:
        """Add an observer of measurements."""

    def counts(self) -> dict[str, float]:
        """Return counters and gauges by name."""


class ServerContext:
    """The shared state of a server with one engine."""

    def __init__(
        self,
        engine: ServedEngine,
        settings: ServerSettings,
        fingerprint: str,
        log_writer: LogWriter | None = None,
        scrape: Callable[[], Awaitable[bytes]] | None = None,
    ) -> None:
        """`scrape` returns the page of metrics; by default that of this process."""
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
        self._scrape = scrape
        self.created = int(time())
        self.is_draining = False
        """Whether the server is shutting down and rejects new requests."""
        self.shutdown_event = asyncio.Event()
        """Set when all requests are finished; endless streams, such as KV events, stop then."""

    @cached_property
    def token_text(self) -> TokenText:
        """The text of single tokens, for logprobs."""
        return TokenText(self.engine.text)

    async def metrics_page(self) -> bytes:
        """Return the metrics in Prometheus text format."""
        return self.metrics.text() if self._scrape is None else await self._scrape()

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

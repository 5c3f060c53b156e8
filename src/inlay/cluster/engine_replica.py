"""An engine of a cluster: runs requests that are already tokens, and publishes its KV events."""

from __future__ import annotations

import asyncio
from time import monotonic
from typing import TYPE_CHECKING, Any

from inlay.cluster.config import engine_settings, read_package, text_fingerprint
from inlay.cluster.metrics import ReplicaMetrics
from inlay.cluster.placement import Message, Placement
from inlay.cluster.selector import EngineAddress
from inlay.cluster.tracing import span
from inlay.errors import ProgramError
from inlay.package_cache import model_name
from inlay.runtime.engine import Engine
from inlay.serve.http.metrics import Metrics
from inlay.serve.kv_events.publisher import Publisher

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator

    from inlay.cluster.config import ClusterConfig
    from inlay.runtime.request import Request

HEARTBEAT = 1.0
"""Seconds without a token after which an empty message says that the replica is alive."""
STUCK = 120.0
"""Seconds that a step of a busy engine may take: a chunk of a prompt of a large model takes many."""


class EngineReplica:
    """One engine, in a process of its own. `app.py` gives it to Ray Serve, which calls its methods."""

    def __init__(self, config: ClusterConfig, name: str, address: str) -> None:
        """`name` is unique in the cluster; `address` is where other machines reach this one."""
        manifest, folder = read_package(config)
        self._name, self._package, self._text = name, folder.name, text_fingerprint(manifest)
        self._engine = Engine.open(config.package, engine_settings(config))
        if read_package(config)[1] != folder:
            raise ProgramError(f"{config.package} was replaced while it was loaded.", "Serve starts the replica again.")
        self._metrics = Metrics(self._engine, config.name or model_name(config.package), lambda: 0)
        self._engine.add_observer(self._metrics)
        self._engine.start(warm=True)
        bind, size = f"tcp://{address}:0", self._engine.settings.block_size
        self._publisher = Publisher(self._engine.event_log, size, bind=bind, replay=bind)
        self._steps, self._step_time = -1, monotonic()

    def record_replica_metadata(self) -> dict[str, Any]:
        """Return what the request router must know. Serve calls it once."""
        replay = self._publisher.replay_endpoint or ""
        worker = EngineAddress(self._name, self._publisher.endpoint, replay, self._engine.settings.block_size)
        return {"worker": worker, "text": self._text, "package": self._package}

    def record_autoscaling_stats(self) -> dict[str, float]:
        """Return the load that `autoscaling.queued_tokens_policy` reads."""
        counts = self._engine.counts()
        running = counts["prefill_sequences"] + counts["decode_sequences"]
        waiting = {"queued": counts["waiting_requests"], "queued_tokens": counts["waiting_tokens"]}
        return {**waiting, "running": running, "slots": counts["slots"]}

    def check_health(self) -> None:
        """Raise an error if the engine has work but made no step for `STUCK` seconds."""
        counts = self._engine.counts()
        steps, busy = int(counts["steps"]), counts["prefill_sequences"] + counts["decode_sequences"]
        if steps != self._steps or not busy:
            self._steps, self._step_time = steps, monotonic()
        if not self._engine.is_alive or monotonic() > self._step_time + STUCK:
            raise ProgramError("The engine of this replica makes no progress.", "Serve replaces the replica.")

    def metrics(self) -> ReplicaMetrics:
        """Return the metrics of this replica."""
        return ReplicaMetrics("engine", self._name, self._metrics.text())

    async def generate(self, request: Request, placement: Placement) -> AsyncGenerator[Message, None]:
        """Run a request. A message comes at least every `HEARTBEAT` seconds, also while the request waits."""
        if placement.text != self._text:
            raise ProgramError("The request was tokenized for another package.", "Send it to another replica.")
        with span("inlay.generate", placement, request) as recorded:
            if request.grammar is not None:
                await asyncio.to_thread(self._engine.text.grammars.open, request.grammar)
            answer = self._engine.submit(request, asyncio.get_running_loop())
            try:
                async for outputs in answer.batches(HEARTBEAT):
                    yield Message(self._package, answer.cached_tokens, outputs)
                    recorded.set_attribute("inlay.cached_tokens", answer.cached_tokens)
            finally:
                answer.cancel()

    def close(self) -> None:
        """Stop the engine."""
        self._publisher.close()
        self._engine.close()

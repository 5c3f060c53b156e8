"""The engines of a cluster as one engine: the HTTP server of an ingress runs requests on it as on a local one.

A request whose replica fails is run again on another one. Engines are deterministic: the same request with the same
seed makes the same tokens, alone or in any batch. So an answer that has begun is resumed by running it again; tokens
that the client has are compared and not sent twice. If they differ, the request ends with an error.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
from contextlib import suppress
from dataclasses import replace
from itertools import count
from time import monotonic
from typing import TYPE_CHECKING

from inlay.cluster.config import engine_settings, read_package, text_fingerprint
from inlay.cluster.placement import Fleet, Placement
from inlay.cluster.tracing import span
from inlay.errors import InlayError, ProgramError, UsageError, one_line
from inlay.lowering.executable import CacheSizes
from inlay.runtime.generation_state import check_length
from inlay.runtime.outputs import FinishReason
from inlay.runtime.request import EngineClosedError, EngineUnavailableError, QueueFullError, RequestHandle
from inlay.runtime.text_codec import TextCodec

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Callable

    from inlay.cluster.config import ClusterConfig
    from inlay.cluster.placement import Message
    from inlay.runtime.measurements import Observer
    from inlay.runtime.outputs import TokenOutput
    from inlay.runtime.request import Request

LOGGER = logging.getLogger("ray.serve")
ATTEMPTS = 5
"""How often a request is tried before it ends with an error."""
SILENCE = 8.0
"""Seconds without a message, of several heartbeats, after which an attempt is given up."""
WAITING = 300.0
"""Seconds that a request may wait until a replica has room for it, or one exists that fits."""
CANCEL_SECONDS = 1.0
"""Seconds that a call may take to react when it is cancelled."""
RETRY_PAUSE = 0.2
"""Seconds before the second attempt; each further pause is twice as long."""


COUNTERS = (
    *("retries", "resumed", "predicted_tokens", "cached_tokens"),
    *(f"placements.{kind}" for kind in ("kv", "least_loaded", "random")),
    *(f"attempts_failed.{kind}" for kind in ("failed", "refused", "silent")),
    *(f"selector_failures.{kind}" for kind in ("failed", "timeout", "behind")),
)
"""All counters, so that each is reported as 0 before its first event."""


class RemoteHandle(RequestHandle):
    """A request on some replica. Cancelling it cancels the call."""

    task: asyncio.Task[None] | None = None

    def __init__(self, id_: int, request: Request, loop: asyncio.AbstractEventLoop | None) -> None:
        super().__init__(id_, request, loop)
        self.sent: list[int] = []
        """The tokens that were delivered."""
        self.last_token_time = self.arrival_time

    def cancel(self) -> None:
        """Cancel the request. Called in the event loop that submitted it."""
        super().cancel()
        if self.task is not None and not self.is_finished:  # a finished call ends by itself
            self.task.cancel()
            self.put([], EngineClosedError())  # nothing else comes, and somebody may be reading


class ReplicaLostError(EngineUnavailableError):
    """A replica failed, refused the request, or went silent (`kind`)."""

    def __init__(self, kind: str, problem: str) -> None:
        super().__init__(f"No replica answered: {problem}", "Retry the request.")
        self.kind = kind


def call_error(error: BaseException) -> InlayError:
    """Return what an error of a call means: only an error of the request itself does not lead to another attempt."""
    if isinstance(error, InlayError) and not isinstance(error, QueueFullError | EngineClosedError):
        return error
    kind = "refused" if isinstance(error, InlayError) else "failed"
    return ReplicaLostError(kind, f"{type(error).__name__}: {one_line(error)}.")


class RemoteEngine:
    """Runs requests on the replicas behind a deployment handle. All methods are called in one event loop."""

    def __init__(
        self, call: Callable[[Request, Placement], AsyncGenerator[Message, None]], fleet: Fleet, config: ClusterConfig
    ) -> None:
        """`call` runs `EngineReplica.generate` on a replica. It raises `ReplicaLostError` where another may succeed."""
        manifest, folder = read_package(config)
        cache = CacheSizes.from_bindings(manifest.bindings)
        if cache is None:
            raise UsageError(f"{config.package} has no KV cache.", "Build it from a language model.")
        self.max_seq_len = cache.max_seq_len
        self.text = TextCodec.load(folder / "tokenizer")
        self.settings = replace(engine_settings(config), max_waiting=config.queue * config.most_replicas)
        self.slots = min(config.slots or cache.slots, cache.slots) * config.most_replicas
        self.fleet = fleet
        self._call, self._fingerprint = call, text_fingerprint(manifest)
        self._running: dict[int, RemoteHandle] = {}
        self._observers: list[Observer] = []
        self._next, self._process = 0, secrets.token_hex(4)

    def add_observer(self, observer: Observer) -> None:
        """Add an observer of measurements."""
        self._observers.append(observer)

    def submit(self, request: Request, loop: asyncio.AbstractEventLoop | None = None) -> RequestHandle:
        """Start a request; its outputs are delivered in the running event loop."""
        check_length(len(request.prompt), self.max_seq_len, request.max_tokens)
        if not request.sampling.is_greedy and request.sampling.seed is None:  # a second attempt needs the same
            request = replace(request, sampling=replace(request.sampling, seed=secrets.randbits(63)))
        answer = RemoteHandle(self._next, request, loop)
        self._next += 1
        self._running[answer.id] = answer
        answer.task = asyncio.get_running_loop().create_task(self._run(answer))
        answer.task.add_done_callback(lambda task: self._running.pop(answer.id, None))
        return answer

    def counts(self) -> dict[str, float]:
        """Return the counters of the fleet, and what is in flight from this ingress."""
        running = list(self._running.values())  # called in another thread
        begun = [each for each in running if each.sent]
        waiting = [each for each in running if not each.sent]
        now = {
            "waiting_requests": len(waiting),
            "waiting_tokens": sum(len(each.request.prompt) for each in waiting),
            "running_tokens": sum(len(each.request.prompt) + len(each.sent) for each in begun),
            "prefill_sequences": 0,
            "decode_sequences": len(begun),
        }
        return {**dict.fromkeys(COUNTERS, 0), **self.fleet.counts, **now, "slots": self.slots, "blocks": 0}

    async def _run(self, answer: RemoteHandle) -> None:
        """Try a request until it ends; the last error ends it."""
        request, package, avoid, error = answer.request, None, frozenset[str](), None
        failures = 0.0
        for attempt in count():
            if failures >= ATTEMPTS:
                break
            if attempt:
                self.fleet.counts["retries"] += 1
                await asyncio.sleep(RETRY_PAUSE * 2 ** max(0, int(failures) - 1))
            name = f"{self._process}-{request.id}-{answer.id}-{attempt}"
            load = len(request.prompt) + request.max_tokens
            placement = Placement(name, self._fingerprint, package, fleet=self.fleet, avoid=avoid, load=load)
            try:
                with span("inlay.attempt", placement, request) as recorded:
                    await self._attempt(answer, placement)
                    recorded.set_attribute("inlay.replica", placement.replica or "")
                    recorded.set_attribute("inlay.tokens", len(answer.sent))
                return
            except ReplicaLostError as lost:
                self.fleet.counts[f"attempts_failed.{lost.kind}"] += 1
                if lost.kind == "silent" and placement.replica is not None:
                    self.fleet.suspect(placement.replica)
                error, package = lost, placement.package if answer.sent else None
                # a request that no replica has accepted yet may also wait where all are full
                is_waiting = lost.kind == "silent" and placement.accept_time is None
                failures += ATTEMPTS * SILENCE / WAITING if is_waiting else 1
                avoid |= {placement.replica} if placement.replica else set()
                LOGGER.warning("request %s, attempt %d on %s: %s", name, attempt + 1, placement.replica, lost)
            except InlayError as failed:
                answer.put([], failed)
                return
            except Exception as failed:
                LOGGER.exception("request %s failed", name)
                answer.put([], ProgramError(f"Internal error: {one_line(failed)}.", "Please report it."))
                return
            finally:
                self.fleet.end(placement)
        answer.put([], error)

    async def _attempt(self, answer: RemoteHandle, placement: Placement) -> None:
        """Run a request on one replica, and deliver the tokens that an earlier attempt did not."""
        call = self._call(answer.request, placement)
        seen, is_finished = 0, False
        try:
            while (message := await _next_message(call, placement)) is not None:
                placement.package = message.package
                if message.outputs and not seen:
                    self._start_decode(answer, placement, message.cached_tokens)
                fresh = _skip_sent(message.outputs, answer.sent, seen)
                seen += len(message.outputs)
                if fresh:
                    self._deliver(answer, fresh)
                is_finished |= bool(message.outputs) and message.outputs[-1].finish_reason is not None
        except ReplicaLostError:
            if not is_finished:
                raise
        finally:
            with suppress(RuntimeError):  # it did not react to being cancelled
                await call.aclose()
        if not is_finished:
            raise ReplicaLostError("failed", "The replica ended the answer early.")

    def _start_decode(self, answer: RemoteHandle, placement: Placement, cached: int) -> None:
        if placement.accept_time is not None:
            self._observe("placement_seconds", placement.accept_time - placement.start_time)
        if not answer.sent:
            answer.cached_tokens = cached
            self._observe("first_token_seconds", monotonic() - answer.arrival_time)
        else:
            self.fleet.counts["resumed"] += 1
        self.fleet.start_decode(placement, cached, self.settings.block_size)

    def _deliver(self, answer: RemoteHandle, outputs: list[TokenOutput]) -> None:
        now = monotonic()
        if answer.sent:
            self._observe("inter_token_seconds", (now - answer.last_token_time) / len(outputs))
        answer.last_token_time = now
        answer.sent += [each.token for each in outputs]
        answer.put(outputs)

    def _observe(self, name: str, value: float) -> None:
        for observer in self._observers:
            observer.observe(name, value)


async def _next_message(call: AsyncGenerator[Message, None], placement: Placement) -> Message | None:
    """Return the next message of a call, or None at its end. Raise an error after too long without a sign of life."""
    coming = asyncio.ensure_future(anext(call, None))
    try:
        while not coming.done():
            if placement.accept_time is None and monotonic() > placement.start_time + WAITING:
                raise EngineUnavailableError(f"No replica took the request within {WAITING:.0f} s.", "Try again later.")
            if placement.last_sign is not None and monotonic() > placement.last_sign + SILENCE:
                raise ReplicaLostError("silent", f"No sign of life for {SILENCE:.0f} s.")
            await asyncio.wait((coming,), timeout=SILENCE / 8)
    finally:
        if not coming.done():
            coming.cancel()
            await asyncio.wait((coming,), timeout=CANCEL_SECONDS)
    placement.last_sign = monotonic()
    if coming.cancelled():  # by Serve: this task was not cancelled
        raise ReplicaLostError("failed", "The call was cancelled.")
    return coming.result()


def _skip_sent(outputs: list[TokenOutput], sent: list[int], seen: int) -> list[TokenOutput]:
    """Return the outputs that are new. Those that were sent before must be the same."""
    if outputs and outputs[-1].finish_reason in (FinishReason.CANCELLED, FinishReason.TIMEOUT):
        raise ReplicaLostError("failed", "The replica was stopped.")
    again = min(len(outputs), max(0, len(sent) - seen))
    if [each.token for each in outputs[:again]] != sent[seen : seen + again]:
        raise ProgramError("The replica failed, and another one continued differently.", "Send the request again.")
    return outputs[again:]

"""The engine runs many requests on one package, with continuous batching and a shared prefix cache.

A step is one decode call for all sequences in the decode phase, and a chunk of prefill for the others.
`inlay.runtime.scheduler.schedule` plans each step; the engine executes it.
"""

from __future__ import annotations

import atexit
import math
import threading
from collections import Counter, defaultdict
from concurrent.futures import Future
from contextlib import suppress
from functools import partial
from pathlib import Path
from time import monotonic
from typing import TYPE_CHECKING

import numpy as np
import torch

from inlay.errors import InlayError, ProgramError, UsageError, one_line
from inlay.program.decoder import SIGNATURE
from inlay.runtime.decode_replay import open_steps
from inlay.runtime.generation_state import GenerationState
from inlay.runtime.grammar import MaskWorker
from inlay.runtime.kv import disk
from inlay.runtime.kv.block_manager import BlockManager
from inlay.runtime.kv.events import EventLog
from inlay.runtime.kv.memory import KVMemory, bytes_per_token
from inlay.runtime.kv.prefix_cache import PrefixCache, SequenceState
from inlay.runtime.measurements import COUNTERS
from inlay.runtime.outputs import FinishReason, TokenOutput
from inlay.runtime.request import EngineClosedError, QueueFullError, RequestHandle, put_all
from inlay.runtime.sampling import check_finite
from inlay.runtime.scheduler import Limits, RunningSequence, WaitingRequest, schedule
from inlay.runtime.settings import EngineSettings
from inlay.runtime.speculation import Speculation

if TYPE_CHECKING:
    import asyncio
    from collections.abc import Sequence as Several

    from inlay.lowering.executable import Executable
    from inlay.runtime.grammar import Masks
    from inlay.runtime.measurements import Observer
    from inlay.runtime.request import Request
    from inlay.runtime.speculation import Row
    from inlay.runtime.text_codec import TextCodec


class Engine:
    """Runs requests on a package in its own thread."""

    def __init__(self, package: Executable, text: TextCodec, settings: EngineSettings | None = None) -> None:
        self.text = text
        self.settings = settings = settings or EngineSettings()
        states = package.bindings.state
        if not states or package.initial or package.cache is None:
            raise UsageError("This package has no KV cache that can be served.", "Build it from a language model.")
        sizes = package.cache
        self.slots, self.max_seq_len = min(settings.slots or sizes.slots, sizes.slots), sizes.max_seq_len
        per_block = bytes_per_token(states) * settings.block_size
        slot_bytes = sum(row.nbytes for row in states) // sizes.slots
        per_sequence = per_block * self.max_seq_len // settings.block_size  # blocks have no rings
        cache_bytes = per_sequence * self.slots if settings.cache_bytes is None else settings.cache_bytes
        places = (cache_bytes // per_block, settings.host_bytes // per_block)
        prefill = min(settings.max_prefill_tokens, package.max_prefill)
        prefill_only = min(settings.max_prefill_only_tokens, package.max_prefill)
        longest = max(prefill, prefill_only)
        most = min(sizes.rooms) - longest + 1
        if places[0] and min(sizes.rooms) < sizes.max_seq_len and settings.block_size > most:
            problem = f"A block of {settings.block_size} tokens may be overwritten before it is copied."
            raise UsageError(problem, f"Use a block_size of at most {most}.")
        self.memory_bytes = slot_bytes * self.slots + sum(places) * per_block
        self.event_log = EventLog()
        self.cache = (
            BlockManager(places if places[1] else places[:1], settings.block_size, self.event_log.add)
            if places[0]
            else None
        )
        with package.device:  # what is allocated here is allocated there
            self._memory = KVMemory(states, settings.block_size, places if places[0] else (), self.slots)
        self._populate_thread = self._memory.populate() if package.device.type == "cpu" else None
        self._counts: Counter[str] = Counter()
        self._files = None if settings.disk_folder is None else self._open_files(settings.disk_folder, package)
        self._prefix_cache = PrefixCache(
            *(self.cache, self._memory, self._counts),
            can_store_generated=not package.has_decode_buckets,
            files=self._files,
        )
        self._package = open_steps(package, self._memory.state)
        fixed = {
            bucket.sizes.get("batch", (1, None)) for bucket, _ in package.buckets if bucket.sizes["length"][0] == 1
        }
        batches = tuple(sorted(low for low, high in fixed if low == high))
        self._limits = Limits(self.slots, prefill, prefill_only, batches)
        # Rings have room for the rows of a prefill call.
        self.speculation = Speculation(package, min(settings.speculation, longest - 1))
        self._waiting: dict[int, SequenceState] = {}
        self._running: dict[int, SequenceState] = {}
        self._outputs: dict[asyncio.AbstractEventLoop | None, list[tuple[RequestHandle, TokenOutput | InlayError]]] = (
            defaultdict(list)
        )
        self._observers: list[Observer] = []
        self._changed = threading.Condition()
        self._next, self._closing, self._stop = 0, False, False
        self._last_finish_time, self._pace = monotonic(), 1.0
        self._thread: threading.Thread | None = None
        self._masks = MaskWorker()

    @classmethod
    def open(cls, package: Path | str, settings: EngineSettings | None = None) -> Engine:
        """Return an engine for the package in a folder."""
        from inlay.package.loader import load_package
        from inlay.runtime.text_codec import TextCodec

        loaded = load_package(package)
        return cls(loaded, TextCodec.load(Path(loaded.folder, "tokenizer")), settings)

    def _open_files(self, folder: Path, package: Executable) -> disk.BlockFiles:
        if self.cache is None or not package.version:
            problem = "Blocks on disk need a prefix cache in memory, and a program that was loaded from a package."
            raise UsageError(problem, "Allow memory for the cache, and build a package, or do without blocks on disk.")
        settings = self.settings
        by = disk.identity(package.version, settings.block_size, package.device.type, settings.disk_owner)
        return disk.BlockFiles(folder, settings.disk_bytes, by, self._memory.block_bytes)

    def add_observer(self, observer: Observer) -> None:
        """Add an observer of measurements."""
        self._observers.append(observer)

    def start(self, *, warm: bool = False) -> None:
        """Start the engine thread. `warm`: first allocate the memory of the caches and the workspace of calls."""
        ready: Future[None] = Future()
        self._thread = threading.Thread(target=self._work, args=(ready, warm), name="inlay-engine", daemon=True)
        self._thread.start()
        atexit.register(self.close)  # a thread in native code at interpreter exit would crash the process
        ready.result()

    def submit(
        self, request: Request, loop: asyncio.AbstractEventLoop | None = None, *, wait: bool = False
    ) -> RequestHandle:
        """Accept a request, or raise QueueFullError. Tokens are delivered to `loop` if one is given.

        With `wait`, block until the queue has room instead of raising.
        """
        generation = GenerationState(request, self.text, self.max_seq_len)
        with self._changed:
            if wait:
                self._changed.wait_for(lambda: self._closing or not self.is_full)
            if self._closing:
                raise EngineClosedError
            if self.is_full:
                self._counts["rejected"] += 1
                raise QueueFullError(len(self._waiting), max(1.0, math.ceil(len(self._waiting) * self._pace)))
            answer = RequestHandle(self._next, request, loop)
            self._waiting[answer.id] = SequenceState(answer, generation)
            self._next += 1
            self._counts["accepted"] += 1
            self._changed.notify_all()
        return answer

    @property
    def is_alive(self) -> bool:
        """Whether the engine thread runs."""
        return self._thread is not None and self._thread.is_alive()

    @property
    def is_full(self) -> bool:
        """Whether `submit` would raise QueueFullError."""
        return len(self._waiting) + len(self._running) >= self.slots + self.settings.max_waiting

    def close(self) -> None:
        """Stop the engine at once. Unfinished requests are cancelled."""
        with self._changed:
            self._closing = self._stop = True
            self._changed.notify_all()
        if self._thread is not None:
            self._thread.join()
            atexit.unregister(self.close)
        self._masks.close()
        for sequence in [*self._waiting.values(), *self._running.values()]:
            self._abort(sequence, FinishReason.CANCELLED)
        self._deliver()
        if self._files is not None:
            self._files.close()

    def counts(self) -> dict[str, float]:
        """Return counters since the start and current gauges, by name."""
        running, waiting = list(self._running.values()), list(self._waiting.values())
        reading = sum(bool(each.prefill_tokens_left) for each in running)
        now = {
            "waiting_requests": len(waiting),
            "waiting_tokens": sum(len(each.generation.history) for each in waiting),
            "running_tokens": sum(len(each.generation.history) for each in running),
            "prefill_sequences": reading,
            "decode_sequences": len(running) - reading,
        }
        fixed = {"slots": self.slots, "kv_memory_bytes": self.memory_bytes}
        fixed |= dict.fromkeys(("blocks", "blocks_used", "disk_bytes"), 0)
        if self.cache is not None:
            fixed |= {"blocks": sum(self.cache.capacities), "blocks_used": len(self.cache)}
        if self._files is not None:
            fixed |= {"disk_bytes": self._files.bytes, **self._files.counts}
        zero = dict.fromkeys(COUNTERS, 0)
        return {**zero, **self._counts, **now, **fixed, "events": self.event_log.next}

    def step(self) -> bool:
        """Run one step; return whether there was anything to do."""
        started = monotonic()
        self._abort_expired(started)
        free = len(self._running) < self.slots
        with self._changed:
            waiting = [
                WaitingRequest(each.handle.id, each.handle.id, each.handle.request.priority, each.handle.request.owner)
                for each in self._waiting.values()
            ]
        drafts = self.speculation.draft(each for each in self._running.values() if not each.prefill_tokens_left)
        running = [
            RunningSequence(
                id=each.handle.id,
                arrival=each.handle.id,
                slot=each.slot,
                prefill_tokens_left=each.prefill_tokens_left,
                priority=each.handle.request.priority,
                owner=each.handle.request.owner,
                drafted_tokens=len(drafts.get(each.handle.id, ())),
            )
            for each in self._running.values()
        ]
        plan = schedule(waiting if free else (), running, self._limits)
        for number, slot in plan.admit:
            self._admit(number, slot, started)
        answering = [self._running[number] for number in plan.decode]
        if answering:
            self._decode(answering, [drafts.get(number, []) for number in plan.decode], plan.padding)
        for number, count in plan.prefill:
            self._prefill(self._running[number], count)
        if not (plan.admit or plan.decode or plan.prefill):
            return False
        self._counts["steps"] += 1
        seconds = monotonic() - started
        self._counts["step_microseconds"] += round(seconds * 1e6)
        self._observe("step_seconds", seconds)
        return True

    def _work(self, ready: Future[None], warm: bool) -> None:
        try:
            if warm:
                self._warm_up()
            ready.set_result(None)
        except Exception as error:
            ready.set_exception(error)
            return
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._waiting or self._running or self._stop)
                if self._stop:
                    return
            try:
                self.step()
            except Exception as error:  # fail the running requests, keep serving others
                self._counts["fallback.step_failed"] += 1
                told = ProgramError(f"An engine step failed: {one_line(error)}.")
                for sequence in list(self._running.values()):
                    self._fail(sequence, told)
                self._deliver()

    def _warm_up(self) -> None:
        """Run one prefill chunk and one decode of all slots, at the end of the slots, past the rows of any sequence."""
        self.text.grammars.preload()
        if self._populate_thread is not None:
            self._populate_thread.join()
        chunk = self._limits.max_prefill_tokens
        for batch, length, prompt in ((1, chunk, True), (self.slots, 1, False)):
            given = {SIGNATURE.tokens: _numbers([[0] * length] * batch), SIGNATURE.slots: torch.arange(batch)}
            lengths = torch.full((batch,), self.max_seq_len - length)
            self._package({**self._memory.state, **given, SIGNATURE.lengths: lengths}, is_prefill=prompt)

    def _abort_expired(self, now: float) -> None:
        """Abort cancelled and timed-out requests."""
        for sequence in [*self._running.values(), *self._waiting.values()]:
            deadline = sequence.handle.deadline
            if sequence.handle.is_cancelled:
                self._abort(sequence, FinishReason.CANCELLED)
            elif deadline is not None and now > deadline:
                self._abort(sequence, FinishReason.TIMEOUT)
        self._deliver()

    def _admit(self, number: int, slot: int, now: float) -> None:
        with self._changed:
            sequence = self._running[number] = self._waiting.pop(number)
        sequence.slot = slot
        self._observe("queue_seconds", now - sequence.handle.arrival_time)

    def _decode(self, sequences: Several[SequenceState], drafts: Several[list[int]], padding: Several[int]) -> None:
        """Generate the next token of each sequence, and those after it while they are equal to its draft."""
        rows = [
            ([token], each.slot, each.computed_tokens + place)
            for each, draft in zip(sequences, drafts, strict=True)
            for place, token in enumerate([each.generation.history[-1], *draft])
        ]
        self._counts["padding_rows"] += len(padding)
        self._observe("batch", len(sequences))
        masks = self._masks.start(each.generation.matcher for each in sequences)
        call = partial(self._call, sequences, prompt=False)
        scores = call([*rows, *(([0], slot, 0) for slot in padding)])
        if scores is None or (any(drafts) and not self.speculation.is_exact(rows, scores, call)):
            return  # if it is not exact, the next step repeats it without drafts
        self._sample(sequences, scores[: len(rows)], 1, masks, drafts)

    def _prefill(self, sequence: SequenceState, count: int) -> None:
        """Compute the next chunk of a prompt; after the last chunk, sample the first token."""
        request = sequence.handle.request
        has_logprobs = request.prompt_logprobs is not None
        if has_logprobs:
            sequence.has_lookup = sequence.is_cache_full = True  # blocks have no logits
            count = min(count, self.speculation.max_rows)
        if not sequence.has_lookup:
            self._prefix_cache.reuse(sequence)
            if not sequence.has_lookup:
                return  # the next step goes on with it
        slot, start = sequence.slot, sequence.computed_tokens
        part = list(request.prompt[start : start + count])
        is_last = sequence.prefill_tokens_left == len(part)
        masks = self._masks.start([sequence.generation.matcher] if is_last else ())
        rows = [(part, slot, start)]
        if has_logprobs:  # a call returns the logits of the last token of each row only
            rows = [([token], slot, start + place) for place, token in enumerate(part)]
        scores = self._call([sequence], rows, prompt=not has_logprobs)
        if scores is None:
            return
        self._counts["prompt_tokens"] += len(part)
        if has_logprobs:
            sequence.generation.add_prompt_logprobs(scores)
        if is_last:
            self._sample([sequence], scores[-1:], len(part), masks)
        else:
            sequence.computed_tokens += len(part)
            self._prefix_cache.store(sequence)

    def _call(self, sequences: Several[SequenceState], rows: list[Row], *, prompt: bool) -> torch.Tensor | None:
        """Return the logits after the last token of each row. If the call fails, abort the sequences; return None."""
        try:
            return self._run(rows, prompt=prompt)
        except Exception as error:
            self._counts["fallback.call_failed"] += 1
            if not isinstance(error, InlayError):
                error = ProgramError(f"A call of the package failed: {one_line(error)}.")
            for sequence in sequences:
                self._fail(sequence, error)
            self._deliver()
            return None

    def _run(self, rows: list[Row], *, prompt: bool = False) -> torch.Tensor:
        tokens, slots, lengths = zip(*rows, strict=True)
        given = {SIGNATURE.tokens: _numbers(tokens), SIGNATURE.slots: _numbers(slots)}
        given[SIGNATURE.lengths] = _numbers(lengths)
        started = monotonic()
        results = self._package({**self._memory.state, **given}, is_prefill=prompt)
        seconds = monotonic() - started
        if not prompt:
            self.speculation.costs.note(len(tokens), seconds)
        self._counts["call_microseconds"] += round(seconds * 1e6)
        self._counts["calls"] += 1
        self._counts["rows"] += len(tokens) * len(tokens[0])
        scores: torch.Tensor = results[SIGNATURE.logits][:, -1]
        return scores.float()

    def _sample(
        self,
        sequences: Several[SequenceState],
        scores: torch.Tensor,
        rows: int,
        masks: Masks,
        drafts: Several[list[int]] | None = None,
    ) -> None:
        """Sample a token for each sequence, among those that its mask allows, and deliver it.

        With drafts, a sequence has one more row for each drafted token. It is sampled if that token was sampled.
        """
        numbers = scores.numpy()
        likeliest = numbers.argmax(-1).tolist()
        now, row = monotonic(), 0
        for place, sequence in enumerate(sequences):
            mask, draft, accepted = masks.get(place), drafts[place] if drafts else [], 0
            for expected in (*draft, None):
                sequence.computed_tokens += rows
                token = self._sample_row(sequence, scores[row + accepted], likeliest[row + accepted], mask, now)
                if token is None or token != expected:
                    break
                mask, accepted = None, accepted + 1
            if draft:
                self._counts["drafted_tokens"] += len(draft)
                self._counts["accepted_tokens"] += accepted
                sequence.drafter.note(accepted, rejected=token is not None and accepted < len(draft))
            row += 1 + len(draft)
        self._deliver()
        for sequence in sequences:
            self._prefix_cache.store(sequence)
            if sequence.handle.id not in self._running:
                self._prefix_cache.release(sequence)

    def _sample_row(
        self, sequence: SequenceState, scores: torch.Tensor, best: int, mask: Future[np.ndarray] | None, now: float
    ) -> int | None:
        """Sample a token and add it to the outputs; return it, or None if the sequence ended.

        `best` is the likeliest token. Without a mask, that of the sequence's grammar is computed here.
        """
        writer = sequence.generation
        try:
            check_finite(float(scores[best]))
            matcher = writer.matcher
            allowed = None if matcher is None else matcher.allowed() if mask is None else mask.result()
            is_best = writer.is_plain_greedy and (allowed is None or (best < len(allowed) and allowed[best]))
            token = best if is_best else writer.sample(scores, allowed)
            likelihood = writer.logprobs(scores, token)
            text, finish = writer.add(token)
        except Exception as error:  # of this sequence only
            told = error if isinstance(error, InlayError) else ProgramError(f"Sampling failed: {one_line(error)}.")
            self._fail(sequence, told)
            return None
        first = sequence.last_token_time == sequence.handle.arrival_time
        prompt = tuple(writer.prompt_logprobs) if first and writer.request.prompt_logprobs is not None else None
        piece = TokenOutput(text, token, now - sequence.handle.arrival_time, finish, likelihood, prompt)
        self._outputs[sequence.handle.loop].append((sequence.handle, piece))
        self._observe("first_token_seconds" if first else "inter_token_seconds", now - sequence.last_token_time)
        sequence.last_token_time = now
        self._counts["generation_tokens"] += 1
        if finish:
            self._finish(sequence, finish)
        return None if finish else token

    def _abort(self, sequence: SequenceState, finish: FinishReason) -> None:
        token = sequence.generation.history[-1]
        piece = TokenOutput(sequence.generation.flush(), token, monotonic() - sequence.handle.arrival_time, finish)
        self._outputs[sequence.handle.loop].append((sequence.handle, piece))
        self._finish(sequence, finish)
        self._prefix_cache.release(sequence)

    def _fail(self, sequence: SequenceState, error: InlayError) -> None:
        self._outputs[sequence.handle.loop].append((sequence.handle, error))
        self._finish(sequence, "failed")
        self._prefix_cache.release(sequence)

    def _finish(self, sequence: SequenceState, how: str) -> None:
        """Count a finished sequence and free its slot."""
        self._counts[f"finished.{how}"] += 1
        now = monotonic()
        self._pace += 0.1 * (min(now - self._last_finish_time, 10.0) - self._pace)
        self._last_finish_time = now
        with self._changed:
            self._waiting.pop(sequence.handle.id, None)
            self._running.pop(sequence.handle.id, None)
            self._changed.notify_all()

    def _deliver(self) -> None:
        """Deliver all outputs: directly to threads, and by one call to each event loop."""
        outputs = [(loop, self._outputs.pop(loop)) for loop in list(self._outputs)]
        for loop, made in outputs:
            if loop is None:
                put_all(made)
            else:
                with suppress(RuntimeError):  # the loop was closed, so nobody reads
                    loop.call_soon_threadsafe(put_all, made)

    def _observe(self, name: str, value: float) -> None:
        for observer in self._observers:
            observer.observe(name, value)


def _numbers(values: Several[int] | Several[list[int]]) -> torch.Tensor:
    """Return the values as a tensor, through numpy, which converts lists faster."""
    return torch.from_numpy(np.array(values, dtype=np.int64))

"""The engine: many requests at once on one package. They join and leave at every step, and share what is cached.

A step is one call of the package for all sequences that answer, and a chunk of the prompts that are still being read.
What comes next is decided by `schedule`; here it is done.
"""

from __future__ import annotations

import atexit
import math
import threading
from collections import Counter, defaultdict
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from time import monotonic
from typing import TYPE_CHECKING, Protocol

import numpy as np
import torch

from inlay.errors import InlayError, ProgramError, UsageError, one_line
from inlay.runtime.kv.events import Log
from inlay.runtime.kv.manager import Manager
from inlay.runtime.kv.memory import Memory, bytes_per_token
from inlay.runtime.pieces import Finish, Piece
from inlay.runtime.prefixes import Prefixes, Sequence
from inlay.runtime.request import Answer, Closed, Full
from inlay.runtime.schedule import Ask, Limits, Running, schedule
from inlay.runtime.writing import Writer

if TYPE_CHECKING:
    import asyncio
    from collections.abc import Sequence as Several

    from inlay.compile.execute import Executable
    from inlay.runtime.request import Request
    from inlay.runtime.text import Text


@dataclass(frozen=True)
class Settings:
    """How much an engine may take, and how it shares its time."""

    slots: int | None = None
    """Sequences at once; by default as many as the package has room for."""
    queue: int = 64
    """Requests that may wait for a slot."""
    chunk: int = 64
    """Tokens of prompts that are read in one step while others wait for their next token."""
    alone: int = 512
    """The same when nobody waits."""
    block: int = 32
    """Tokens in a block of the cache."""
    cache_bytes: int | None = None
    """Memory for blocks; by default as much as the slots take. 0: nothing is kept."""
    host_bytes: int = 0
    """Memory for blocks on the second level, which those move to that are pushed out of the first."""


class Observer(Protocol):
    """Somebody who wants to know how long things took."""

    def observe(self, name: str, value: float) -> None:
        """Called in the engine's thread: must be quick."""
        ...


class Engine:
    """Answers requests on a package, in a thread of its own."""

    def __init__(self, package: Executable, text: Text, settings: Settings | None = None) -> None:
        self.text = text
        self.settings = settings = settings or Settings()
        states = package.bindings.state
        if not states or package.initial:
            raise UsageError("This package has no cache that can be served.", "Build it from a language model.")
        count, _, room, _ = (int(size) for size in states[0].shape)
        self.slots, self.room = min(settings.slots or count, count), room
        per_block = bytes_per_token(states) * settings.block
        slot_bytes = per_block * room // settings.block
        cache_bytes = slot_bytes * self.slots if settings.cache_bytes is None else settings.cache_bytes
        places = (cache_bytes // per_block, settings.host_bytes // per_block)
        self.memory_bytes = slot_bytes * self.slots + sum(places) * per_block
        self.log = Log()
        self.cache = Manager(places if places[1] else places[:1], settings.block, self.log.add) if places[0] else None
        self._memory = Memory(states, settings.block, places if places[0] else (), self.slots)
        self._populating = self._memory.populate()
        self._counts: Counter[str] = Counter()
        self._prefixes = Prefixes(self.cache, self._memory, self._counts, answers=not package.has_phases)
        self._package = package
        fixed = {
            bucket.sizes.get("batch", (1, None)) for bucket, _ in package.buckets if bucket.sizes["length"][0] == 1
        }
        batches = tuple(sorted(low for low, high in fixed if low == high))
        self._limits = Limits(self.slots, settings.chunk, settings.alone, batches)
        self._waiting: dict[int, Sequence] = {}
        self._running: dict[int, Sequence] = {}
        self._out: dict[asyncio.AbstractEventLoop | None, list[tuple[Answer, Piece | InlayError]]] = defaultdict(list)
        self._observers: list[Observer] = []
        self._changed = threading.Condition()
        self._next, self._closing, self._stop, self._forget = 0, False, False, False
        self._ended, self._pace = monotonic(), 1.0
        self._thread: threading.Thread | None = None

    @classmethod
    def open(cls, package: Path | str, settings: Settings | None = None) -> Engine:
        """An engine on the package in a folder."""
        from inlay.compile.load import load_package
        from inlay.runtime.text import Text

        loaded = load_package(package)
        return cls(loaded, Text.load(Path(loaded.folder, "tokenizer")), settings)

    def watch(self, observer: Observer) -> None:
        """Tell somebody how long things take."""
        self._observers.append(observer)

    def start(self, *, warm: bool = False) -> None:
        """Begin to answer. `warm`: before that, take the memory of the caches and what calls need beside it."""
        ready: Future[None] = Future()
        self._thread = threading.Thread(target=self._work, args=(ready, warm), name="inlay-engine", daemon=True)
        self._thread.start()
        atexit.register(self.close)  # a thread that is in native code when the interpreter goes takes the process along
        ready.result()

    def submit(self, request: Request, loop: asyncio.AbstractEventLoop | None = None) -> Answer:
        """Take a request, or say at once that it cannot be taken. Pieces come to `loop` where one is given."""
        with self._changed:
            if self._closing:
                raise Closed
            if len(self._waiting) + len(self._running) >= self.slots + self.settings.queue:
                self._counts["refused"] += 1
                raise Full(len(self._waiting), max(1.0, math.ceil(len(self._waiting) * self._pace)))
            answer = Answer(self._next, request, loop)
            self._waiting[answer.id] = Sequence(answer, Writer(request, self.text, self.room))
            self._next += 1
            self._counts["accepted"] += 1
            self._changed.notify_all()
        return answer

    def drain(self, seconds: float | None = None) -> bool:
        """Take no more requests, and wait until all are answered; whether they are."""
        with self._changed:
            self._closing = True
            return self._changed.wait_for(lambda: not self._waiting and not self._running, seconds)

    def close(self) -> None:
        """End now. Answers in the making are cancelled."""
        with self._changed:
            self._closing = self._stop = True
            self._changed.notify_all()
        if self._thread is not None:
            self._thread.join()
            atexit.unregister(self.close)
        for sequence in [*self._waiting.values(), *self._running.values()]:
            self._break_off(sequence, Finish.CANCELLED)
        self._hand_out()

    def clear_cache(self) -> None:
        """Forget all blocks that no sequence relies on."""
        with self._changed:
            self._forget = True
            self._changed.notify_all()

    def counts(self) -> dict[str, float]:
        """How much was done since the start, and how things stand."""
        running = list(self._running.values())
        reading = sum(bool(each.left) for each in running)
        now = {"waiting": len(self._waiting), "reading": reading, "answering": len(running) - reading}
        fixed = {"slots": self.slots, "memory_bytes": self.memory_bytes, "blocks": 0, "blocks_held": 0}
        if self.cache is not None:
            fixed |= {"blocks": sum(self.cache.places), "blocks_held": len(self.cache)}
        zero = dict.fromkeys(_COUNTED, 0)
        return {**zero, **self._counts, **now, **fixed, "events": self.log.next}

    def step(self) -> bool:
        """One step; whether there was anything to do."""
        started = monotonic()
        self._let_go(started)
        free = len(self._running) < self.slots
        with self._changed:
            waiting = [
                Ask(each.answer.id, each.answer.id, each.answer.request.priority, each.answer.request.owner)
                for each in self._waiting.values()
            ]
        running = [
            Running(
                *(each.answer.id, each.answer.id, each.slot, each.left),
                *(each.answer.request.priority, each.answer.request.owner),
            )
            for each in self._running.values()
        ]
        plan = schedule(waiting if free else (), running, self._limits)
        for number, slot in plan.join:
            self._join(number, slot, started)
        answering = [self._running[number] for number in plan.answer]
        if answering:
            self._answer(answering, plan.padding)
        for number, count in plan.read:
            self._read(self._running[number], count)
        if not (plan.join or plan.answer or plan.read):
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
                self._changed.wait_for(lambda: self._waiting or self._running or self._stop or self._forget)
                if self._stop:
                    return
            try:
                self.step()
            except Exception as error:  # whatever it was: who waits is told, and others are served
                self._counts["fallback.step_failed"] += 1
                told = ProgramError(f"A step failed: {one_line(error)}.")
                for sequence in list(self._running.values()):
                    self._fail(sequence, told)
                self._hand_out()

    def _warm_up(self) -> None:
        """A chunk of a prompt and a token for every slot, on full slots: beyond the length of every sequence."""
        if self._populating is not None:
            self._populating.join()
        chunk = min(self.settings.chunk, self.room)
        for batch, length, prompt in ((1, chunk, True), (self.slots, 1, False)):
            given = {"input_ids": _numbers([[0] * length] * batch), "slots": torch.arange(batch)}
            lengths = torch.full((batch,), self.room - length)
            self._package({**self._memory.state, **given, "lengths": lengths}, prompt=prompt)

    def _let_go(self, now: float) -> None:
        """End what nobody wants or what took too long."""
        if self._forget and self.cache is not None:
            self.cache.clear()
        self._forget = False
        for sequence in [*self._running.values(), *self._waiting.values()]:
            deadline = sequence.answer.deadline
            if sequence.answer.cancelled:
                self._break_off(sequence, Finish.CANCELLED)
            elif deadline is not None and now > deadline:
                self._break_off(sequence, Finish.TIMEOUT)
        self._hand_out()

    def _join(self, number: int, slot: int, now: float) -> None:
        with self._changed:
            sequence = self._running[number] = self._waiting.pop(number)
        sequence.slot = slot
        self._observe("queue_seconds", now - sequence.answer.asked)

    def _answer(self, sequences: Several[Sequence], padding: Several[int]) -> None:
        """The next token of all that answer."""
        tokens = [[each.writer.history[-1]] for each in sequences] + [[0]] * len(padding)
        slots, rows = [each.slot for each in sequences], [each.rows for each in sequences]
        self._counts["padded_rows"] += len(padding)
        self._observe("batch", len(sequences))
        scores = self._call(sequences, tokens, [*slots, *padding], rows + [0] * len(padding), prompt=False)
        if scores is not None:
            self._take(sequences, scores, 1)

    def _read(self, sequence: Sequence, count: int) -> None:
        """The next part of a prompt; the first token, when that was the last part."""
        if not sequence.looked:
            self._prefixes.reuse(sequence)
        prompt = sequence.answer.request.prompt
        part = prompt[sequence.rows : sequence.rows + count]
        scores = self._call([sequence], [list(part)], [sequence.slot], [sequence.rows], prompt=True)
        if scores is not None:
            self._counts["tokens_in"] += len(part)
            if sequence.left == len(part):
                self._take([sequence], scores, len(part))
            else:
                sequence.rows += len(part)
                self._prefixes.keep(sequence)

    def _call(
        self, sequences: Several[Sequence], tokens: list[list[int]], slots: list[int], rows: list[int], *, prompt: bool
    ) -> torch.Tensor | None:
        """Scores after the last token of each; None if the package failed, which those sequences are told."""
        given = {"input_ids": _numbers(tokens), "slots": _numbers(slots), "lengths": _numbers(rows)}
        started = monotonic()
        try:
            results = self._package({**self._memory.state, **given}, prompt=prompt)
        except Exception as error:
            self._counts["fallback.call_failed"] += 1
            told = error if isinstance(error, InlayError) else ProgramError(f"The package failed: {one_line(error)}.")
            for sequence in sequences:
                self._fail(sequence, told)
            self._hand_out()
            return None
        self._counts["call_microseconds"] += round((monotonic() - started) * 1e6)
        self._counts["calls"] += 1
        self._counts["rows"] += len(tokens) * len(tokens[0])
        scores: torch.Tensor = results["logits"][: len(sequences), -1]
        return scores.float()

    def _take(self, sequences: Several[Sequence], scores: torch.Tensor, rows: int) -> None:
        """Draw a token for each, and hand it out."""
        numbers = scores.numpy()
        likeliest = numbers.argmax(-1).tolist()
        now = monotonic()
        for place, (sequence, best) in enumerate(zip(sequences, likeliest, strict=True)):
            writer = sequence.writer
            sequence.rows += rows
            try:
                if not math.isfinite(numbers[place, best]):
                    raise ProgramError(
                        "The program returned logits that are not numbers.",
                        "Its weights are damaged, or their number format is too narrow: build it again in float32.",
                    )
                token = best if writer.likely else writer.draw(scores[place])
                likelihood = writer.likelihood(scores[place], token) if writer.request.logprobs is not None else None
                text, finish = writer.add(token)
            except InlayError as error:
                self._fail(sequence, error)
                continue
            self._out[sequence.answer.loop].append(
                (sequence.answer, Piece(text, token, now - sequence.answer.asked, finish, likelihood))
            )
            first = sequence.told == sequence.answer.asked
            self._observe("first_token_seconds" if first else "between_tokens_seconds", now - sequence.told)
            sequence.told = now
            self._counts["tokens_out"] += 1
            if finish:
                self._leave(sequence, finish)
        self._hand_out()
        for sequence in sequences:
            self._prefixes.keep(sequence)
            if sequence.answer.id not in self._running:
                self._prefixes.drop(sequence)

    def _break_off(self, sequence: Sequence, finish: Finish) -> None:
        token = sequence.writer.history[-1]
        piece = Piece(sequence.writer.rest(), token, monotonic() - sequence.answer.asked, finish)
        self._out[sequence.answer.loop].append((sequence.answer, piece))
        self._leave(sequence, finish)
        self._prefixes.drop(sequence)

    def _fail(self, sequence: Sequence, error: InlayError) -> None:
        self._out[sequence.answer.loop].append((sequence.answer, error))
        self._leave(sequence, "failed")
        self._prefixes.drop(sequence)

    def _leave(self, sequence: Sequence, how: str) -> None:
        """It needs its slot no longer."""
        self._counts[f"ended.{how}"] += 1
        now = monotonic()
        self._pace += 0.1 * (min(now - self._ended, 10.0) - self._pace)
        self._ended = now
        with self._changed:
            self._waiting.pop(sequence.answer.id, None)
            self._running.pop(sequence.answer.id, None)
            self._changed.notify_all()

    def _hand_out(self) -> None:
        """Give all that was made to those who asked: at once to threads, by one call to each event loop."""
        for loop, made in self._out.items():
            if loop is None:
                _put(made)
            elif not loop.is_closed():
                loop.call_soon_threadsafe(_put, made)
        self._out.clear()

    def _observe(self, name: str, value: float) -> None:
        for observer in self._observers:
            observer.observe(name, value)


_COUNTED = (
    *("accepted", "refused", "steps", "step_microseconds", "calls", "call_microseconds", "rows", "padded_rows"),
    *("tokens_in", "tokens_out", "cached_tokens", "hits", "misses"),
    *("fallback.call_failed", "fallback.step_failed", "fallback.read_from_second_level", "fallback.cache_full"),
    *(f"ended.{finish}" for finish in (*Finish, "failed")),
)
"""What is counted, so that it is there before it happens."""


def _numbers(values: list[int] | list[list[int]]) -> torch.Tensor:
    """As a tensor; by way of numpy, which reads lists faster."""
    return torch.from_numpy(np.array(values, dtype=np.int64))


def _put(made: list[tuple[Answer, Piece | InlayError]]) -> None:
    for answer, what in made:
        if isinstance(what, Piece):
            answer.put([what])
        else:
            answer.put([], what)

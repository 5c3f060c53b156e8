"""An engine in virtual time: the real scheduler, block manager and prefix cache, without a model.

It follows `inlay.runtime.engine.Engine.step` operation by operation; only the calls of the package are replaced by
their recorded durations. tests/tools/test_cluster_simulation.py compares both.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING, cast

from inlay.runtime.kv.block_manager import BlockManager
from inlay.runtime.kv.prefix_cache import PrefixCache, SequenceState
from inlay.runtime.request import RequestHandle
from inlay.runtime.scheduler import Limits, RunningSequence, StepPlan, WaitingRequest, schedule

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from inlay.runtime.generation_state import GenerationState
    from inlay.runtime.kv.block import Move
    from inlay.runtime.kv.events import CacheEvent
    from inlay.runtime.kv.memory import KVMemory
    from inlay.runtime.request import Request
    from tools.cluster_simulation.step_times import EngineShape, StepTimes


class NullMemory:
    """A KV memory that stores nothing."""

    def save(self, slot: int, row: int, index: int) -> None:
        """Do nothing."""

    def load(self, slot: int, row: int, level: int, index: int) -> None:
        """Do nothing."""

    def move(self, moves: Iterable[Move]) -> None:
        """Do nothing."""


class KnownGeneration:
    """A generation whose tokens are known before: prompt and answer."""

    __slots__ = ("history", "left")

    def __init__(self, history: Sequence[int], left: int) -> None:
        self.history, self.left = history, left


class SimulatedSequence(SequenceState):
    """A sequence of a simulated engine."""

    def __init__(self, handle: RequestHandle, history: Sequence[int], left: int) -> None:
        self.known = KnownGeneration(history, left)
        super().__init__(handle, cast("GenerationState", self.known))


@dataclass(slots=True)
class Step:
    """A step, or several decode steps with the same sequences."""

    plan: StepPlan
    start: float
    ends: list[float]
    """The end of each step. Only a run of decode steps has more than one."""
    outputs: list[tuple[float, list[SimulatedSequence]]]
    """Who gets a token, and when; not filled for a run."""
    run: list[SimulatedSequence]
    """The sequences of a run of decode steps; empty for other steps."""


class SimulatedEngine:
    """One replica: queue, slots and prefix cache.

    Steps that admit or prefill change the state at once, although they end later: nothing else can change it in
    between. Runs of decode steps change it when they are completed, because an arrival may cut them.
    """

    def __init__(self, shape: EngineShape, times: StepTimes, on_event: Callable[[CacheEvent], None]) -> None:
        self.shape, self.times = shape, times
        places = (shape.cache_blocks, shape.host_blocks) if shape.host_blocks else (shape.cache_blocks,)
        self.cache = BlockManager(places, shape.block_size, on_event) if shape.cache_blocks else None
        self.counts: Counter[str] = Counter()
        self._prefix_cache = PrefixCache(
            self.cache, cast("KVMemory", NullMemory()), self.counts, can_store_generated=shape.can_store_generated
        )
        self._limits = Limits(shape.slots, shape.max_prefill_tokens, shape.max_prefill_only_tokens, shape.batches)
        self._next = 0
        self.waiting: dict[int, SimulatedSequence] = {}
        self.running: dict[int, SimulatedSequence] = {}

    @property
    def is_full(self) -> bool:
        """Whether the real engine would raise QueueFullError."""
        return len(self.waiting) + len(self.running) >= self.shape.slots + self.shape.max_waiting

    @property
    def has_free_slot(self) -> bool:
        """Whether a request that arrives now would be admitted by the next step."""
        return len(self.running) < self.shape.slots

    def submit(self, request: Request, answer: Sequence[int]) -> SimulatedSequence:
        """Add a request to the queue, with the tokens that the model will answer."""
        history = [*request.prompt, *answer] if self.shape.can_store_generated else request.prompt
        left = min(request.max_tokens, self.shape.max_seq_len - len(request.prompt) + 1)
        made = SimulatedSequence(RequestHandle(self._next, request), history, left)
        self.waiting[self._next] = made
        self._next += 1
        return made

    def step(self, now: float, most: int) -> Step | None:
        """Take a step; return None if there is nothing to do.

        If the step only decodes, up to `most` such steps are planned at once, as far as the plan cannot change without
        an arrival. The caller passes their number to `complete` when they have ended.
        """
        waiting = [
            WaitingRequest(each.handle.id, each.handle.id, each.handle.request.priority, each.handle.request.owner)
            for each in self.waiting.values()
        ]
        running = [
            RunningSequence(
                *(each.handle.id, each.handle.id, each.slot, each.prefill_tokens_left),
                *(each.handle.request.priority, each.handle.request.owner),
            )
            for each in self.running.values()
        ]
        plan = schedule(waiting if self.has_free_slot else (), running, self._limits)
        if plan.admit or plan.prefill:
            return self._mixed_step(plan, now)
        return self._plan_run(plan, now, most) if plan.decode else None

    def _mixed_step(self, plan: StepPlan, now: float) -> Step:
        for number, slot in plan.admit:
            sequence = self.running[number] = self.waiting.pop(number)
            sequence.slot = slot
        outputs = []
        end = now if plan.decode or plan.prefill else now + self.times.empty_step
        if plan.decode:
            deciding = [self.running[number] for number in plan.decode]
            end += self.times.decode(len(deciding), sum(each.computed_tokens for each in deciding))
            self._sample(deciding, 1)
            outputs.append((end, deciding))
        for number, count in plan.prefill:
            sequence = self.running[number]
            blocks = 0
            if not sequence.has_lookup:
                self._prefix_cache.reuse(sequence)
                blocks = len(sequence.blocks)
            left = sequence.prefill_tokens_left
            count = min(count, left)
            end += self.times.prefill(count, sequence.computed_tokens, blocks)
            self.counts["prompt_tokens"] += count
            if count == left:
                self._sample([sequence], count)
                outputs.append((end, [sequence]))
            else:
                sequence.computed_tokens += count
                self._prefix_cache.store(sequence)
        return Step(plan, now, [end], outputs, [])

    def _plan_run(self, plan: StepPlan, now: float, most: int) -> Step:
        """Plan decode steps until a sequence ends or a block is full."""
        run = [self.running[number] for number in plan.decode]
        for each in run:
            most = min(most, each.known.left)
            if self.shape.can_store_generated and self.cache is not None and not each.is_cache_full:
                most = min(most, (len(each.blocks) + 1) * self.shape.block_size - each.computed_tokens)
        batch, rows, end = len(run), sum(each.computed_tokens for each in run), now
        base, row = self.times.decode_base[batch], self.times.decode_row[batch]
        ends = []
        for _ in range(max(1, most)):
            end += base + row * rows
            rows += batch
            ends.append(end)
        return Step(plan, now, ends, [], run)

    def complete(self, step: Step, count: int) -> None:
        """Complete the first `count` steps of a run."""
        if step.run and count:
            self._sample(step.run, count)

    def _sample(self, sequences: list[SimulatedSequence], rows: int) -> None:
        """Add tokens: one for each sequence after a prefill chunk of `rows` tokens, or `rows` decoded tokens each."""
        is_prompt = bool(sequences[0].prefill_tokens_left)
        for sequence in sequences:
            sequence.computed_tokens += rows
            sequence.known.left -= 1 if is_prompt else rows
            if not sequence.known.left:
                del self.running[sequence.handle.id]
        self.counts["generation_tokens"] += len(sequences) * (1 if is_prompt else rows)
        for sequence in sequences:
            if is_prompt or self.shape.can_store_generated:  # else all blocks of the prompt are stored already
                self._prefix_cache.store(sequence)
            if not sequence.known.left:
                self._prefix_cache.release(sequence)

"""Run a plan: steps in order, each value freed after its last use."""

from __future__ import annotations

import threading
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from inlay.errors import PackageError, UsageError
from inlay.lowering.buckets import find_decode_buckets, find_shared_slot_problem
from inlay.lowering.owned_state import OwnedState
from inlay.program.bindings import Role, tensor_text
from inlay.program.decoder import SIGNATURE, has_kv_cache

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from inlay.lowering.buckets import Bucket
    from inlay.program.bindings import Binding, Bindings
    from inlay.program.remarks import Remark

    Run = Callable[[list[Any]], Sequence[Any]]
    RunPlan = Callable[[Mapping[str, Any]], list[Any]]


_CPU = torch.device("cpu")


@dataclass(frozen=True)
class BoundStep:
    """A piece with its weights bound, and the names of its inputs and results."""

    run: Any
    ins: tuple[str, ...]
    outs: tuple[str, ...]


class PlanExecutor:
    """A plan that can be called. It keeps nothing between calls; state is an input. Calls may overlap."""

    def __init__(self, steps: Sequence[BoundStep], results: Sequence[str]) -> None:
        last: dict[str, int] = {}
        for index, step in enumerate(steps):
            last |= dict.fromkeys((*step.ins, *step.outs), index)
        gone: list[list[str]] = [[] for _ in steps]
        for name, index in last.items():
            if name not in results:
                gone[index].append(name)
        self.steps = [(step.run, step.ins, step.outs, tuple(names)) for step, names in zip(steps, gone, strict=True)]
        self.results = tuple(results)

    def __call__(self, inputs: Mapping[str, Any]) -> list[Any]:
        """Run all steps: inputs and states by name → the outputs of the program, without states."""
        values = dict(inputs)
        with torch.no_grad():
            for run, ins, outs, gone in self.steps:
                values.update(zip(outs, run([values[name] for name in ins]), strict=True))
                for name in gone:
                    del values[name]
        return [values[name] for name in self.results]


class Executable:
    """A program in one or several buckets that share their weights, and the state it works on.

    A call that passes no state uses the state that the executable owns (`state`), one call at a time. With state that
    they pass, any number of threads may call it concurrently, each with its own state, or with slots of a shared state
    that no other concurrent call uses. A state that a remark reports as copied is written as a whole: calls with the
    same such state must not overlap. Overlapping calls follow each other through the pieces.
    """

    def __init__(
        self,
        bindings: Bindings,
        buckets: Sequence[tuple[Bucket, RunPlan]],
        initial: Mapping[str, torch.Tensor],
        remarks: Sequence[Remark] = (),
        device: torch.device = _CPU,
    ) -> None:
        """`remarks` report which states are not updated in place, and why. State is allocated on `device`."""
        self.bindings, self.buckets, self.initial = bindings, list(buckets), dict(initial)
        self.device = device
        self.remarks = tuple(remarks)
        self.version = ""
        """The hash of the package that it was loaded from."""
        self.results = [row.name for row in bindings.outs if row.alias is None]
        self._state: OwnedState | None = None
        self._state_lock = threading.Lock()
        self._state_names = frozenset(row.name for row in bindings.state)
        self._types = [
            (row, getattr(torch, row.dtype), _static_shape(row))
            for row in bindings.with_role(Role.INPUT)
            if row.is_tensor
        ]
        self.cache = CacheSizes.from_bindings(bindings)
        """None for programs that are not decoders with a KV cache."""
        longest = self.buckets[-1][0].sizes.get("length", (1, None))[1] if self.buckets else None
        self.max_prefill = longest or (self.cache.max_seq_len if self.cache else 0)
        """The most tokens per sequence in a call of a decoder."""
        answers = find_decode_buckets([bucket.sizes for bucket, _ in self.buckets])
        self._prefill = [index for index, decodes in enumerate(answers) if not decodes]
        self._decode = [index for index, decodes in enumerate(answers) if decodes] + self._prefill
        self.has_decode_buckets = any(answers)
        """Whether prefill and decode use different code."""
        names = [row.name for row in bindings.state]
        self.shared_slot_problem = find_shared_slot_problem([bucket for bucket, _ in self.buckets], names)
        """Why the rows of a call must not share a slot; empty if they may, at different lengths."""

    def new_state(self) -> dict[str, torch.Tensor]:
        """Allocate all state, by name. State without an initial value is uninitialized memory."""
        made = {}
        for row in self.bindings.state:
            shape = _static_shape(row)
            if row.name in self.initial:
                made[row.name] = self.initial[row.name].clone()
            elif shape is None:
                raise UsageError(f"{row.target} is {row.type_text}: the caller chooses its size.", "Pass it.")
            else:
                made[row.name] = torch.empty(shape, dtype=getattr(torch, row.dtype), device=self.device)
        return made

    @property
    def state(self) -> OwnedState:
        """The state of calls that pass none, by its names in the model. It is allocated on first use."""
        with self._state_lock:
            if self._state is None:
                names = {row.target: row.name for row in self.bindings.state}
                self._state = OwnedState(self.new_state(), names, self.initial)
                self._state.reset()
            return self._state

    def __call__(self, inputs: Mapping[str, Any], *, is_prefill: bool = False) -> dict[str, Any]:
        """Run one call: inputs and state by name → results by name. State is updated in place.

        If `inputs` contains no state, the executable's own is used. With `is_prefill`, a single token uses the code for
        longer prompts. So a prompt token gives bitwise the same result however the prompt is chunked, and a decoded
        token gives the same result in every batch.
        """
        if self._state_names and self._state_names.isdisjoint(inputs):
            with self.state.exclusive() as held:
                return self({**held, **inputs}, is_prefill=is_prefill)
        return self.run_bucket(self.find_bucket(inputs, is_prefill=is_prefill), inputs)

    def run_bucket(self, index: int, inputs: Mapping[str, Any]) -> dict[str, Any]:
        """Run the code of a bucket, without checks."""
        return dict(zip(self.results, self.buckets[index][1](inputs), strict=True))

    def find_bucket(self, inputs: Mapping[str, Any], *, is_prefill: bool = False) -> int:
        """Check the inputs of a call, and return the index of the bucket that runs it."""
        sizes = self._sizes(inputs)
        if self.cache is not None:
            self.cache.check(inputs, may_share=not self.shared_slot_problem)
        for index in self._prefill if is_prefill else self._decode:
            if self.buckets[index][0].fits(sizes):
                return index
        asked = ", ".join(f"{name} {size}" for name, size in sizes.items())
        ranges = " or ".join(bucket.text for bucket, _ in self.buckets)
        raise UsageError(f"No bucket was built for {asked}.", f"Use {ranges}.")

    def _sizes(self, given: Mapping[str, Any]) -> dict[str, int]:
        """Return the sizes of a call, by name; reject inputs that do not match their types."""
        sizes: dict[str, int] = {}
        for row, dtype, shape in self._types:
            value: Any = given.get(row.name)
            fits = isinstance(value, torch.Tensor) and value.dtype is dtype and value.is_contiguous()
            if not fits or (value.shape != shape if shape is not None else not _note_sizes(row, value.shape, sizes)):
                found = tensor_text(value.dtype, value.shape) if isinstance(value, torch.Tensor) else value
                raise UsageError(f"{row.target} must be {row.type_text} and contiguous; got {found}.")
        return sizes


@dataclass(frozen=True)
class CacheSizes:
    """The valid ranges of a decoder's index inputs. Without a check, slot -1 would be the last slot."""

    slots: int
    max_seq_len: int
    vocab_size: int
    rooms: frozenset[int]
    """Rows of a slot, for each state. If they are fewer than `max_seq_len`, the slot is a ring."""

    @classmethod
    def from_bindings(cls, bindings: Bindings) -> CacheSizes | None:
        """Return the cache sizes of a program that takes tokens, slots and lengths; None for others."""
        shapes = [row.shape for row in bindings.state if len(row.shape) == 4]
        scores = [row.shape[-1] for row in bindings.outs if row.name == SIGNATURE.logits]
        if not has_kv_cache(bindings) or not shapes or not scores:
            return None
        slots, _, room, _ = shapes[0]
        if not (isinstance(slots, int) and isinstance(room, int) and isinstance(scores[0], int)):
            problem = f"Expected integers for slots, rows and tokens of the cache; found {slots}, {room}, {scores[0]}."
            raise PackageError(problem, "Build the package again.")
        most = next(row.below for row in bindings.ins if row.target == SIGNATURE.lengths)
        if most is None:
            return cls(slots, room, scores[0], frozenset({room}))
        return cls(slots, most, scores[0], frozenset(int(shape[2]) for shape in shapes))

    def is_cache(self, shape: Sequence[int | str]) -> bool:
        """Whether a state of this shape, `[slot, head, row, …]`, is a KV cache."""
        return len(shape) == 4 and shape[0] == self.slots and shape[2] in self.rooms

    def check(self, inputs: Mapping[str, Any], *, may_share: bool = False) -> None:
        """Reject indices out of range, before anything is written.

        `may_share`: single tokens may be in one slot at different lengths. Each then follows those at lower lengths.
        """
        slots, lengths = inputs[SIGNATURE.slots].tolist(), inputs[SIGNATURE.lengths].tolist()
        count = inputs[SIGNATURE.tokens].shape[1]
        self.check_tokens(inputs[SIGNATURE.tokens])
        _check_range("A slot", slots, self.slots - 1)
        _check_range("The length of a sequence", lengths, self.max_seq_len - count)
        rows = set(zip(slots, lengths, strict=True)) if may_share and count == 1 else set(slots)
        if len(rows) < len(slots):
            raise UsageError(f"Two sequences use the same slot: {slots}.", "Give each sequence its own slot.")

    def check_tokens(self, tokens: torch.Tensor) -> None:
        """Reject tokens that the model does not have."""
        _check_range("A token", tokens.reshape(-1).tolist(), self.vocab_size - 1)


def _check_range(what: str, values: list[int], most: int) -> None:
    if values and (min(values) < 0 or max(values) > most):
        strange = next(value for value in values if not 0 <= value <= most)
        raise UsageError(f"{what} must be from 0 to {most}; got {strange}.")


def _static_shape(row: Binding) -> torch.Size | None:
    """Return the shape of a binding if it is static, or None."""
    known = [size for size in row.shape if isinstance(size, int)]
    return torch.Size(known) if len(known) == len(row.shape) else None


def _note_sizes(row: Binding, shape: torch.Size, sizes: dict[str, int]) -> bool:
    """Record the symbolic sizes of a shape; return whether the shape matches the binding and the recorded sizes."""
    return len(shape) == len(row.shape) and all(
        (wanted if isinstance(wanted, int) else sizes.setdefault(wanted, size)) == size
        for wanted, size in zip(row.shape, shape, strict=True)
    )

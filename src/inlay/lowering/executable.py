"""Running a plan: steps in order, each value dropped after its last use."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from inlay.errors import PackageError, UsageError
from inlay.lowering.buckets import find_decode_buckets
from inlay.program.bindings import Role, tensor_text
from inlay.program.decoder import SIGNATURE, has_kv_cache

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from inlay.lowering.buckets import Bucket
    from inlay.program.bindings import Binding, Bindings
    from inlay.program.remarks import Remark

    Run = Callable[[list[Any]], Sequence[Any]]
    RunPlan = Callable[[Mapping[str, Any]], list[Any]]


@dataclass(frozen=True)
class BoundStep:
    """A piece with its weights bound, the values it takes and the values it makes."""

    run: Any
    ins: tuple[str, ...]
    outs: tuple[str, ...]


class PlanExecutor:
    """A plan that runs. It keeps nothing between calls, which may overlap: state is among what it is given."""

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
        """All inputs and states by name → what the program returns, states left out."""
        values = dict(inputs)
        with torch.no_grad():
            for run, ins, outs, gone in self.steps:
                values.update(zip(outs, run([values[name] for name in ins]), strict=True))
                for name in gone:
                    del values[name]
        return [values[name] for name in self.results]


class Executable:
    """A program in one or several buckets that share their weights, and the state it works on.

    Any number of threads may call it at once, each with state of its own, or with slots of one state that no other call
    names. State that a remark says is copied is written as a whole: calls with one such state must not overlap. Calls
    that overlap follow each other through its pieces.
    """

    def __init__(
        self,
        bindings: Bindings,
        buckets: Sequence[tuple[Bucket, RunPlan]],
        initial: Mapping[str, torch.Tensor],
        remarks: Sequence[Remark] = (),
    ) -> None:
        """`remarks` say which state is not updated in place, and why."""
        self.bindings, self.buckets, self.initial = bindings, list(buckets), dict(initial)
        self.remarks = tuple(remarks)
        self.results = [row.name for row in bindings.outs if row.alias is None]
        self._types = [
            (row, getattr(torch, row.dtype), _static_shape(row))
            for row in bindings.with_role(Role.INPUT)
            if row.is_tensor
        ]
        self.cache = CacheSizes.from_bindings(bindings)
        """None for programs that are no decoders."""
        answers = find_decode_buckets([bucket.sizes for bucket, _ in self.buckets])
        self._prefill = [each for each, decodes in zip(self.buckets, answers, strict=True) if not decodes]
        self._decode = [each for each, decodes in zip(self.buckets, answers, strict=True) if decodes] + self._prefill
        self.has_decode_buckets = any(answers)
        """Whether tokens of prompts and tokens of answers are computed by different code."""

    def new_state(self) -> dict[str, torch.Tensor]:
        """Memory for all state, by name. What starts with a value has it; what is filled row by row has any."""
        made = {}
        for row in self.bindings.state:
            if row.name in self.initial:
                made[row.name] = self.initial[row.name].clone()
            else:
                shape = [size for size in row.shape if isinstance(size, int)]
                made[row.name] = torch.empty(shape, dtype=getattr(torch, row.dtype))
        return made

    def __call__(self, inputs: Mapping[str, Any], *, is_prefill: bool = False) -> dict[str, Any]:
        """Inputs and state by name → results by name. State is written to in place.

        With `is_prefill`, a single token is computed as those of a longer prompt are: what a token of a prompt gives is
        the same bits however the prompt is cut, and what a token of an answer gives, whoever is served beside it.
        """
        sizes = self._sizes(inputs)
        if self.cache is not None:
            self.cache.check(inputs)
        for bucket, execution in self._prefill if is_prefill else self._decode:
            if bucket.fits(sizes):
                return dict(zip(self.results, execution(inputs), strict=True))
        asked = ", ".join(f"{name} {size}" for name, size in sizes.items())
        ranges = " or ".join(bucket.text for bucket, _ in self.buckets)
        raise UsageError(f"Nothing was built for {asked}.", f"It takes {ranges}.")

    def _sizes(self, given: Mapping[str, Any]) -> dict[str, int]:
        """The sizes that a call has, by name; inputs that do not fit their types are refused."""
        sizes: dict[str, int] = {}
        for row, dtype, shape in self._types:
            value: Any = given.get(row.name)
            fits = isinstance(value, torch.Tensor) and value.dtype is dtype and value.is_contiguous()
            if not fits or (value.shape != shape if shape is not None else not _note_sizes(row, value.shape, sizes)):
                found = (
                    tensor_text(str(value.dtype)[6:], tuple(value.shape)) if isinstance(value, torch.Tensor) else value
                )
                raise UsageError(f"{row.target} must be {row.type_text}, contiguous, and {found} was given.")
        return sizes


@dataclass(frozen=True)
class CacheSizes:
    """The valid ranges of the indices that a decoder is given. A slot of -1 would otherwise be the last slot."""

    slots: int
    max_seq_len: int
    vocab_size: int

    @classmethod
    def from_bindings(cls, bindings: Bindings) -> CacheSizes | None:
        """The cache of a program that takes tokens, slots and lengths; None for others."""
        shapes = [row.shape for row in bindings.state if len(row.shape) == 4]
        scores = [row.shape[-1] for row in bindings.outs if row.name == SIGNATURE.logits]
        if not has_kv_cache(bindings) or not shapes or not scores:
            return None
        slots, _, room, _ = shapes[0]
        if not (isinstance(slots, int) and isinstance(room, int) and isinstance(scores[0], int)):
            raise PackageError(
                f"The cache has {slots} slots of {room} rows, and {scores[0]} tokens: no numbers.", "Build it again."
            )
        return cls(slots, room, scores[0])

    def is_cache(self, shape: Sequence[int | str]) -> bool:
        """Whether a state of this shape, `[slot, head, row, …]`, holds rows of sequences."""
        return len(shape) == 4 and shape[0] == self.slots and shape[2] == self.max_seq_len

    def check(self, inputs: Mapping[str, Any]) -> None:
        """Refuse what lies outside, before anything is written."""
        slots = inputs[SIGNATURE.slots].tolist()
        _check_range("A token", inputs[SIGNATURE.tokens].reshape(-1).tolist(), self.vocab_size - 1)
        _check_range("A slot", slots, self.slots - 1)
        _check_range(
            "The length of a sequence",
            inputs[SIGNATURE.lengths].tolist(),
            self.max_seq_len - inputs[SIGNATURE.tokens].shape[1],
        )
        if len(set(slots)) < len(slots):
            raise UsageError(f"Two sequences are in one slot: {slots}.", "Give each a slot of its own.")


def _check_range(what: str, values: list[int], most: int) -> None:
    if values and (min(values) < 0 or max(values) > most):
        strange = next(value for value in values if not 0 <= value <= most)
        raise UsageError(f"{what} is {strange}, and must be from 0 to {most}.")


def _static_shape(row: Binding) -> torch.Size | None:
    """The shape of a binding that has one, whatever the sizes of a call."""
    known = [size for size in row.shape if isinstance(size, int)]
    return torch.Size(known) if len(known) == len(row.shape) else None


def _note_sizes(row: Binding, shape: torch.Size, sizes: dict[str, int]) -> bool:
    """Take the sizes that have names from a shape; whether it fits what is known."""
    return len(shape) == len(row.shape) and all(
        (wanted if isinstance(wanted, int) else sizes.setdefault(wanted, size)) == size
        for wanted, size in zip(row.shape, shape, strict=True)
    )

"""Accuracy of a package: its next-token distributions compared with those of the model it was built from.

The reference is the captured program, computed in float32 without a transform. Both read the same text. The package is
measured as it is used: token by token (decode), in chunks (prefill), and with the calls that a server makes (serving).
"""

from __future__ import annotations

import math
import statistics
from dataclasses import asdict, dataclass
from itertools import product
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from inlay.errors import ModelError, UsageError
from inlay.insight.interpreter import ProgramInterpreter
from inlay.lowering.aoti_runtime import chain_steps
from inlay.lowering.executable import PlanExecutor
from inlay.program.bindings import Role
from inlay.program.decoder import SIGNATURE
from inlay.program.fold import fold

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from torch import fx

    from inlay.lowering.executable import CacheSizes
    from inlay.package.loader import LoadedPackage
    from inlay.program.program import Program

WINDOW = 256
"""Tokens that are read as one sequence."""
CHUNK = 32
"""Tokens of a prefill call."""
LONGEST = 2048
"""Positions of the longest sequence, if the package has room for as many."""
_MAX_CHUNK = 512
"""Tokens of the largest prefill call, unless a bucket starts above."""
_MAX_ROWS = 16
"""Sequences that are served at once."""
_DECODE_CALLS = 64
"""Decode calls of served sequences, and those at the end of the longest one."""
_MIN_TOKENS = 2
_MAX_LOGITS = 1 << 28
"""Logits of the reference that are kept at once."""


@dataclass(frozen=True)
class Agreement:
    """How well the package's next-token distributions agree with the reference, over some positions."""

    positions: int
    kl_mean: float
    """Mean KL divergence of the package from the reference, in nats."""
    kl_max: float
    same_top: float
    """Share of positions at which both have the same most likely token."""
    perplexity: float
    reference_perplexity: float


@dataclass(frozen=True)
class LayerDrift:
    """Relative error of the hidden state after a layer, as a mean over positions."""

    layer: int
    drift: float


@dataclass(frozen=True)
class AccuracyReport:
    """The accuracy of a package on a text."""

    tokens: int
    decode: Agreement
    prefill: Agreement
    serving: Agreement
    """Calls as a server makes them: any slots, lengths and batch sizes, and one long sequence."""
    layers: tuple[LayerDrift, ...]
    note: str = ""
    """Why there are no layers."""
    unreached: tuple[str, ...] = ()
    """Sizes of the buckets that no call reached."""

    @property
    def kl(self) -> float:
        """The largest mean KL divergence of decode, prefill and serving; infinite if logits are not finite."""
        means = self.decode.kl_mean, self.prefill.kl_mean, self.serving.kl_mean
        return max(means) if all(map(math.isfinite, means)) else math.inf

    def to_json(self) -> dict[str, Any]:
        """Return the report as plain values. Numbers that are not finite are None."""

        def plain(items: list[tuple[str, Any]]) -> dict[str, Any]:
            return {key: None if isinstance(v, float) and not math.isfinite(v) else v for key, v in items}

        return plain([*asdict(self, dict_factory=plain).items(), ("kl", self.kl)])


def measure_accuracy(
    package: LoadedPackage,
    reference: Callable[[], Program],
    tokens: Sequence[int],
    on_step: Callable[[str], None] = lambda step: None,
) -> AccuracyReport:
    """Compare a package with the program that `reference` captures from its model, on the tokens of a text."""
    cache = package.cache
    if package.manifest.kind != "decoder" or cache is None:
        raise UsageError("Accuracy is measured on language models, and this package is not one.", "Pass a decoder.")
    count = math.ceil(len(tokens) / min(WINDOW, cache.max_seq_len))
    length = len(tokens) // count if count else 0
    if length < _MIN_TOKENS:
        problem = f"The text has {len(tokens)} tokens, which the package reads in sequences of {length}."
        raise UsageError(problem, f"Pass more text; a package needs room for at least {_MIN_TOKENS} tokens.")
    if max(tokens) >= cache.vocab_size:
        raise UsageError("The text has tokens that the package does not have.", "Pass the model it was built from.")
    runner = _Reference(reference(), cache.vocab_size)
    windows = torch.tensor(tokens[: length * count]).reshape(count, length)
    calls, decode, prefill, serving = _Calls(package, cache), _Sums(), _Sums(), _Sums()
    on_step("longest sequence")
    _add_longest(calls, runner, tokens, serving)
    rows = min(cache.slots, max(1, _MAX_LOGITS // (length * cache.vocab_size)))
    for start in range(0, len(windows), rows):
        batch = windows[start : start + rows]
        on_step(f"reference {start + len(batch)} of {len(windows)}")
        logits = torch.cat([runner.logits(batch[row : row + 1]) for row in range(len(batch))])
        on_step(f"package {start + len(batch)} of {len(windows)}")
        _add_chunks(calls, batch, logits, decode, 1, is_prefill=False)
        _add_chunks(calls, batch, logits, prefill, min(CHUNK, package.max_prefill), is_prefill=True)
        if start == 0:
            on_step("serving")
            _add_serving(calls, batch, logits, serving)
    on_step("layers")
    drifts, note = _layer_drifts(package, runner, windows[:1, : package.max_prefill])
    agreements = decode.agreement(), prefill.agreement(), serving.agreement()
    unreached = tuple(bucket.text for bucket in package.manifest.buckets if bucket.name not in calls.reached)
    return AccuracyReport(windows.numel(), *agreements, drifts, note, unreached)


class _Reference:
    """The captured program in float32. Its weights are read once."""

    def __init__(self, program: Program, vocab_size: int) -> None:
        self.program, self.vocab_size, self._run = program, vocab_size, ProgramInterpreter()
        inputs = [row for row in program.bindings.with_role(Role.INPUT) if row.is_tensor]
        if len(inputs) != 1:
            raise UsageError(f"{program.name} has {len(inputs)} inputs, and a language model has one.", "")
        self._input = inputs[0].name

    def logits(self, tokens: torch.Tensor, keep: dict[fx.Node, Any] | None = None) -> torch.Tensor:
        """Return the logits of every position. Values of the nodes that are keys of `keep` are stored there."""

        def store(node: fx.Node, value: Any) -> None:
            if keep is not None and node in keep:
                keep[node] = value

        results = self._run(self.program, {self._input: tokens}, compute_dtype=torch.float32, on_value=store)
        logits: torch.Tensor = results[0]
        if logits.shape[-1] != self.vocab_size:
            problem = f"The model has {logits.shape[-1]} tokens in its vocabulary, and the package {self.vocab_size}."
            raise UsageError(problem, "Pass the model that the package was built from as --source.")
        if not bool((logits < math.inf).all()):
            problem = "The reference is not finite: the model itself computes NaN or infinity in float32."
            raise ModelError(problem, "Check the weights of the model. The package was not compared.")
        return logits.float()


class _Sums:
    """Sums over positions."""

    def __init__(self) -> None:
        self.count, self.same, self.kl, self.kl_max, self.loss, self.reference_loss = 0, 0, 0.0, 0.0, 0.0, 0.0

    def add(self, logits: torch.Tensor, reference: torch.Tensor, following: torch.Tensor) -> None:
        """Add positions: logits of both as `[positions, vocabulary]`, and the token that follows each."""
        ours, theirs = logits.double().log_softmax(-1), reference.double().log_softmax(-1)
        kl = (theirs.exp() * (theirs - ours)).masked_fill(theirs.exp() == 0, 0.0).sum(-1)
        self.count += len(kl)
        self.same += int((ours.argmax(-1) == theirs.argmax(-1)).sum())
        self.kl += float(kl.sum())
        self.kl_max = float(np.maximum(self.kl_max, float(kl.max())))  # NaN stays NaN
        self.loss -= float(ours.gather(-1, following[:, None]).sum())
        self.reference_loss -= float(theirs.gather(-1, following[:, None]).sum())

    def agreement(self) -> Agreement:
        """Return the means."""
        count = max(self.count, 1)
        perplexities = (float(np.exp(loss / count)) for loss in (self.loss, self.reference_loss))
        return Agreement(self.count, self.kl / count, self.kl_max, self.same / count, *perplexities)


class _Calls:
    """Calls of a package, and the names of the buckets that they reached."""

    def __init__(self, package: LoadedPackage, cache: CacheSizes) -> None:
        self.package, self.cache, self.reached = package, cache, set[str]()

    def __call__(self, inputs: Mapping[str, torch.Tensor], *, is_prefill: bool) -> torch.Tensor:
        index = self.package.find_bucket(inputs, is_prefill=is_prefill)
        self.reached.add(self.package.buckets[index][0].name)
        logits: torch.Tensor = self.package(inputs, is_prefill=is_prefill)[SIGNATURE.logits][:, -1]
        return logits.float()


def _add_chunks(
    calls: _Calls, windows: torch.Tensor, reference: torch.Tensor, sums: _Sums, chunk: int, *, is_prefill: bool
) -> None:
    state, last = calls.package.new_state(), windows.shape[1] - 1
    for start in range(0, last, chunk):
        stop = min(start + chunk, last)
        logits = calls(state | _inputs(windows[:, start:stop], start), is_prefill=is_prefill)
        sums.add(logits, reference[:, stop - 1], windows[:, stop])


class _Sequences:
    """Sequences that share a state, as in a server: their slots are not in order and contain other numbers before."""

    def __init__(self, calls: _Calls, count: int, windows: torch.Tensor, reference: torch.Tensor, sums: _Sums) -> None:
        self.calls, self.windows, self.reference, self.sums = calls, windows, reference, sums
        self.state, self.filled = calls.package.new_state(), torch.zeros(count, dtype=torch.long)
        self.slots = torch.arange(calls.cache.slots).flip(0)[:count]
        random, length = torch.Generator().manual_seed(0), windows.shape[1]
        for name, value in self.state.items():
            if calls.cache.is_cache(value.shape) and value.is_floating_point() and name not in calls.package.initial:
                past = torch.randn(value[0, :, :length].shape, generator=random)
                value[self.slots, :, :length] = past.to(value.dtype)

    def advance(self, rows: list[int], count: int, *, is_prefill: bool) -> None:
        """Run the next tokens of these sequences in one call."""
        filled, texts = self.filled[rows], torch.tensor(rows) % len(self.windows)
        tokens = self.windows[texts[:, None], filled[:, None] + torch.arange(count)]
        logits = self.calls(self.state | _inputs(tokens, filled, self.slots[rows]), is_prefill=is_prefill)
        self.filled[rows] = stop = filled + count
        self.sums.add(logits, self.reference[texts, stop - 1], self.windows[texts, stop])


def _add_serving(calls: _Calls, windows: torch.Tensor, reference: torch.Tensor, sums: _Sums) -> None:
    """Prefill each sequence alone to a different length, in growing chunks; then decode in every batch size."""
    length, count = windows.shape[1], min(calls.cache.slots, _MAX_ROWS)
    served = _Sequences(calls, count, windows, reference, sums)
    for row in range(count):
        size, stop = 1, max(1, length * (row + 1) // (count + 1))
        while left := stop - int(served.filled[row]):
            served.advance([row], min(size, left, calls.package.max_prefill), is_prefill=True)
            size *= 3
    for step in range(_DECODE_CALLS):
        if rows := [row for row in range(count) if served.filled[row] < length - 1]:
            first = step % len(rows)
            served.advance([*rows[first:], *rows[:first]][: first + 1], 1, is_prefill=False)


def _add_longest(calls: _Calls, runner: _Reference, tokens: Sequence[int], sums: _Sums) -> None:
    """Fill one slot up to its end: prefill with the sizes at which buckets begin and end, then decode."""
    room = min(calls.cache.max_seq_len, LONGEST, _MAX_LOGITS // calls.cache.vocab_size)
    text = torch.tensor(tokens).repeat(room // len(tokens) + 1)[None, : room + 1]
    longest = _Sequences(calls, 1, text, runner.logits(text[:, :room]), sums)
    ranges = [bucket.sizes["length"] for bucket in calls.package.manifest.buckets]
    chunk = min(_MAX_CHUNK, calls.package.max_prefill)
    sizes = {size for low, high in ranges for size in (low, min(high or room, chunk)) if low <= size <= room}
    for size in sorted(sizes):
        longest.filled.clamp_(max=room - size)
        longest.advance([0], size, is_prefill=True)
    prompt = room - min(_DECODE_CALLS, room // 2, calls.package.max_prefill)  # a ring keeps the rows of a call
    longest.filled.clamp_(max=prompt)
    while (done := int(longest.filled)) < room:
        longest.advance([0], max(1, min(prompt - done, chunk)), is_prefill=done < prompt)


def _inputs(tokens: torch.Tensor, filled: int | torch.Tensor, slots: Any = None) -> dict[str, torch.Tensor]:
    count = len(tokens)
    slots, lengths = torch.arange(count) if slots is None else slots, torch.as_tensor(filled).expand(count).contiguous()
    return {SIGNATURE.tokens: tokens.contiguous(), SIGNATURE.slots: slots, SIGNATURE.lengths: lengths}


def _layer_drifts(
    package: LoadedPackage, runner: _Reference, window: torch.Tensor
) -> tuple[tuple[LayerDrift, ...], str]:
    """Compare hidden states after each layer, where the layers of package and model correspond.

    Layers are the repeated blocks of the captured program, and the steps of the package that run one piece several
    times. A step may return other values beside the hidden state, such as its norm: the output that is nearest over all
    layers is the hidden state.
    """
    layers, steps = _layer_outputs(runner.program), _layer_steps(package)
    if not layers or len(layers) != len(steps):
        note = f"The model has {len(layers)} repeated layers and the package {len(steps)}, so they are not compared."
        return (), note
    kept: dict[fx.Node, Any] = dict.fromkeys(node for nodes in layers for node in nodes)
    runner.logits(window, kept)
    values = _step_values(package, [name for outs in steps for name in outs], window)
    found = []
    for output, candidate in product(range(min(map(len, steps))), range(min(map(len, layers)))):
        pairs = [(values[outs[output]], kept[nodes[candidate]]) for outs, nodes in zip(steps, layers, strict=True)]
        if all(one.shape == two.shape for one, two in pairs):
            found.append([_relative_error(one, two) for one, two in pairs])
    best = min(found, key=lambda row: (not all(map(math.isfinite, row)), statistics.median(row)), default=[])
    note = "No value of the package has the shape of the model's hidden state, so layers are not compared."
    return tuple(LayerDrift(number, drift) for number, drift in enumerate(best)), "" if best else note


def _layer_outputs(program: Program) -> list[list[fx.Node]]:
    """Return the values that each repeated block passes on, in program order."""
    blocks = fold(program).blocks
    most = max(map(len, blocks), default=0)
    rows = []
    for nodes in blocks:
        inside = set(nodes)
        passed = [node for node in nodes if any(user not in inside for user in node.users)]
        if len(nodes) * 3 >= most:
            rows.append([node for node in passed if isinstance(node.meta.get("val"), torch.Tensor)])
    return rows


def _layer_steps(package: LoadedPackage) -> list[tuple[str, ...]]:
    """Return the names of the values that each step of a repeated piece makes, in the bucket that takes all sizes."""
    steps = package.manifest.buckets[-1].steps
    pieces = [step.piece for step in steps]
    return [step.outs for step in steps if pieces.count(step.piece) > 1]


def _step_values(package: LoadedPackage, names: Sequence[str], window: torch.Tensor) -> dict[str, torch.Tensor]:
    """Run a window as one prefill call and return these values of it."""
    steps = chain_steps(package.steps[-1], names)
    return dict(zip(names, PlanExecutor(steps, names)({**package.new_state(), **_inputs(window, 0)}), strict=True))


def _relative_error(value: torch.Tensor, reference: torch.Tensor) -> float:
    """Return the length of the difference relative to the length of the reference, as a mean over positions."""
    one, two = value.double(), reference.double()
    return float(((one - two).norm(dim=-1) / two.norm(dim=-1).clamp_min(1e-30)).mean())

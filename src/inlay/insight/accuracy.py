"""Accuracy of a package: its next-token distributions compared with those of the model it was built from.

The reference is the captured program, computed in float32 without a transform. Both read the same text. The package is
measured as it is used: token by token (decode), and in chunks (prefill).
"""

from __future__ import annotations

import math
import statistics
from dataclasses import asdict, dataclass
from itertools import product
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from inlay.errors import UsageError
from inlay.insight.interpreter import ProgramInterpreter
from inlay.lowering.aoti_runtime import chain_steps
from inlay.lowering.executable import PlanExecutor
from inlay.program.bindings import Role
from inlay.program.decoder import SIGNATURE
from inlay.program.fold import fold

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from torch import fx

    from inlay.package.loader import LoadedPackage
    from inlay.program.program import Program

WINDOW = 256
"""Tokens that are read as one sequence."""
CHUNK = 32
"""Tokens of a prefill call."""
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
    layers: tuple[LayerDrift, ...]
    note: str = ""
    """Why there are no layers."""

    @property
    def kl(self) -> float:
        """The larger mean KL divergence of decode and prefill; infinite if logits are not finite."""
        means = self.decode.kl_mean, self.prefill.kl_mean
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
    decode, prefill = _Sums(), _Sums()
    rows = min(cache.slots, max(1, _MAX_LOGITS // (length * cache.vocab_size)))
    for start in range(0, len(windows), rows):
        batch = windows[start : start + rows]
        on_step(f"reference {start + len(batch)} of {len(windows)}")
        logits = torch.cat([runner.logits(batch[row : row + 1]) for row in range(len(batch))])
        on_step(f"package {start + len(batch)} of {len(windows)}")
        _add_decode(package, batch, logits, decode)
        _add_prefill(package, batch, logits, prefill)
    on_step("layers")
    drifts, note = _layer_drifts(package, runner, windows[:1])
    return AccuracyReport(windows.numel(), decode.agreement(), prefill.agreement(), drifts, note)


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
        return logits.float()


class _Sums:
    """Sums over positions."""

    def __init__(self) -> None:
        self.count, self.same, self.kl, self.kl_max, self.loss, self.reference_loss = 0, 0, 0.0, 0.0, 0.0, 0.0

    def add(self, logits: torch.Tensor, reference: torch.Tensor, following: torch.Tensor) -> None:
        """Add positions: logits of both as `[positions, vocabulary]`, and the token that follows each."""
        ours, theirs = logits.double().log_softmax(-1), reference.double().log_softmax(-1)
        kl = (theirs.exp() * (theirs - ours)).masked_fill(theirs.isneginf(), 0.0).sum(-1)
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


def _add_decode(package: LoadedPackage, windows: torch.Tensor, reference: torch.Tensor, sums: _Sums) -> None:
    state = package.new_state()
    for place in range(windows.shape[1] - 1):
        logits = _call(package, state, windows[:, place : place + 1], place, is_prefill=False)
        sums.add(logits, reference[:, place], windows[:, place + 1])


def _add_prefill(package: LoadedPackage, windows: torch.Tensor, reference: torch.Tensor, sums: _Sums) -> None:
    state, length = package.new_state(), windows.shape[1]
    for start in range(0, length - 1, CHUNK):
        stop = min(start + CHUNK, length - 1)
        logits = _call(package, state, windows[:, start:stop].contiguous(), start, is_prefill=True)
        sums.add(logits, reference[:, stop - 1], windows[:, stop])


def _call(
    package: LoadedPackage, state: Mapping[str, torch.Tensor], tokens: torch.Tensor, filled: int, *, is_prefill: bool
) -> torch.Tensor:
    results = package({**state, **_inputs(tokens, filled)}, is_prefill=is_prefill)
    logits: torch.Tensor = results[SIGNATURE.logits][:, -1]
    return logits.float()


def _inputs(tokens: torch.Tensor, filled: int) -> dict[str, torch.Tensor]:
    count = len(tokens)
    lengths = torch.full((count,), filled)
    return {SIGNATURE.tokens: tokens.contiguous(), SIGNATURE.slots: torch.arange(count), SIGNATURE.lengths: lengths}


def _layer_drifts(
    package: LoadedPackage, runner: _Reference, window: torch.Tensor
) -> tuple[tuple[LayerDrift, ...], str]:
    """Compare hidden states after each layer, where the layers of package and model correspond.

    Layers are the repeated blocks of the captured program, and the steps of the package that run one piece several
    times. A step may return other values beside the hidden state, such as its norm: the output that is nearest over all
    layers is the hidden state.
    """
    layers = _layer_outputs(runner.program)
    steps = _layer_steps(package)
    if not layers or len(layers) != len(steps):
        return (
            (),
            f"The model has {len(layers)} repeated layers and the package {len(steps)}, so they are not compared.",
        )
    kept: dict[fx.Node, Any] = dict.fromkeys(node for nodes in layers for node in nodes)
    runner.logits(window, kept)
    values = _step_values(package, [name for outs in steps for name in outs], window)
    found = []
    for output, candidate in product(range(min(map(len, steps))), range(min(map(len, layers)))):
        pairs = [(values[outs[output]], kept[nodes[candidate]]) for outs, nodes in zip(steps, layers, strict=True)]
        if all(one.shape == two.shape for one, two in pairs):
            found.append([_relative_error(one, two) for one, two in pairs])
    best = min(found, key=lambda row: (not all(map(math.isfinite, row)), statistics.median(row)), default=[])
    note = (
        "" if best else "No value of the package has the shape of the model's hidden state, so layers are not compared."
    )
    return tuple(LayerDrift(number, drift) for number, drift in enumerate(best)), note


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

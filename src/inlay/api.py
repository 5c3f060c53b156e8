"""The public functions beside `inlay.build` and `inlay.load`: what the commands of the same names do, as calls."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from torch.export import ExportedProgram

from inlay.config import resolve_config
from inlay.errors import ModelError, UsageError
from inlay.frontend import Example, SourceModel, capture
from inlay.frontend.huggingface.checkpoint import HFOptions
from inlay.insight import accuracy, explanation
from inlay.insight.bisect import Bisection, BisectResult
from inlay.insight.oracles import make_oracle
from inlay.insight.verify import NumericsCheck, NumericsVerdict
from inlay.package.loader import load_package
from inlay.program import Program
from inlay.program.text.diff import Diff
from inlay.program.text.diff import diff as diff_programs
from inlay.transforms import configure, run, steps_through
from inlay.transforms.base import Transform
from inlay.transforms.lock import read_lock
from inlay.transforms.pass_manager import TransformStep

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

Model = str | SourceModel | Example | ExportedProgram | Program
SAMPLE_TEXT = Path(__file__).parent / "insight" / "sample_text.txt"


def explain(
    model: Model, transform: str | Transform = "", *, settings: Sequence[str] = (), config: Sequence[Path] = ()
) -> list[explanation.Explanation]:
    """Explain what each transform matched and almost matched, or one transform.

    A transform that is an object, such as that of `from_replacement`, runs alone.

    >>> import torch
    >>> class Gated(torch.nn.Module):
    ...     def forward(self, x):
    ...         return torch.nn.functional.silu(x).neg() * (x + 1)
    >>> (found,) = explain(Example(Gated(), (torch.ones(3),)), "match_swiglu")
    >>> found.sites, found.findings[0].reason
    (0, 'extra node: neg (aten.neg.default) stands in between')
    """
    program = as_program(model)
    if isinstance(transform, Transform):
        return explanation.explain(program, [TransformStep(transform.name, transform)])
    steps = _steps(program, settings, config)
    if transform:
        steps = steps_through(transform, steps)
    return explanation.explain(program, steps, steps[-1].key if transform else "")


def verify(
    model: Model, *, seed: int = 0, rounds: int = 4, settings: Sequence[str] = (), config: Sequence[Path] = ()
) -> list[NumericsVerdict]:
    """Run a model on random inputs before and after each transform, and classify the difference.

    >>> import torch
    >>> class Gated(torch.nn.Module):
    ...     def forward(self, x):
    ...         return torch.nn.functional.silu(x) * (x + 1)
    >>> [(each.transform, each.sites) for each in verify(Example(Gated(), (torch.ones(3),)))]
    [('match_swiglu', 1)]
    """
    program, check = as_program(model), NumericsCheck({}, seed, rounds)
    run(program, _steps(program, settings, config), [check])
    return check.verdicts


def bisect(
    model: Model,
    oracle: str = "logits",
    *,
    most: int | None = 3,
    settings: Sequence[str] = (),
    config: Sequence[Path] = (),
) -> BisectResult:
    """Find the transforms and the sites that make results wrong, up to `most` groups; None finds all.

    `culprits` of the result is empty if nothing is wrong. Each culprit has its layer, weights and source line.
    """
    program = as_program(model)
    return Bisection(program, _steps(program, settings, config), make_oracle(oracle, program)).find_all(most)


def diff(left: Model, right: Model) -> Diff:
    """Compare two programs by structure.

    >>> import torch
    >>> linear = Example(torch.nn.Linear(4, 4), (torch.ones(2, 4),))
    >>> diff(linear, linear).is_equal
    True
    >>> dict(diff(linear, Example(torch.nn.Softmax(-1), (torch.ones(2, 4),))).operator_deltas)
    {'aten.linear.default': -1, 'aten.softmax.int': 1}
    """
    return diff_programs(as_program(left), as_program(right))


def measure_accuracy(
    package: str | Path,
    *,
    text: str | Path | None = None,
    max_tokens: int = 2048,
    source: Model | None = None,
    trust_remote_code: bool = False,
    on_step: Callable[[str], None] = lambda step: None,
) -> accuracy.AccuracyReport:
    """Compare the next-token distributions of a package with those of the model it was built from, in float32.

    `text` is a text file; by default a built-in sample is used. `source` is the model, if it is not where it was.
    """
    from inlay.runtime.text_codec import TextCodec

    loaded = load_package(package)
    file = Path(text or SAMPLE_TEXT)
    try:
        content = file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"The text {file} cannot be read: {error}.", "Pass a text file in UTF-8.") from error
    tokens = TextCodec.load(loaded.folder / "tokenizer").encode(content)[:max_tokens]
    model = source if source is not None else read_lock(loaded.folder / "matches.lock").models[0].model

    def reference() -> Program:
        try:
            return as_program(model, HFOptions(None, trust_remote_code), on_step)
        except ModelError as error:
            moved = "" if source is not None else " If the model was moved, pass it as --source."
            raise ModelError(error.problem, error.remedy + moved) from error

    return accuracy.measure_accuracy(loaded, reference, tokens, on_step)


def as_program(
    model: Model, options: HFOptions | None = None, on_step: Callable[[str], None] = lambda step: None
) -> Program:
    """Return a program as it is, or capture the model."""
    return model if isinstance(model, Program) else capture(model, options, on_step=on_step)


def _steps(program: Program, settings: Sequence[str], config: Sequence[Path]) -> list[TransformStep]:
    architecture, name = program.facts.architecture, program.name
    return configure(resolve_config(architecture=architecture, model=name, files=config, settings=settings))

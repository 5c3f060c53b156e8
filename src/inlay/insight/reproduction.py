"""Reproduce the result of a bisection; generated scripts call this module."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import torch

from inlay.config import resolve_config
from inlay.frontend import capture
from inlay.frontend.huggingface.checkpoint import HFOptions
from inlay.insight.bisect import Bisection
from inlay.insight.oracles import make_oracle
from inlay.integrations.external_pass import load_external_pass
from inlay.program.text.parser import load
from inlay.transforms import configure
from inlay.transforms.pass_manager import TransformStep

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence


def reproduce(
    model: str,
    culprits: Mapping[str, set[int] | None],
    *,
    oracle: str = "logits",
    dtype: str = "",
    config: Sequence[str] = (),
    settings: Sequence[str] = (),
    trust_remote_code: bool = False,
) -> bool:
    """Run all transforms up to the culprits, and the culprits only at the named sites; return whether it is bad."""
    if model.endswith(".py"):
        program = load(model)
    else:
        program = capture(model, HFOptions(getattr(torch, dtype) if dtype else None, trust_remote_code))
    resolved = resolve_config(
        architecture=program.facts.architecture, model=program.name, files=list(map(Path, config)), settings=settings
    )
    steps = [*configure(resolved), *(TransformStep(name, load_external_pass(name)) for name in culprits if ":" in name)]
    keys = [step.key for step in steps]
    last = max(keys.index(name) for name in culprits)
    bisection = Bisection(program, steps[: last + 1], make_oracle(oracle, program))
    sites = [
        each
        for each in bisection.sites
        if (numbers := culprits.get(each.transform)) is None or each.site is None or each.site in numbers
    ]
    bad = not bisection.is_good(sites)
    print(f"{model} with {bisection.format_sites(sites)}: {'bad' if bad else 'good'}")
    return bad

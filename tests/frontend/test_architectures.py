"""Stock architectures, none of which src/ knows by name: captured, folded, dumped, reloaded, computed."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch

from inlay.config import resolve_config
from inlay.frontend import capture
from inlay.frontend.huggingface.checkpoint import HFOptions
from inlay.program.fold import fold
from inlay.program.text.folded_printer import dump_folded
from inlay.program.text.parser import parse
from inlay.program.text.printer import dump
from inlay.transforms import configure, run
from tests.architectures import ARCHITECTURES, NOT_BUILT, Architecture
from tests.models import random_model

if TYPE_CHECKING:
    from inlay.program import Program

DOCS = Path(__file__).parents[2] / "docs"
CAPTURED, MATCHED = DOCS / "architectures.md", DOCS / "matches.md"
SHAPES = ((3, 21), (1, 1), (1, 40), (1, 150))
"""None of them is the shape used for capture, (2, 8); two are past every window, one past usual chunks (64, 128)."""


IN_CI = ("gemma3_text", "bloom", "mixtral", "cohere", "lfm2")
"""Windows, ALiBi, experts, parallel blocks, convolutions; the others are nightly."""


@pytest.mark.parametrize(
    "architecture",
    [
        pytest.param(each, marks=() if each.model_type in IN_CI else pytest.mark.nightly, id=each.model_type)
        for each in ARCHITECTURES
    ],
)
def test_architecture(architecture: Architecture, tmp_path: Path, request: pytest.FixtureRequest) -> None:
    eager = random_model({"model_type": architecture.model_type, **architecture.full_config()})
    eager.save_pretrained(tmp_path)
    program = capture(str(tmp_path))
    folds = fold(program)
    assert tuple(len(kind) for kind in folds.kinds) == architecture.folds
    assert len(folds.deviations) == architecture.deviations
    layers = program.facts.layers
    assert layers is not None
    assert layers.value == eager.config.num_hidden_layers
    text = dump(program)
    reloaded = parse(text, program.tensors)
    assert dump(reloaded) == text
    row = {
        "captured": "yes",
        "builds": "no" if architecture.model_type in NOT_BUILT else "yes",
        "kinds of layers": ", ".join(f"× {len(kind)}" for kind in folds.kinds),
        "largest difference to eager": _difference(eager, _run(program)),
        "after dump and reload": _difference(eager, _run(reloaded)),
        "full text run as Python": _difference(eager, _run_text(program, text)),
        "folded text run as Python": _difference(eager, _run_folded(program, eager)),
    }
    update = request.config.getoption("--update-docs")
    _compare_with_docs(CAPTURED, architecture.model_type, row, update=update)
    canonical, records = run(
        program, configure(resolve_config(architecture=program.facts.architecture, model=program.name))
    )
    _difference(eager, _run(canonical))
    sites = {record.key: record.sites for record in records}
    norms = _count(canonical, "rms_norm", "layer_norm")
    counts = {
        "norms": f"{norms} of {norms + _count(canonical, 'rsqrt')}",
        "add + norm": str(sites["fuse_add_rms_norm"]),
        "attention": f"{_count(canonical, 'attention')} of {layers.value - architecture.without_attention}",
        "rotary": str(sites["match_rope"] + sites["match_rope_interleaved"]),
        "gated": str(sites["match_swiglu"] + sites["match_geglu"] + sites["match_clamped_swiglu"]),
        "fused linears": str(sites["fuse_gemms"]),
        "experts": str(sites["match_routed_experts"]),
    }
    _compare_with_docs(MATCHED, architecture.model_type, counts, update=update)
    assert _count(canonical, "rsqrt") == 0, "every norm is matched"


HALF_IN_CI = ("llama", "bloom")
"""Of norms, masks and feed-forward layers several kinds; the others are nightly."""


@pytest.mark.parametrize(
    "architecture",
    [
        pytest.param(each, marks=() if each.model_type in HALF_IN_CI else pytest.mark.nightly, id=each.model_type)
        for each in ARCHITECTURES
    ],
)
def test_half_precision(architecture: Architecture, tmp_path: Path) -> None:
    """In bfloat16 the transforms find what they find in float32, and err no more than the eager model does."""
    eager = random_model({"model_type": architecture.model_type, **architecture.full_config()})
    half = copy.deepcopy(eager).to(torch.bfloat16)
    half.save_pretrained(tmp_path)
    program = capture(str(tmp_path), HFOptions(dtype=torch.bfloat16))
    canonical, _ = run(program, configure(resolve_config()))
    row = next(line for line in MATCHED.read_text().splitlines() if line.startswith(f"| {architecture.model_type} |"))
    _, _, norms, fused, attention, *_ = (cell.strip() for cell in row.split("|"))
    assert str(_count(canonical, "rms_norm", "layer_norm")) == norms.split()[0]
    assert str(canonical.op_counts()["inlay.add_rms_norm.default"]) == fused
    assert str(_count(canonical, "attention")) == attention.split()[0]
    module = _run(canonical)
    for shape in SHAPES:
        ids = torch.randint(3, 256, shape, generator=torch.Generator().manual_seed(7))
        with torch.no_grad():
            exact = copy.deepcopy(half).float()(input_ids=ids, use_cache=False).logits
            rounded = half(input_ids=ids, use_cache=False).logits.float()
            actual = module(ids).float()
        assert exact.isfinite().all()
        unit = torch.finfo(torch.bfloat16).eps * exact.abs().max()
        assert (actual - exact).abs().mean() <= 1.25 * (rounded - exact).abs().mean() + unit / 16
        if not canonical.op_counts()["inlay.expert_linear.default"]:  # rounding may choose another expert for a token
            assert (actual - exact).abs().max() <= 2 * (rounded - exact).abs().max() + unit


def _count(program: Program, *names: str) -> int:
    """Calls of operators with one of these names, in any namespace; a fused norm is a norm."""
    wanted = {*names, *(f"add_{name}" for name in names)}
    return sum(count for name, count in program.op_counts().items() if name.split(".")[1] in wanted)


def _difference(eager: Any, run: Any) -> str:
    largest = 0.0
    for shape in SHAPES:
        ids = torch.randint(3, 256, shape, generator=torch.Generator().manual_seed(7))
        with torch.no_grad():
            expected = eager(input_ids=ids, use_cache=False).logits
            actual = run(ids)
        assert expected.abs().max() > 0.01, "the model must compute something"
        torch.testing.assert_close(actual, expected, rtol=0, atol=1e-5)
        largest = max(largest, (actual - expected).abs().max().item())
    return f"{largest:.0e}" if largest else "0"


def _run(program: Program) -> Any:
    module = program.module()
    return lambda ids: module(input_ids=ids)["logits"]


def _run_text(program: Program, text: str) -> Any:
    space: dict[str, Any] = {}
    exec(compile(text, "full.py", "exec"), space)
    held = [program.tensors[row.name].read() for row in program.bindings.ins if row.name in program.tensors]
    assert program.bindings.ins[-1].name == "input_ids"
    return lambda ids: space["forward"](*held, ids)[0]


def _run_folded(program: Program, eager: Any) -> Any:
    text = dump_folded(program)
    assert max(map(len, text.splitlines())) <= 120
    space: dict[str, Any] = {}
    exec(compile(text, "folded.py", "exec"), space)
    return lambda ids: space["forward"](eager, ids)[0]


def _compare_with_docs(page: Path, name: str, row: dict[str, str], *, update: bool) -> None:
    line = f"| {name} | " + " | ".join(row.values()) + " |"
    lines = page.read_text().splitlines()
    place = next((index for index, each in enumerate(lines) if each.startswith(f"| {name} |")), None)
    if update:
        if place is None:
            lines.append(line)
        else:
            lines[place] = line
        page.write_text("\n".join(lines) + "\n")
    else:
        assert place is not None, f"{page.name} lacks {name}; run pytest --update-docs"
        assert lines[place] == line

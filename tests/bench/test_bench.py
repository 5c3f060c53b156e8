"""`inlay bench`: the package's own figures, contestants that take turns, and those that cannot."""

from __future__ import annotations

import itertools
import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any
from xml.etree import ElementTree

import pytest
import torch
from typer.testing import CliRunner

from inlay import Example
from inlay.bench.chart import draw
from inlay.bench.contestants import find
from inlay.bench.metrics import INLAY, report
from inlay.bench.roofline import find_linear_calls, time_linears, time_weight_read
from inlay.bench.rounds import BenchResult, BenchTask, Samples, run_rounds
from inlay.cli.main import app
from inlay.flow import build
from inlay.ops.weight_layout import Packing
from inlay.package.loader import load_package

if TYPE_CHECKING:
    from typer.testing import Result

    from inlay.bench.worker import Contestant

SVG = "{http://www.w3.org/2000/svg}"
KEYS = {"decode_tok_s", "prefill_tok_s", "first_token_s", "bare_decode_tok_s", "batch16_tok_s"}
SCRIPT = """
class Contestant:
    version = "1"
    def decode(self, tokens, context_tokens):
        return [0.5] * tokens
    def prefill(self, tokens):
        return "Prompts are not for me."
    def batch(self, sequences, tokens, context_tokens):
        {batch}

def open_contestant(arguments):
    {opening}
    print("chatter of a library")
    return Contestant()
"""


def _bench(*arguments: str | Path, code: int = 0) -> Result:
    result = CliRunner().invoke(app, ["bench", *map(str, arguments)], env={"COLUMNS": "160"})
    assert result.exit_code == code, result.output
    return result


def test_figures_of_a_package(package: Path) -> None:
    result = _bench(package, "--rounds", "1", "--json")
    made = json.loads(result.stdout)
    assert set(made) >= KEYS
    assert made["batch16_tok_s"] is None
    assert made["notes"][1] == "The package holds 4 sequences, not 16. Build with --max-batch 16."
    for key in KEYS - {"batch16_tok_s"}:
        assert made[key] > 0
    decode = made["contestants"][INLAY]["tasks"]["decode"]
    assert 0 < decode["p50_ms"] <= decode["p99_ms"]
    assert set(made["shares"]) == {"decode_of_bare", "decode_of_reading", "bare_of_reading", "deep_of_decode"}


def test_table_picture_and_a_peer(package: Path, tmp_path: Path) -> None:
    scripts, peers = _peers(tmp_path, slow="pass")
    picture = tmp_path / "speed.svg"
    options = ("--rounds", "1", "--batch", "4", "--scripts", scripts, "--against", peers, "--picture", picture)
    shown = _bench(package, *options)
    assert "slow" in shown.stdout
    assert "batch4 of bare" in shown.stdout
    assert "slow: Prompts are not for me." in shown.stderr
    assert "Inlay speedup" in shown.stdout
    drawn = ElementTree.fromstring(picture.read_text())
    assert len(drawn.findall(f".//{SVG}rect[@class='bar']")) == 5, "two decode, one prefill, two in a batch"
    assert len(drawn.findall(f".//{SVG}path[@class='limit']")) == 3


def test_linears_of_a_package(package: Path, model: Any) -> None:
    loaded = load_package(package)
    for rows in (1, 4):
        found = find_linear_calls(loaded, rows)
        assert len(found) == 3 * 4 + 1  # QKV and gate-up are one each
        assert (found[-1].features, found[-1].depth) == (320, 64)
        assert sum(each.weight.nbytes for each in found) == sum(
            module.weight.nbytes for module in model.modules() if isinstance(module, torch.nn.Linear)
        )
        assert time_linears(loaded, rows) > 0
    assert time_weight_read(loaded) > 0


class PackedLayers(torch.nn.Module):
    """Packed weights of two formats, as a compiled block calls them."""

    def __init__(self) -> None:
        super().__init__()
        q = torch.randint(0, 16, (64, 64))
        self.register_buffer("four", Packing(4, -1).pack(q, torch.ones(64, 2), torch.ones(64, 2)))
        self.register_buffer("eight", Packing(8, 128).pack(q, torch.ones(64, 2)))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for _ in range(3):
            x = torch.ops.inlay.packed_linear(x.relu(), self.four, None, 64, 4, -1)
            x = torch.ops.inlay.packed_linear(x.sigmoid(), self.eight, None, 64, 8, 128)
        return x


def test_linears_with_packed_weights(tmp_path: Path) -> None:
    example = Example(PackedLayers(), (torch.ones(2, 64),), axes={"x": {0: "rows"}})
    build(example, tmp_path / "package")
    found = find_linear_calls(load_package(tmp_path / "package"), 1)
    assert [(each.bits, each.zero, each.features, each.depth) for each in found] == [
        (4, -1, 64, 64),
        (8, 128, 64, 64),
    ] * 3


def _peers(folder: Path, **scripts: str) -> tuple[Path, Path]:
    """A folder of scripts that do something when they are opened, and an environment for them."""
    (folder / "peers").mkdir()
    (folder / "PEERS" / "bin").mkdir(parents=True)
    (folder / "PEERS" / "bin" / "python").symlink_to(sys.executable)
    for name, opening in scripts.items():
        text = SCRIPT.format(opening=opening, batch="return [0.5] * tokens")
        (folder / "peers" / f"{name}.py").write_text(text)
    return folder, folder / "PEERS"


def _race(contestants: list[Contestant], rounds: int = 2) -> BenchResult:
    tasks = [
        BenchTask("decode", "decode", {"tokens": 3, "context_tokens": 1}),
        BenchTask("prefill", "prefill", {"tokens": 4}, 4),
    ]
    return run_rounds([(each, tasks) for each in contestants], rounds, lambda step: None)


@pytest.mark.fast
def test_who_cannot_take_part_says_why(tmp_path: Path) -> None:
    folder, peers = _peers(
        tmp_path,
        absent="import no_such_library",
        choosy="raise SystemExit('it reads nothing but tea leaves.')",
        dying="import os; os.kill(os.getpid(), 4)",
        fine="pass",
        raising="raise ValueError('wrong')",
    )
    raced = _race(find(folder, peers, None, {"threads": 1}))
    assert set(raced.samples) == {"fine"}
    assert raced.samples["fine"].seconds["decode"] == [[0.5] * 3] * 2
    assert len(raced.samples["fine"].seconds["first_token"]) == 2
    assert raced.notes == [
        "absent is unavailable: no_such_library is not installed in its environment.",
        "choosy is unavailable: it reads nothing but tea leaves.",
        "dying was killed by SIGILL.",
        "raising exited with code 1: ValueError: wrong.",
        "fine: Prompts are not for me.",
    ]


@pytest.mark.fast
def test_no_environment(tmp_path: Path) -> None:
    folder, _ = _peers(tmp_path, fine="pass")
    raced = _race(find(folder, tmp_path / "nothing", None, {}))
    assert raced.notes == [
        f"{tmp_path}/nothing/bin/python does not exist. Install the peers as described in docs/benchmarks.md."
    ]


@pytest.mark.fast
def test_contestants_of_this_repository() -> None:
    folder = Path(__file__).parents[2] / "tools/benchmarks" / "contestants"
    assert find(folder, None, None, {}) == []
    names = [each.name for each in find(folder, Path("PEERS"), None, {})]
    assert names == ["llama_cpp", "openvino:int4", "openvino:int8"]
    own = find(folder, None, ["hf:compiled-bf16", "hf"], {})
    assert own[0].name == "hf:compiled-bf16"
    assert len(own) == 4
    assert {each.python for each in own} == {Path(sys.executable).absolute()}


@pytest.mark.fast
def test_ratios_are_of_a_round() -> None:
    raced = BenchResult()
    for name, seconds in ((INLAY, (1.0, 2.0, 4.0)), ("slow", (2.0, 4.0, 8.0)), ("fast", (0.5, 2.0, 2.0))):
        raced.samples[name] = samples = Samples("1")
        for each in seconds:
            samples.add(BenchTask("decode", "decode", {}), [each, each])
    made = report(raced, 16)
    assert made["decode_tok_s"] == 0.5
    assert made["against"]["slow"]["decode"] == {"median": 2.0, "low": 2.0, "high": 2.0}
    assert made["over_best"]["decode"] == {"name": "fast", "median": 0.5, "low": 0.5, "high": 1.0}


@pytest.mark.fast
def test_random_model_is_read(tmp_path: Path) -> None:
    from tools.benchmarks.random_llama import Shape, write

    from inlay.frontend import open_model

    write(tmp_path / "random.gguf", Shape(2, 64, 96, 4, 2, 512, 128))
    model = open_model(str(tmp_path / "random.gguf"))
    assert (model.config_facts["layers"], model.config_facts["kv_heads"], model.config_facts["vocabulary"]) == (
        2,
        2,
        512,
    )
    for name, row in model.tensors.items():
        value = row.read()
        assert bool(torch.isfinite(value).all()), name
        assert value.dim() == 1 or abs(float(value.mean())) < 0.1 * float(value.std()), name


def test_losses_of_a_package_are_its_models(package: Path, model_folder: Path) -> None:
    from tools.benchmarks.perplexity import model_losses, package_losses

    given = [list(range(3, 20)), list(range(40, 57))]
    found = list(package_losses(package, given))
    assert len(found) == 32
    assert found == pytest.approx(list(model_losses(model_folder, given)), rel=1e-4)


@pytest.mark.fast
def test_windows_are_whole() -> None:
    from tools.benchmarks.perplexity import WINDOW, windows

    assert [len(each) for each in windows(list(range(3 * WINDOW)), 2 * WINDOW + 7)] == [WINDOW, WINDOW]
    with pytest.raises(SystemExit, match="has 3 tokens"):
        windows([1, 2, 3], 4)


@pytest.mark.fast
def test_texts_of_the_picture_do_not_overlap() -> None:
    raced = BenchResult()
    for name, rate in ((INLAY, 100.0), ("openvino:int8", 50.0), ("hf:compiled-bf16", 20.0)):
        raced.samples[name] = samples = Samples("1")
        for task, tokens in (("decode", 1), ("prefill", 512), ("batch16", 16), ("bare_decode", 1), ("read", 1)):
            samples.seconds[task], samples.tokens[task] = [[1 / rate, 2 / rate]], tokens
        samples.seconds["first_token"], samples.tokens["first_token"] = [[1.0]], 1
    drawn = ElementTree.fromstring(draw(report(raced, 16), "A model, 2 threads"))
    panels = drawn.findall(f"{SVG}g")
    assert len(panels) == 3
    for panel in panels:
        boxes = [_box(text) for text in panel.findall(f"{SVG}text")]
        for one, other in itertools.combinations(boxes, 2):
            apart = one[2] <= other[0] or other[2] <= one[0] or one[3] <= other[1] or other[3] <= one[1]
            assert apart, f"{one[4]} lies over {other[4]}"


def _box(text: ElementTree.Element) -> tuple[float, float, float, float, str]:
    size, x, y = (float(text.attrib[key]) for key in ("font-size", "x", "y"))
    wide = len(text.text or "") * size * 0.56
    left = x - {"start": 0.0, "end": wide}[text.attrib["text-anchor"]]
    return left, y - 0.8 * size, left + wide, y + 0.2 * size, text.text or ""

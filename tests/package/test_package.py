"""A package: built once, loaded without a compiler, the same tokens as the model."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest
import torch

from inlay.errors import PackageError, UsageError
from inlay.flow import BuildOptions, build
from inlay.lowering.executable import PlanExecutor
from inlay.package import manifest as manifests
from inlay.package.loader import load_package, read_manifest
from inlay.package.refit import refit
from inlay.program.bindings import Bindings
from inlay.program.weights import DerivedTensor
from inlay.runtime import Session
from inlay.transforms.base import Numerics, Stage, Transform, TransformResult, transform
from inlay.transforms.lock import read_lock
from tests.models import Convolutions, random_model
from tests.small_packages import FIELDS, ROOM, eager_greedy, greedy, in_new_process

if TYPE_CHECKING:
    from pathlib import Path

    from inlay.program.program import Program


def test_pieces(package: Path) -> None:
    """One compiled block for all layers and one for the head, and a few calls before."""
    manifest, folder = read_manifest(package)
    assert [bucket.name for bucket in manifest.buckets] == ["length=1", "all"]
    for bucket in manifest.buckets:
        compiled = [piece for piece in bucket.pieces if piece.file.endswith(".so")]
        assert [sum(step.piece == piece.name for step in bucket.steps) for piece in compiled] == [3, 1]
        assert len(bucket.pieces) == 3
    assert len(manifest.states) == 6
    (entry,) = read_lock(folder / "matches.lock").models
    assert (entry.transforms["match_attention"].sites, entry.transforms["insert_kv_cache"].sites) == (3, 3)
    assert not any(file.suffix in (".pt", ".pkl", ".bin") for file in folder.rglob("*"))
    weight = load_package(package).weights["model.layers.0.mlp.down_proj.weight"].numpy().tobytes()[:64]
    assert weight in (folder / "weights.safetensors").read_bytes()
    assert not any(weight in file.read_bytes() for file in folder.glob("*.so")), "code holds no weights"


@pytest.mark.parametrize("batch", [1, 3, 4])
def test_same_tokens_as_the_model(package: Path, model: Any, batch: int) -> None:
    prompts = torch.randint(3, 300, (batch, 7), generator=torch.Generator().manual_seed(batch))
    assert torch.equal(greedy(load_package(package), prompts, 64), eager_greedy(model, prompts, 64))


NEW_PROCESS = """
import sys, torch
from inlay.package import load_package
from inlay.runtime import Session
session = Session(load_package(sys.argv[1]))
scores = session.advance([[5, 6, 7]])
for _ in range(8):
    scores = session.advance([[int(scores.argmax())]])
heavy = ("torch._inductor", "torch._dynamo", "transformers", "sympy")
print([name for name in sys.modules if name.startswith(heavy)], session.lengths)
"""


def test_a_new_process_needs_no_compiler(package: Path) -> None:
    assert in_new_process(NEW_PROCESS, package).stdout.strip() == "[] [11]"


def test_generate(package: Path) -> None:
    import inlay

    answer = inlay.load(package).generate("The quick", max_tokens=8, raw=True)
    assert len(answer.tokens) == 8
    pieces = list(inlay.load(package).generate("The quick", max_tokens=8, raw=True, stream=True))
    assert [piece.token for piece in pieces] == list(answer.tokens)


class TestSession:
    def test_starting_over_needs_no_zeroing(self, package: Path, model: Any) -> None:
        session = Session(load_package(package), 2)
        first = session.advance([[9] * 60, [8] * 60])
        for value in session._state.values():
            value.fill_(float("nan"))
        session.restart()
        prompts = torch.tensor([[5, 6, 7], [7, 6, 5]])
        again = session.advance(prompts)
        with torch.no_grad():
            torch.testing.assert_close(again, model(prompts).logits[:, -1])
        assert bool(torch.isfinite(first).all())

    def test_one_sequence_of_several_starts_over(self, package: Path, model: Any) -> None:
        session = Session(load_package(package), 2)
        session.advance([[9] * 20, [8] * 20])
        session.restart(0)
        assert session.lengths == [0, 20]
        scores = session.advance([[5, 6], [7, 7]])
        with torch.no_grad():
            torch.testing.assert_close(scores[0], model(torch.tensor([[5, 6]])).logits[0, -1])
            torch.testing.assert_close(scores[1], model(torch.tensor([[8] * 20 + [7, 7]])).logits[0, -1])

    def test_a_prompt_in_parts(self, package: Path, model: Any) -> None:
        session = Session(load_package(package))
        tokens = torch.arange(3, 40)[None]
        for part in tokens.split([1, 5, 1, 1, 29], 1):
            scores = session.advance(part)
        with torch.no_grad():
            torch.testing.assert_close(scores, model(tokens).logits[:, -1])

    def test_results_stay(self, package: Path) -> None:
        session = Session(load_package(package))
        held = session.advance([[5, 6, 7]])
        before = held.clone()
        for _ in range(5):
            session.advance([[9]])
        assert torch.equal(held, before)

    def test_two_sessions_share_weights_and_no_state(self, package: Path, model: Any) -> None:
        loaded = load_package(package)
        one, two = Session(loaded), Session(loaded)
        one.advance([[5, 6, 7]])
        two.advance([[9, 9, 9, 9]])
        scores = one.advance([[8]])
        with torch.no_grad():
            torch.testing.assert_close(scores, model(torch.tensor([[5, 6, 7, 8]])).logits[:, -1])

    def test_room_ends(self, package: Path) -> None:
        session = Session(load_package(package))
        session.advance([[5] * ROOM])
        with pytest.raises(UsageError, match=f"the limit is {ROOM}"):
            session.advance([[5]])
        with pytest.raises(UsageError, match="4 slots"):
            Session(load_package(package), 5)
        with pytest.raises(UsageError, match=r"\[1, length\]"):
            Session(load_package(package)).advance([[1], [2]])


class TestRefusals:
    def changed(self, package: Path, tmp_path: Path, **changes: Any) -> Path:
        """A copy of a package whose manifest says something else, consistently."""
        copy = tmp_path / "changed"
        shutil.copytree(package, copy, symlinks=True)
        folder = (copy / "current").resolve()
        found = json.loads((folder / manifests.NAME).read_text())
        for path, value in changes.items():
            *parents, last = path.split("__")
            at = found
            for name in parents:
                at = at[name]
            at[last] = value
        text = json.dumps(found)
        (folder / manifests.NAME).write_text(text)
        home = folder.rename(folder.with_name(manifests.version_hash(text.encode())))
        (copy / "current").unlink()
        (copy / "current").symlink_to(f"versions/{home.name}")
        return copy

    @pytest.mark.parametrize(
        ("changes", "sentence"),
        [
            ({"target__torch": "2.12.1"}, "built with torch 2.12.1"),
            ({"target__machine": "riscv"}, "built for riscv"),
            ({"target__cpu_features": ["avx2", "avx1024"]}, "a CPU with avx1024"),
            ({"format": 99}, "has format 99"),
            ({"buckets": 3}, "does not match its format"),
        ],
        ids=["torch", "machine", "features", "format", "shape"],
    )
    def test_what_does_not_fit(self, package: Path, tmp_path: Path, changes: dict[str, Any], sentence: str) -> None:
        with pytest.raises(PackageError, match=sentence):
            load_package(self.changed(package, tmp_path, **changes))

    def test_a_constant_the_library_does_not_know(self, package: Path, tmp_path: Path) -> None:
        manifest, _ = read_manifest(package)
        buckets = json.loads(manifest.text())["buckets"]
        buckets[0]["pieces"][1]["constants"][0] = "other"
        with pytest.raises(PackageError, match="disagree about the constant"):
            load_package(self.changed(package, tmp_path, buckets=buckets))

    def test_no_package(self, tmp_path: Path) -> None:
        with pytest.raises(PackageError, match="is not an Inlay package"):
            load_package(tmp_path)
        (tmp_path / "mine.txt").write_text("mine")
        with pytest.raises(UsageError, match="is not an Inlay package"):
            build("unused", tmp_path)


def test_a_module_of_ones_own(tmp_path: Path) -> None:
    """Not a decoder: a plain program with sizes that change."""
    from inlay import Example

    torch.manual_seed(0)
    module = Convolutions().eval()
    example = Example(module, (torch.randn(2, 1, 64),), axes={"audio": {0: "batch", 2: "frames"}})
    build(example, tmp_path / "package")
    loaded = load_package(tmp_path / "package")
    for shape in ((1, 1, 64), (3, 1, 97)):
        audio = torch.randn(shape)
        with torch.no_grad():
            torch.testing.assert_close(loaded({"audio": audio})["output"], module(audio), rtol=1e-4, atol=1e-5)
    with pytest.raises(UsageError, match="must be f32"):
        loaded({"audio": torch.ones(2, 1, 64, dtype=torch.float64)})


def test_refit(package: Path, model_folder: Path, tmp_path: Path) -> None:
    """Other weights, other tokens, the same code."""
    other = random_model(FIELDS, seed=5)
    other.save_pretrained(tmp_path / "other")
    before, _ = read_manifest(package)
    made = refit(package, str(tmp_path / "other"), output=tmp_path / "package")
    prompts = torch.randint(3, 300, (2, 7))
    tokens = greedy(load_package(tmp_path / "package", verify=True), prompts, 16)
    assert torch.equal(tokens, eager_greedy(other, prompts, 16))
    assert not torch.equal(tokens, greedy(load_package(package), prompts, 16))
    code = {name: row for name, row in before.files.items() if name.endswith((".so", ".cpp"))}
    assert {name: made.files[name] for name in code} == code
    random_model(FIELDS | {"num_hidden_layers": 2}).save_pretrained(tmp_path / "shallow")
    with pytest.raises(UsageError, match=r"has no tensor model\.layers\.2"):
        refit(package, str(tmp_path / "shallow"), output=tmp_path / "refused")
    assert not (tmp_path / "refused" / "current").exists()


def test_buckets_are_told_apart(package: Path) -> None:
    """Single tokens run in code made for them, prompts in code for any length."""
    loaded = load_package(package)
    used: list[str] = []
    for bucket, execution in loaded.buckets:
        assert isinstance(execution, PlanExecutor)
        first = execution.steps[0]
        execution.steps[0] = (_noting(first[0], used, bucket.name), *first[1:])
    session = Session(loaded)
    session.advance([[5, 6, 7]])
    session.advance([[8]])
    assert used == ["all", "length=1"]


def _noting(run: Any, used: list[str], name: str) -> Any:
    def noted(inputs: Any) -> Any:
        used.append(name)
        return run(inputs)

    return noted


@pytest.mark.parametrize("text", ["length", "length=x", "length=0", "width=1", "length=5..900"])
def test_wrong_buckets(text: str) -> None:
    from inlay.lowering.lower import _parse_bucket
    from inlay.program.program import Symbol

    symbols = {"batch": Symbol("batch", 1, 4), "length": Symbol("length", 1, 96, limited_by="most")}
    with pytest.raises(UsageError) as refused:
        _parse_bucket(text, symbols)
    assert ("The option most sets the largest length." in str(refused.value)) == (text in {"length=0", "length=5..900"})


@pytest.fixture
def transposes_the_head() -> str:
    """A transform that keeps a weight in another layout, and says how it is made."""

    @transform("transposes_the_head", stage=Stage.WEIGHTS, numerics=Numerics.ROUNDING)
    class TransposesTheHead(Transform):
        """The last linear layer reads its weight the other way round."""

        def apply(self, program: Program) -> TransformResult:
            row = next(row for row in program.bindings if row.target == "lm_head.weight")
            weight = next(node for node in program.graph.nodes if node.name == row.name)
            weight.meta["val"] = weight.meta["val"].t().contiguous()
            for linear in list(weight.users):
                with program.graph.inserting_before(linear):
                    new = program.graph.call_function(torch.ops.aten.matmul.default, (linear.args[0], weight))
                new.meta = dict(linear.meta)
                linear.replace_all_uses_with(new)
                program.graph.erase_node(linear)
            turned = replace(row, shape=tuple(reversed(row.shape)))
            rows = tuple(turned if each is row else each for each in program.bindings)
            tensors = {**program.tensors, row.name: DerivedTensor({row.target: program.tensors[row.name]}, "transpose")}
            return TransformResult(replace(program, bindings=Bindings(rows), tensors=tensors), 1)

    return "transposes_the_head"


def test_refit_goes_through_weight_maps(
    transposes_the_head: str, model_folder: Path, model: Any, tmp_path: Path
) -> None:
    config = tmp_path / "config.yaml"
    config.write_text(f"transforms:\n  {transposes_the_head}: {{}}\n")
    path = tmp_path / "package"
    options = BuildOptions(
        max_length=ROOM, buckets=(), config=(config,), settings=("gather_last_logits.enabled=false",)
    )
    manifest = build(str(model_folder), path, options).manifest
    assert manifest.weights["lm_head.weight"].map == "transpose"
    assert manifest.weights["lm_head.weight"].shape == (FIELDS["hidden_size"], 320)
    prompts = torch.randint(3, 300, (1, 7))
    assert torch.equal(greedy(load_package(path), prompts, 8), eager_greedy(model, prompts, 8))
    other = random_model(FIELDS, seed=5)
    other.save_pretrained(tmp_path / "other")
    refit(path, str(tmp_path / "other"))
    assert torch.equal(greedy(load_package(path), prompts, 8), eager_greedy(other, prompts, 8))


class Adds(torch.nn.Module):
    def forward(self, x: torch.Tensor, total: torch.Tensor) -> torch.Tensor:
        return total + x


def test_a_declared_alias(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`--alias output=total`: the result lies in the storage of the argument. The folder is given as people do."""
    from inlay import Example

    monkeypatch.chdir(tmp_path)
    example = Example(Adds(), (torch.ones(4), torch.zeros(4)))
    built = build(example, "package", BuildOptions(alias={"output": "total"}))
    assert [row.target for row in built.manifest.states] == ["total"]
    loaded, total = load_package("package"), torch.zeros(4)
    for _ in range(3):
        loaded({"x": torch.ones(4), "total": total})
    assert total.tolist() == [3.0] * 4

"""The accuracy of a package: small for a right one, and large for each planted fault."""

from __future__ import annotations

import json
import math
import shutil
from dataclasses import replace
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from typer.testing import CliRunner

from inlay import api
from inlay.cli.main import app
from inlay.errors import ModelError, UsageError
from inlay.flow import BuildOptions, build
from inlay.insight import accuracy
from inlay.package.loader import LoadedPackage, load_package, read_manifest
from inlay.package.refit import refit
from inlay.runtime.text_codec import TextCodec
from tests.models import random_model
from tests.shared_cache import once_a_run
from tests.text_models import byte_tokenizer

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from inlay.program.program import Program

LAYERS, HEADS, KV_HEADS, HEAD = 4, 4, 2, 16
FIELDS: dict[str, Any] = {
    "model_type": "gemma",
    "num_hidden_layers": LAYERS,
    "hidden_size": HEADS * HEAD,
    "intermediate_size": 96,
    "num_attention_heads": HEADS,
    "num_key_value_heads": KV_HEADS,
    "head_dim": HEAD,
    "vocab_size": 320,
    "max_position_embeddings": 512,
    "initializer_range": 0.15,
}
Weights = dict[str, torch.Tensor]


@pytest.fixture(scope="module")
def home() -> Path:
    """A model whose norms have an offset (Gemma: 1 + weight) and its package. Read it only."""

    def make(folder: Path) -> None:
        random_model(FIELDS).save_pretrained(folder / "model")
        byte_tokenizer().save_pretrained(folder / "model")
        build(str(folder / "model"), folder / "package", BuildOptions(max_length=320, max_batch=4))

    return once_a_run("accuracy", make)


def test_a_right_package_agrees(home: Path) -> None:
    steps: list[str] = []
    report = api.measure_accuracy(home / "package", source=str(home / "model"), max_tokens=300, on_step=steps.append)
    assert report.tokens == 300
    assert (report.decode.positions, report.prefill.positions) == (298, 10)
    assert report.serving.positions > 150
    assert report.kl < 1e-6
    assert report.decode.same_top == report.prefill.same_top == report.serving.same_top == 1
    assert report.unreached == ()
    assert report.decode.perplexity == pytest.approx(report.decode.reference_perplexity, rel=1e-4)
    assert [each.layer for each in report.layers] == list(range(LAYERS))
    assert max(each.drift for each in report.layers) < 1e-4
    assert "layers" in steps


def test_the_reference_is_what_transformers_computes(home: Path) -> None:
    """Perplexity and logits come from the model itself, not from anything that Inlay has rewritten."""
    from transformers import AutoModelForCausalLM

    stock = AutoModelForCausalLM.from_pretrained(home / "model", dtype=torch.float32)
    tokens = TextCodec.load(home / "package" / "current" / "tokenizer").encode(api.SAMPLE_TEXT.read_text())[:100]
    with torch.no_grad():
        loss = float(stock(torch.tensor([tokens]), labels=torch.tensor([tokens])).loss)
    report = api.measure_accuracy(home / "package", source=str(home / "model"), max_tokens=100)
    assert report.decode.reference_perplexity == pytest.approx(torch.tensor(loss).exp().item(), rel=1e-4)


def _scale_one_layer(weights: Weights) -> None:
    weights["model.layers.2.mlp.down_proj.weight"] *= 1.1


def _drop_norm_offset(weights: Weights) -> None:
    weights["model.layers.1.input_layernorm.weight"] -= 1


def _swap_rotary(weights: Weights) -> None:
    """Rotate neighbours, where the model rotates halves."""
    for name, heads in (("q_proj", HEADS), ("k_proj", KV_HEADS)):
        key = f"model.layers.0.self_attn.{name}.weight"
        weights[key] = weights[key].reshape(heads, 2, HEAD // 2, -1).transpose(1, 2).reshape(weights[key].shape).clone()


@pytest.mark.parametrize(
    ("fault", "layer"),
    [(_scale_one_layer, 2), (_drop_norm_offset, 1), (_swap_rotary, 0)],
    ids=["scale", "norm", "rotary"],
)
def test_faults_exceed_the_limit_and_the_layer_is_shown(
    home: Path, tmp_path: Path, fault: Callable[[Weights], None], layer: int
) -> None:
    """The faults of kernels and transforms, planted in the weights that a package is given."""
    model = shutil.copytree(home / "model", tmp_path / "model")
    weights = load_file(model / "model.safetensors")
    fault(weights)
    save_file(weights, model / "model.safetensors", {"format": "pt"})
    package = shutil.copytree(home / "package", tmp_path / "package", symlinks=True)
    refit(package, str(model))
    arguments = [str(package), "--source", str(home / "model"), "--max-tokens", "300"]
    failed = CliRunner().invoke(app, ["verify", *arguments, "--max-kl", "1e-4", "--json"])
    assert failed.exit_code == 1, failed.output
    report = json.loads(failed.stdout)
    assert not report["ok"]
    assert report["kl"] > 1e-4
    drifts = [each["drift"] for each in report["layers"]]
    assert max(drifts[:layer], default=0.0) < 1e-4 < drifts[layer], drifts


Inputs = dict[str, torch.Tensor]


class Wrapped:
    """A package whose calls are made by a function."""

    def __init__(self, package: Any, call: Callable[[Any, Inputs, bool], Inputs]) -> None:
        self.package, self.call = package, call

    def __getattr__(self, name: str) -> Any:
        return getattr(self.package, name)

    def __call__(self, inputs: Inputs, *, is_prefill: bool = False) -> Inputs:
        return self.call(self.package, inputs, is_prefill)


def _zeros_if(condition: Callable[[Inputs, bool], bool]) -> Callable[[Any, Inputs, bool], Inputs]:
    """Return a call whose logits are zeros under a condition."""

    def call(package: Any, inputs: Inputs, is_prefill: bool) -> Inputs:
        results: Inputs = package(inputs, is_prefill=is_prefill)
        wrong = condition(inputs, is_prefill)
        return {**results, "logits": torch.zeros_like(results["logits"])} if wrong else results

    return call


def _one_length(package: Any, inputs: Inputs, is_prefill: bool) -> Inputs:
    lengths = inputs["lengths"][:1].repeat(len(inputs["lengths"]))
    result: Inputs = package({**inputs, "lengths": lengths}, is_prefill=is_prefill)
    return result


def _ignored_slots(package: Any, inputs: Inputs, is_prefill: bool) -> Inputs:
    result: Inputs = package({**inputs, "slots": torch.arange(len(inputs["slots"]))}, is_prefill=is_prefill)
    return result


def _other_slot_in_prefill(package: Any, inputs: Inputs, is_prefill: bool) -> Inputs:
    slots = (inputs["slots"] + is_prefill) % package.cache.slots
    result: Inputs = package({**inputs, "slots": slots}, is_prefill=is_prefill)
    return result


SERVING_FAULTS = {
    "decode of 1": _zeros_if(lambda inputs, is_prefill: not is_prefill and len(inputs["slots"]) == 1),
    "decode of 2 or 3": _zeros_if(lambda inputs, is_prefill: not is_prefill and len(inputs["slots"]) in (2, 3)),
    "one length": _one_length,
    "ignored slots": _ignored_slots,
    "other slot in prefill": _other_slot_in_prefill,
    "large chunk": _zeros_if(lambda inputs, _: inputs["input_ids"].shape[1] > 32),
    "far position": _zeros_if(lambda inputs, _: int(inputs["lengths"].max()) + inputs["input_ids"].shape[1] > 256),
}


@pytest.fixture(scope="module")
def program(home: Path) -> Program:
    return api.as_program(str(home / "model"))


@pytest.fixture(scope="module")
def measure(home: Path, program: Program) -> Callable[[Any], accuracy.AccuracyReport]:
    """Measure a package on four sequences at once."""
    tokens = TextCodec.load(home / "package" / "current" / "tokenizer").encode(api.SAMPLE_TEXT.read_text())[:772]
    return lambda package: accuracy.measure_accuracy(package, lambda: program, tokens)


@pytest.mark.parametrize("fault", SERVING_FAULTS)
def test_faults_that_only_a_server_would_see(
    home: Path, measure: Callable[[Any], accuracy.AccuracyReport], fault: str
) -> None:
    """Decode and prefill of equal sequences agree, and the calls of a server do not."""
    report = measure(Wrapped(load_package(home / "package"), SERVING_FAULTS[fault]))
    assert max(report.decode.kl_mean, report.prefill.kl_mean) < 1e-6
    assert report.serving.kl_mean == report.kl > 1e-3


def test_the_calls_of_a_server(home: Path, measure: Callable[[Any], accuracy.AccuracyReport]) -> None:
    """The right package agrees, and serving makes the calls that decode and prefill do not make."""
    sizes, ends, ragged, slots = set(), set(), 0, set()

    def watch(package: Any, inputs: Inputs, is_prefill: bool) -> Inputs:
        nonlocal ragged
        batch, length = inputs["input_ids"].shape
        sizes.add((is_prefill, batch, length))
        ends.add(int(inputs["lengths"].max()) + length)
        ragged += len(set(inputs["lengths"].tolist())) > 1
        slots.add(tuple(inputs["slots"].tolist()))
        result: Inputs = package(inputs, is_prefill=is_prefill)
        return result

    assert measure(Wrapped(load_package(home / "package"), watch)).kl < 1e-6
    assert {(False, batch, 1) for batch in (1, 2, 3, 4)} <= sizes
    assert {(True, 1, length) for length in (1, 3, 9, 27)} <= sizes
    assert max(length for _, _, length in sizes) > 200
    assert max(ends) == 320, "the last row of a slot"
    assert ragged > 20
    assert len(slots) > 4


def test_buckets_that_no_call_reaches_are_listed(
    home: Path, measure: Callable[[Any], accuracy.AccuracyReport], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Chunks of one sequence are reached wherever buckets begin. Two sequences of three tokens are not prefilled."""
    manifest, folder = read_manifest(home / "package")
    single, every = manifest.buckets
    ranges = {"small": (1, 2, 4), "large": (1, 200, 300), "full": (1, 310, 320), "pair": (2, 3, 3)}
    more = [
        replace(every, name=name, sizes={"batch": (batch, batch), "length": (low, high)})
        for name, (batch, low, high) in ranges.items()
    ]
    report = measure(LoadedPackage(replace(manifest, buckets=(single, *more, every)), folder))
    assert report.unreached == ("batch 2, length 3",)
    assert report.kl < 1e-6
    monkeypatch.setattr(api, "measure_accuracy", lambda *args, **kwargs: report)
    shown = CliRunner().invoke(app, ["verify", str(home / "package")])
    assert "No call reached the code for batch 2, length 3." in shown.output
    listed = json.loads(CliRunner().invoke(app, ["verify", str(home / "package"), "--json"]).stdout)
    assert listed["unreached"] == ["batch 2, length 3"]
    assert listed["serving"]["positions"] == report.serving.positions


def test_the_command(home: Path, tmp_path: Path) -> None:
    text = tmp_path / "text.txt"
    text.write_text("The quick brown fox jumps over the lazy dog. " * 8)
    arguments = ["verify", str(home / "package"), "--source", str(home / "model"), "--text", str(text)]
    shown = CliRunner().invoke(app, [*arguments, "--max-kl", "1e-4"])
    assert shown.exit_code == 0, shown.output
    assert "within the limit of 0.0001" in shown.output
    assert "serving" in shown.output
    assert "No call reached" not in shown.output
    assert "relative error of the hidden state after each layer" in shown.output
    assert CliRunner().invoke(app, ["verify", str(home / "model"), "--max-kl", "1"]).exit_code == 2
    gone = CliRunner().invoke(app, arguments[:2])
    assert gone.exit_code == 3
    assert "If the model was moved, pass it as --source." in " ".join(gone.stderr.split())


def test_what_cannot_be_measured(home: Path, tmp_path: Path) -> None:
    (tmp_path / "binary").write_bytes(b"\xff\xfe\x00")
    for text in (tmp_path / "missing", tmp_path / "binary"):
        with pytest.raises(UsageError, match=r"cannot be read.* Pass a text file in UTF-8\."):
            api.measure_accuracy(home / "package", text=text)
    (tmp_path / "empty").write_text("")
    with pytest.raises(UsageError, match=r"has 1 tokens, .* at least 2 tokens"):
        api.measure_accuracy(home / "package", text=tmp_path / "empty", source="./never captured")
    with pytest.raises(ModelError, match="nowhere") as wrong:
        api.measure_accuracy(home / "package", source="./nowhere")
    assert "--source" not in str(wrong.value)
    random_model({**FIELDS, "vocab_size": 352}).save_pretrained(tmp_path / "larger")
    with pytest.raises(UsageError, match=r"352 tokens in its vocabulary, and the package 320"):
        api.measure_accuracy(home / "package", source=str(tmp_path / "larger"), max_tokens=9)


def test_a_package_with_room_for_one_token_cannot_be_measured() -> None:
    """Zero positions would agree with anything."""
    package: Any = SimpleNamespace(
        manifest=SimpleNamespace(kind="decoder"), cache=SimpleNamespace(max_seq_len=2, slots=1, vocab_size=9)
    )
    with pytest.raises(UsageError, match="in sequences of 1"):
        accuracy.measure_accuracy(package, lambda: pytest.fail("captured"), [1, 2, 3])


def _agreement(logits: torch.Tensor, reference: torch.Tensor) -> accuracy.Agreement:
    sums = accuracy._Sums()
    for row in range(len(logits)):
        sums.add(logits[row : row + 1], reference[row : row + 1], torch.tensor([0]))
    return sums.agreement()


def test_values_that_are_not_finite_are_not_agreement() -> None:
    reference = torch.randn(3, 8)
    wrong = reference.clone()
    wrong[1, 2] = float("nan")
    found = _agreement(wrong, reference)
    assert math.isnan(found.kl_mean)
    assert math.isnan(found.kl_max)
    right = _agreement(reference, reference)
    report = accuracy.AccuracyReport(3, found, right, right, ())
    assert report.kl == math.inf
    assert accuracy.AccuracyReport(3, right, right, found, ()).kl == math.inf
    assert json.loads(json.dumps(report.to_json(), allow_nan=False))["decode"]["kl_max"] is None
    reference[:, 5] = float("-inf")
    same = _agreement(reference, reference)
    assert (same.kl_mean, same.kl_max) == (0, 0), "tokens that both exclude"
    more = reference.clone()
    more[0, 1] = float("-inf")
    assert _agreement(more, reference).kl_max == math.inf, "a token that only the package excludes"
    reference[0, 1] = -1e4
    assert _agreement(more, reference).kl_max < 1e-6, "its probability in the reference is 0 after rounding"


def test_a_reference_that_is_not_finite_is_not_blamed_on_the_package(program: Program) -> None:
    """-inf excludes a token and is accepted; NaN and inf are not."""
    runner: Any = accuracy._Reference(program, 320)
    made = torch.zeros(1, 4, 320)
    runner._run = lambda *args, **kwargs: [made]
    made[0, 0, 0] = -math.inf
    assert runner.logits(torch.zeros(1, 4)).isinf().any()
    for wrong in (math.nan, math.inf):
        made[0, 0, 0] = wrong
        with pytest.raises(ModelError, match="The reference is not finite"):
            runner.logits(torch.zeros(1, 4))


def test_kl_is_what_torch_computes() -> None:
    one, two = torch.randn(2, 5, 40, dtype=torch.float64)
    expected = torch.distributions.kl_divergence(
        torch.distributions.Categorical(logits=two), torch.distributions.Categorical(logits=one)
    )
    assert _agreement(one, two).kl_mean == pytest.approx(float(expected.mean()))


def test_logits_that_are_not_finite_fail_without_a_limit(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    finite = api.measure_accuracy(home / "package", source=str(home / "model"), max_tokens=9)
    bad = replace(finite, decode=replace(finite.decode, kl_mean=math.nan), layers=(accuracy.LayerDrift(0, math.nan),))
    monkeypatch.setattr(api, "measure_accuracy", lambda *args, **kwargs: bad)
    shown = CliRunner().invoke(app, ["verify", str(home / "package")])
    assert shown.exit_code == 1, shown.output
    assert "The logits of the package are not finite." in shown.output
    assert CliRunner().invoke(app, ["verify", str(home / "package"), "--max-kl", "inf"]).exit_code == 1


@pytest.mark.nightly
def test_faults_in_smollm2(smollm2: Path, tmp_path: Path) -> None:
    """The same faults in a real model with four-bit weights, each in one of 30 layers."""
    import numpy as np
    from gguf import GGUFReader

    build(str(smollm2), tmp_path / "package", BuildOptions(max_length=512))
    right = api.measure_accuracy(tmp_path / "package")
    limit = 1.25 * right.kl
    assert right.kl < 0.005, "about the error of eight-bit activations"

    def spoil(name: str, change: Callable[[Any], None]) -> Path:
        file = shutil.copyfile(smollm2, tmp_path / "spoiled.gguf")
        tensors = {tensor.name: tensor.data for tensor in GGUFReader(file, "r+").tensors}
        change(tensors[name])
        tensors[name].flush()
        return file

    def scale(blocks: Any) -> None:
        """Q4_1: a scale and a minimum in float16, then 16 bytes, for 32 weights."""
        factors = blocks.reshape(-1, 20)[:, :4].copy().view(np.float16)
        blocks.reshape(-1, 20)[:, :4] = (factors * np.float16(1.1)).view(np.uint8)

    def swap(rows: Any) -> None:
        """Two neighbouring rows are rotated together in the file; rotate others."""
        heads = rows.reshape(-1, 2, 32, rows.shape[-1]).copy()
        rows[:] = heads.transpose(0, 2, 1, 3).reshape(rows.shape)

    def drop_offset(weight: Any) -> None:
        weight -= 1

    for name, fault in (
        ("blk.15.ffn_down.weight", scale),
        ("blk.7.attn_k.weight", swap),
        ("blk.20.ffn_norm.weight", drop_offset),
    ):
        refit(tmp_path / "package", str(spoil(name, fault)))
        found = api.measure_accuracy(tmp_path / "package", source=str(smollm2))
        assert found.kl > limit, (name, found.kl, right.kl)
        print(f"{name}: KL {found.kl:.4f}, limit {limit:.4f}")

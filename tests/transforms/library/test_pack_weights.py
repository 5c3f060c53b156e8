"""Packed weights: kept as stored or quantised with a stated error, in packages, refitted, and in little memory."""

from __future__ import annotations

import math
import re
from dataclasses import replace
from functools import cache
from typing import TYPE_CHECKING, Any, ClassVar

import gguf
import numpy as np
import pytest
import torch

from inlay.errors import ModelError, ProgramError, UsageError
from inlay.flow import BuildOptions, build, prepare, transform
from inlay.frontend import capture, open_model
from inlay.insight.interpreter import ProgramInterpreter
from inlay.ops.weight_formats import FORMATS, MixedFormat
from inlay.ops.weight_layout import unpack_mixed
from inlay.package.loader import load_package
from inlay.package.refit import refit
from inlay.program.bindings import Role
from inlay.program.weights import DerivedTensor, quantized_blocks, weight_maps
from inlay.rewrite.rule import Refusal
from inlay.testing import program_of
from inlay.transforms.library.pack_weights import PackWeights
from tests.models import llama_folder, random_k_blocks, random_model, tiny_gguf
from tests.small_packages import ROOM, assert_greedy, eager_greedy, greedy

if TYPE_CHECKING:
    from pathlib import Path

    from inlay.program.program import Program

KINDS: dict[str, Any] = {"attn_v": "Q4_0", "attn_output": "MXFP4", "ffn_down": "Q6_K"}
"""Beside Q4_1 and a tied Q8_0 embedding; queries and keys are Q4_1, so their weight with the values is mixed."""
TIED = {
    "model_type": "llama",
    "num_hidden_layers": 2,
    "hidden_size": 64,
    "intermediate_size": 256,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 96,
    "max_position_embeddings": 128,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": True,
}
_UNUSED = tuple(f"match_{name}.enabled=false" for name in ("softmax_attention", "layer_norm", "geglu"))
PROMPTS = torch.randint(3, 90, (1, 7), generator=torch.Generator().manual_seed(0))


@cache
def packed(path: Path, weights: str, *settings: str) -> tuple[Program, list[str], dict[str, int]]:
    """The program with packed weights, what was noted, and the sites of each transform."""
    options = BuildOptions(max_length=ROOM, weights=weights, settings=(*settings, *_UNUSED))
    program, records = transform(prepare(_captured(path), options), options)
    notes = [remark.reason for record in records for remark in record.notes]
    return program, notes, {record.key: record.sites for record in records}


def dequantised(program: Program, config: dict[str, Any]) -> Any:
    """The eager model with the values that the packed weights stand for."""
    state: dict[str, torch.Tensor] = {}
    for row in program.bindings.with_role(Role.PARAMETER):
        ref = program.tensors[row.name]
        if not isinstance(ref, DerivedTensor):
            state[row.target] = ref.read()
            continue
        sizes = [source.read().shape[0] for source in ref.sources.values()]
        value = ref.read()
        if ref.map.startswith("mixed:"):
            value = unpack_mixed(value)
        elif ref.map != "concat":
            found = FORMATS[ref.map.partition("pack:")[2]]
            value = found.packing.unpack(value, sum(sizes))
        state |= dict(zip(ref.sources, value.split(sizes), strict=True))
    model = random_model(config)
    tied = state.get("lm_head.weight", state.get("model.embed_tokens.weight"))
    missing, unknown = model.load_state_dict({"lm_head.weight": tied, "model.embed_tokens.weight": tied} | state)
    assert not missing
    assert not unknown
    return model


@cache
def _captured(path: Path) -> Program:
    return capture(str(path))


@pytest.mark.fast
@pytest.mark.parametrize("name", ["Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0"])
def test_stored_blocks_are_kept_exactly(name: str) -> None:
    values = torch.randn(40, 96, generator=torch.Generator().manual_seed(1)).numpy()
    kind = gguf.GGMLQuantizationType[name]
    blocks = gguf.quantize(values, kind)
    found = FORMATS[name]
    unpacked = found.packing.unpack(found.pack(torch.from_numpy(blocks)), 40)
    assert torch.equal(unpacked, torch.from_numpy(gguf.dequantize(blocks, kind)))
    assert found.measure_error(torch.from_numpy(blocks)).rms == 0


@pytest.mark.fast
@pytest.mark.parametrize("rows", [1, 17, 48])
@pytest.mark.parametrize("columns", [256, 768])
@pytest.mark.parametrize(
    ("name", "halves"), [("Q5_0", [0]), ("Q5_1", [0, 2]), ("Q4_K", [0, 2]), ("Q5_K", [0, 2]), ("Q6_K", [208])]
)
def test_any_stored_blocks_are_kept_exactly(name: str, halves: list[int], rows: int, columns: int) -> None:
    """All bits are drawn at random, except that scales are finite."""
    kind, rng = gguf.GGMLQuantizationType[name], np.random.default_rng(rows + columns)
    block, size = gguf.GGML_QUANT_SIZES[kind]
    stored = rng.integers(0, 256, (rows, columns // block, size), dtype=np.uint8)
    for at in halves:
        stored[:, :, at : at + 2] = rng.standard_normal((*stored.shape[:2], 1)).astype(np.float16).view(np.uint8)
    stored = stored.reshape(rows, -1)
    packed, packing = FORMATS[name].pack(torch.from_numpy(stored)), FORMATS[name].packing
    assert packed.shape == packing.shape(rows, columns)
    assert packed[0].numel() <= 1.03 * 16 * stored.shape[1]
    assert torch.equal(packing.unpack(packed, rows), torch.from_numpy(gguf.dequantize(stored, kind)))


@pytest.mark.fast
@pytest.mark.filterwarnings("ignore:invalid value")
@pytest.mark.parametrize("name", ["Q5_0", "Q4_K", "Q6_K"])
def test_scales_that_are_not_finite(name: str) -> None:
    """Their values are not finite, as those of the file, and the others are as before."""
    rng, kind = np.random.default_rng(0), gguf.GGMLQuantizationType[name]
    shape = 20, 512
    is_k = name.endswith("_K")
    stored = random_k_blocks(shape, name, rng) if is_k else gguf.quantize(np.ones(shape, np.float32), kind)
    at = 208 if name == "Q6_K" else 0
    for strange in (np.inf, -np.inf, np.nan):
        stored[3, at : at + 2] = np.array([strange], np.float16).view(np.uint8)
        unpacked = FORMATS[name].packing.unpack(FORMATS[name].pack(torch.from_numpy(stored)), 20)
        wanted = torch.from_numpy(gguf.dequantize(stored, kind))
        assert not wanted[3, :32].isfinite().all()
        assert torch.equal(unpacked.nan_to_num(7), wanted.nan_to_num(7))


@pytest.mark.fast
@pytest.mark.parametrize(
    ("name", "most"), [("int8", 0.006), ("int4-g32", 0.075), ("int4-g64", 0.085), ("int4-g128", 0.1)]
)
def test_the_error_of_quantised_weights(name: str, most: float) -> None:
    """For normal values; the search must beat the plain range of a group."""
    values = torch.randn(70, 256, generator=torch.Generator().manual_seed(1))
    found = FORMATS[name]
    unpacked = found.packing.unpack(found.pack(values), 70)
    rms = float((unpacked - values).norm() / values.norm())
    error = found.measure_error(values)
    assert error.rms == pytest.approx(rms, rel=1e-5)
    assert error.max_relative == pytest.approx(float((unpacked - values).abs().max() / values.abs().max()), rel=1e-5)
    assert 0 < rms < most
    if name != "int8":
        groups = values.view(70, -1, found.packing.group_size)
        low, high = groups.amin(2, keepdim=True), groups.amax(2, keepdim=True)
        plain = ((groups - low) / (high - low) * 15).round() * (high - low) / 15 + low
        assert rms < 0.97 * float((plain - groups).norm() / groups.norm())


@pytest.mark.fast
@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_the_error_of_values_that_are_not_finite(value: float) -> None:
    """It is not a number: a weight with one such value is not called exact."""
    values = torch.randn(70, 256, generator=torch.Generator().manual_seed(1))
    values[3, 5] = value
    for name in ("int8", "int4-g32"):
        error = FORMATS[name].measure_error(values)
        assert math.isnan(error.rms)
        assert math.isnan(error.max_relative)


@pytest.mark.fast
def test_rows_that_fill_no_block_and_groups_of_one_value() -> None:
    values = torch.zeros(17, 64)
    values[3] = 2.5
    values[16, 5] = -1e-3
    for name in ("int8", "int4-g32"):
        found = FORMATS[name]
        assert torch.allclose(found.packing.unpack(found.pack(values), 17), values, rtol=1e-3, atol=1e-6)


class TestGGUF:
    """A file with four formats."""

    @pytest.fixture(scope="class")
    def file(self, tmp_path_factory: pytest.TempPathFactory) -> Path:
        return tiny_gguf(tmp_path_factory.mktemp("gguf") / "tiny.gguf", inner=256, **KINDS)

    @pytest.fixture(scope="class")
    def package(self, file: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
        path = tmp_path_factory.mktemp("package") / "package"
        build(str(file), path, BuildOptions(max_length=ROOM, weights="stored", buckets=(), settings=_UNUSED))
        return path

    def test_what_is_kept_and_what_is_converted(self, file: Path) -> None:
        program, notes, sites = packed(file, "stored")
        assert sites["fuse_gemms"] == 4
        assert sites["pack_weights"] == 9, "four a layer, and the embedding, which is the head"
        rows = program.bindings.with_role(Role.PARAMETER)
        maps = {row.target: getattr(program.tensors[row.name], "map", "") for row in rows}
        assert maps["model.layers.0.self_attn.q_proj_k_proj_v_proj.weight"].endswith(":Q4_1,Q4_1,Q4_0")
        assert maps["model.layers.0.mlp.gate_proj_up_proj.weight"] == "concat+pack:Q4_1"
        assert maps["model.layers.1.mlp.down_proj.weight"] == "pack:Q6_K"
        assert maps["model.layers.1.self_attn.o_proj.weight"] == "pack:MXFP4"
        assert sum("pack:Q8_0" in each for each in maps.values()) == 1
        assert program.op_counts()["inlay.packed_embedding.default"] == 1
        kept = [note for note in notes if note.endswith("kept as stored")]
        mixed, (converted,) = ([note for note in notes if word in note] for word in (": mixed,", " → "))
        assert (len(kept), len(mixed)) == (6, 1)
        assert "model.layers.*.self_attn.o_proj.weight × 2: MXFP4 → int8 in groups of 32, error 0." in converted

    def test_the_stated_error_is_the_error(self, file: Path) -> None:
        _, notes, _ = packed(file, "stored")
        (stated,) = (float(found[1]) for note in notes if (found := re.search(r"error (\S+) % \(rms\)", note)))
        tensors = open_model(str(file)).tensors
        errors = []
        for layer in range(2):
            ref = tensors[f"model.layers.{layer}.self_attn.o_proj.weight"]
            blocks, original = quantized_blocks(ref), ref.read()
            assert blocks is not None
            made = FORMATS["MXFP4"].packing.unpack(FORMATS["MXFP4"].pack(blocks.read()), 64)
            errors.append(100 * float((made - original).norm() / original.norm()))
        assert stated == pytest.approx(max(errors), rel=1e-2)

    def test_same_tokens_as_the_dequantised_model(self, file: Path, package: Path) -> None:
        program, _, _ = packed(file, "stored")
        eager = dequantised(program, TIED)
        assert_greedy(eager, PROMPTS, greedy(load_package(package), PROMPTS, 24))

    def test_refit(self, package: Path, tmp_path: Path) -> None:
        other = tiny_gguf(tmp_path / "other.gguf", seed=5, inner=256, **KINDS)
        before = load_package(package).manifest
        made = refit(package, str(other), output=tmp_path / "package")
        eager = dequantised(packed(other, "stored")[0], TIED)
        assert_greedy(eager, PROMPTS, greedy(load_package(tmp_path / "package", verify=True), PROMPTS, 24))
        code = {name: row for name, row in before.files.items() if name.endswith((".so", ".cpp"))}
        assert {name: made.files[name] for name in code} == code

    def test_refit_from_other_formats_is_refused(self, package: Path, tmp_path: Path) -> None:
        other = tiny_gguf(tmp_path / "other.gguf", inner=256, **KINDS | {"attn_v": "Q8_0"})
        with pytest.raises(ModelError, match=r"v_proj\.weight is stored as Q8_0, but the weight map requires Q4_0"):
            refit(package, str(other), output=tmp_path / "refused")
        assert not (tmp_path / "refused" / "current").exists()


class TestMixedFormats:
    """Formats that differ between layers, and between the parts of a fused weight."""

    KINDS: ClassVar[dict[str, Any]] = {
        "attn_q": "Q5_0",
        "attn_k": "Q5_0",
        "attn_v": "Q5_0",
        "attn_output": "Q8_0",
        "ffn_gate": "Q5_1",
        "ffn_down": "Q4_K",
        "blk.0.attn_v": "Q8_0",
        "blk.2.attn_v": "Q8_0",
        "blk.0.ffn_down": "Q6_K",
        "blk.3.ffn_down": "Q5_K",
        "blk.1.attn_output": "MXFP4",
    }
    LAYERS = 4
    CONFIG = TIED | {"num_hidden_layers": LAYERS}

    @pytest.fixture(scope="class")
    def file(self, tmp_path_factory: pytest.TempPathFactory) -> Path:
        return tiny_gguf(tmp_path_factory.mktemp("gguf") / "mixed.gguf", self.LAYERS, inner=256, **self.KINDS)

    @pytest.fixture(scope="class")
    def package(self, file: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
        path = tmp_path_factory.mktemp("package") / "package"
        build(str(file), path, BuildOptions(max_length=ROOM, weights="stored", buckets=(), settings=_UNUSED))
        return path

    def test_fused_and_exact(self, file: Path) -> None:
        program, notes, sites = packed(file, "stored")
        assert sites["fuse_gemms"] == 2 * self.LAYERS, "queries, keys and values; gate and up"
        rows = {row.target: row for row in program.bindings.with_role(Role.PARAMETER)}
        tensors = open_model(str(file)).tensors
        kinds = ("self_attn.q_proj_k_proj_v_proj", "self_attn.o_proj", "mlp.gate_proj_up_proj", "mlp.down_proj")
        for kind in kinds:
            mixed = [rows[f"model.layers.{layer}.{kind}.weight"] for layer in range(self.LAYERS)]
            assert len({row.shape for row in mixed}) == 1, "one size in all layers"
            for row in mixed:
                ref = program.tensors[row.name]
                assert isinstance(ref, DerivedTensor)
                assert ref.map.startswith("mixed:")
                stored = [name for name in ref.sources if quantized_blocks(tensors[name]).format != "MXFP4"]  # type: ignore[union-attr]
                if len(stored) == len(ref.sources):
                    assert torch.equal(unpack_mixed(ref.read()), torch.cat([tensors[name].read() for name in stored]))
        assert "model.layers.*.self_attn.v_proj.weight × 2: Q8_0, kept as stored" in notes
        assert "model.layers.*.mlp.down_proj.weight × 2: Q4_K, kept as stored" in notes
        assert any(note.startswith("model.layers.*.mlp.down_proj.weight × 4: mixed, at most ") for note in notes)
        assert any("o_proj.weight × 1: MXFP4 → int8 in groups of 32, error 0." in note for note in notes)

    def test_one_compiled_block(self, package: Path) -> None:
        for bucket in load_package(package).manifest.buckets:
            steps = [step.piece for step in bucket.steps if step.piece.startswith("block")]
            assert len(steps) == self.LAYERS
            assert len(set(steps)) == 1

    def test_tokens(self, file: Path, package: Path) -> None:
        program, _, _ = packed(file, "stored")
        assert_greedy(dequantised(program, self.CONFIG), PROMPTS, greedy(load_package(package), PROMPTS, 24))

    def test_refit(self, package: Path, tmp_path: Path) -> None:
        other = tiny_gguf(tmp_path / "other.gguf", self.LAYERS, seed=5, inner=256, **self.KINDS)
        refit(package, str(other), output=tmp_path / "package")
        eager = dequantised(packed(other, "stored")[0], self.CONFIG)
        assert_greedy(eager, PROMPTS, greedy(load_package(tmp_path / "package", verify=True), PROMPTS, 24))
        other = tiny_gguf(tmp_path / "another.gguf", self.LAYERS, inner=256, **self.KINDS | {"blk.1.attn_v": "Q8_0"})
        with pytest.raises(ModelError, match=r"1\.self_attn\.v_proj\.weight is stored as Q8_0, but .* requires Q5_0"):
            refit(package, str(other), output=tmp_path / "refused")

    def test_a_layer_much_larger_than_the_others(self, tmp_path: Path) -> None:
        """Its weights are not mixed, because all others would grow."""
        kinds: dict[str, Any] = {"blk.2.ffn_down": "Q8_0"}
        file = tiny_gguf(tmp_path / "one.gguf", self.LAYERS, inner=256, **kinds)
        program, _, _ = packed(file, "stored")
        maps = [getattr(ref, "map", "") for ref in program.tensors.values()]
        assert maps.count("pack:Q8_0") == 2, "and the embedding"
        assert not any(each.startswith("mixed") for each in maps)

    @pytest.mark.fast
    @pytest.mark.parametrize("text", ["", "12", "x:Q4_K", "64:Q4_K,", "64:int8", "-1:Q4_K", "64:Q4_K,Q9_K"])
    def test_names_of_no_map(self, text: str) -> None:
        with pytest.raises(ProgramError, match=r"There is no weight map mixed:"):
            weight_maps(f"mixed:{text}")

    @pytest.mark.fast
    def test_too_many_rows(self) -> None:
        blocks = torch.zeros(64, 144, dtype=torch.uint8)
        with pytest.raises(ModelError, match=r"Weights of 64 × 256 do not fit into 4,096 bytes"):
            MixedFormat.parse("4096:Q4_K").pack(blocks)


class TestFolder:
    """Plain values are quantised."""

    @pytest.fixture(scope="class")
    def folder(self, tmp_path_factory: pytest.TempPathFactory) -> Path:
        return llama_folder(tmp_path_factory.mktemp("model"), **TIED)

    @pytest.mark.nightly
    def test_int4_in_a_package(self, folder: Path, tmp_path: Path) -> None:
        options = BuildOptions(max_length=ROOM, weights="int4-g64", buckets=(), settings=_UNUSED)
        made = build(str(folder), tmp_path / "package", options)
        sizes = {name: row.shape for name, row in made.manifest.weights.items() if row.dtype == "uint8"}
        assert sizes["model.layers.0.mlp.gate_proj_up_proj.weight"] == (32, 1, 64 * 16 // 2 + 64)
        heads = [shape for name, shape in sizes.items() if "lm_head" in name or "embed_tokens" in name]
        assert [shape[2] for shape in heads] == [32 * 16 + 32], "the head keeps eight bits"
        eager = dequantised(packed(folder, "int4-g64")[0], TIED)
        assert torch.equal(greedy(load_package(tmp_path / "package"), PROMPTS, 24), eager_greedy(eager, PROMPTS, 24))

    def test_int8_with_a_filter(self, folder: Path) -> None:
        settings = 'pack_weights.skip=["*embed_tokens*", "lm_head*"]', "insert_kv_cache.enabled=false"
        program, notes, sites = packed(folder, "int8", *settings)
        assert sites["pack_weights"] == 8
        assert len(notes) == 4
        assert all(re.search(r"× 2: int8, error 0\.\d+ % \(rms\)", note) for note in notes)
        eager = dequantised(program, TIED)
        with torch.no_grad():
            expected = eager(PROMPTS, use_cache=False).logits[:, -1:]
            torch.testing.assert_close(program.module()(input_ids=PROMPTS)["logits"], expected, rtol=1e-4, atol=1e-5)
        runner = (
            ProgramInterpreter()
        )  # what `inlay verify` and `inlay bisect` run programs before and after a transform with
        plain, quantised_too = (runner(each, {"input_ids": PROMPTS})[0] for each in (_captured(folder), program))
        torch.testing.assert_close(quantised_too, expected, rtol=1e-4, atol=1e-5)
        assert not torch.equal(plain[:, -1:], quantised_too)
        only = packed(folder, "int8", 'pack_weights.only=["*down_proj*"]')[2]
        assert only["pack_weights"] == 2

    def test_what_cannot_be(self, folder: Path) -> None:
        _, _, sites = packed(folder, "int4-g128", "pack_weights.expect=3")
        assert sites["pack_weights"] == 3, "64 columns are no groups of 128; the 256 of down_proj are, the head is int8"
        with pytest.raises(UsageError, match=r"There is no number format int3"):
            build(str(folder), folder / "package", BuildOptions(weights="int3"))


@pytest.mark.fast
@pytest.mark.parametrize(
    ("options", "map_name", "reason"),
    [
        ({"format": "none"}, "", "the option format is none"),
        ({"format": "stored"}, "", "the weight is stored as plain values"),
        ({"format": "int8", "skip": ["*"]}, "", "{target} is excluded by the options only and skip"),
        ({"format": "int8"}, "transpose", "{weight} was created by another transform"),
    ],
)
def test_weights_that_stay_as_they_are(options: dict[str, Any], map_name: str, reason: str) -> None:
    program = program_of(torch.nn.Linear(64, 16, bias=False), [torch.randn(3, 64)])
    (row,) = program.bindings.with_role(Role.PARAMETER)
    if map_name:
        source = {row.target: program.tensors[row.name]}
        program = replace(program, tensors={**program.tensors, row.name: DerivedTensor(source, map_name)})
    (refusal,) = PackWeights(PackWeights.Options(**options)).plan(program)
    assert isinstance(refusal, Refusal)
    assert refusal.text == reason.format(target=row.target, weight=row.name)

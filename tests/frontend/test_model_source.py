"""What MODEL means, and how each kind of it fails."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import pytest
import torch

from inlay.errors import CaptureError, ModelError, UsageError
from inlay.frontend import Example, capture, open_model
from inlay.frontend.gguf.conversion import ReorderedTensor
from inlay.program.weights import CastTensor
from tests.models import LLAMA, config_folder, llama_folder, random_model, tiny_gguf

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.fast


def test_folder_without_weights_is_captured_but_cannot_run(tmp_path: Path) -> None:
    program = capture(str(config_folder(tmp_path / "config-only")))
    assert program.facts.layers is not None
    assert program.facts.layers.value == 2
    with pytest.raises(ModelError, match="captured from its configuration alone"):
        program.module()


def test_dtype_is_the_checkpoints_unless_asked(tmp_path: Path) -> None:
    from inlay.frontend.huggingface.checkpoint import HFOptions

    random_model(LLAMA).to(torch.bfloat16).save_pretrained(tmp_path)
    assert capture(str(tmp_path)).bindings["p_lm_head_weight"].dtype == "bfloat16"
    program = capture(str(tmp_path), HFOptions(torch.float32))
    assert program.bindings["p_lm_head_weight"].dtype == "float32"
    assert program.tensors["p_lm_head_weight"].read().dtype == torch.float32


def test_sharded_checkpoint(tmp_path: Path) -> None:
    model = random_model(LLAMA)
    model.save_pretrained(tmp_path, max_shard_size="20KB")
    assert (tmp_path / "model.safetensors.index.json").exists()
    program = capture(str(tmp_path))
    ids = torch.arange(6).reshape(1, 6)
    with torch.no_grad():
        assert torch.equal(program.module()(input_ids=ids)["logits"], model(ids, use_cache=False).logits)
    next(iter(sorted(tmp_path.glob("model-*.safetensors")))).unlink()
    with pytest.raises(ModelError, match="but missing"):
        open_model(str(tmp_path))


def test_tied_weights_are_one_binding(tmp_path: Path) -> None:
    program = capture(str(llama_folder(tmp_path, tie_word_embeddings=True)))
    targets = [row.target for row in program.bindings]
    assert ("lm_head.weight" in targets) != ("model.embed_tokens.weight" in targets)


def test_gguf_keeps_its_blocks_and_rows_in_order(tmp_path: Path) -> None:
    import gguf
    import numpy as np

    path = tiny_gguf(tmp_path / "tiny.gguf")
    model = open_model(str(path))
    cast = model.tensors["model.layers.0.self_attn.q_proj.weight"]
    assert isinstance(cast, CastTensor)
    reordered = cast.source
    assert isinstance(reordered, ReorderedTensor)
    assert reordered.tensor.type_name == "Q4_1"
    order = reordered.row_order()
    assert order is not None
    assert not np.array_equal(order, np.arange(64)), "attention rows are permuted in GGUF files"
    values = gguf.dequantize(reordered.tensor.stored_bytes()[order], gguf.GGMLQuantizationType.Q4_1)
    assert torch.equal(torch.from_numpy(values), reordered.read())


def test_gguf_computes_what_transformers_computes(tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    path = tiny_gguf(tmp_path / "tiny.gguf")
    program = capture(str(path))
    eager = AutoModelForCausalLM.from_pretrained(tmp_path, gguf_file=path.name).eval()
    ids = torch.arange(10).reshape(2, 5)
    with torch.no_grad():
        torch.testing.assert_close(
            program.module()(input_ids=ids)["logits"], eager(ids, use_cache=False).logits, rtol=0, atol=1e-6
        )


def test_factory_forms() -> None:
    assert capture("models:convolutions").bindings["audio"].shape == ("batch", 1, "frames")
    assert capture("models:as_tuple").bindings["audio"].shape == (2, 1, 64)


@pytest.mark.parametrize(
    ("model", "sentence"),
    [
        ("models:convolution", "has no callable convolution. Did you mean convolutions?"),
        ("models:raises", "raised RuntimeError: the factory is broken"),
        ("models:not_a_model", "returned a int"),
        ("no_such_module_anywhere:factory", "there is no Python module no_such_module_anywhere"),
        ("some/where.gguf", "There is no file or folder"),
        ("org/no-such-model-here", "downloading it as a Hugging Face id failed"),
    ],
)
def test_bad_names(model: str, sentence: str) -> None:
    with pytest.raises(ModelError) as error:
        open_model(model)
    assert sentence in str(error.value)
    assert "\n" not in str(error.value)


def test_missing_weight(tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    llama_folder(tmp_path)
    file = tmp_path / "model.safetensors"
    weights = load_file(file)
    del weights["model.layers.1.mlp.up_proj.weight"]
    save_file(weights, file)
    with pytest.raises(ModelError, match=r"lacks the weights model\.layers\.1\.mlp\.up_proj\.weight"):
        open_model(str(tmp_path))


def test_wrong_shape(tmp_path: Path) -> None:
    llama_folder(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"intermediate_size": 48}))
    with pytest.raises(ModelError, match=r"has shape \[64, 32\] in .* the configuration requires \[48, 32\]"):
        open_model(str(tmp_path))


def test_unknown_architecture(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="has model type 'lama', which the installed transformers does not support"):
        open_model(str(config_folder(tmp_path, model_type="lama")))


@pytest.mark.parametrize("text", ["", "{", "[]", '{"model_type": 3}', "\x00\x01"])
def test_broken_config(text: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(ModelError, match=r"configuration|model type"):
        open_model(str(tmp_path))


def test_pickled_weights_are_refused(tmp_path: Path) -> None:
    config_folder(tmp_path)
    (tmp_path / "pytorch_model.bin").write_bytes(b"not read")
    with pytest.raises(ModelError, match="pickled"):
        open_model(str(tmp_path))


def test_folder_that_is_no_model(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"has no config\.json"):
        open_model(str(tmp_path))
    (tmp_path / "a.gguf").touch()
    with pytest.raises(ModelError, match="Pass one of its GGUF files"):
        open_model(str(tmp_path))


def test_model_that_cannot_be_captured() -> None:
    with pytest.raises(CaptureError, match=r"cannot be captured: .*\(at models\.py:\d+\)"):
        capture("models:data_dependent")


def test_axes_must_name_inputs() -> None:
    example = Example(torch.nn.ReLU(), (torch.ones(2),), axes={"imput": {0: "batch"}})
    with pytest.raises(UsageError, match="Did you mean input"):
        capture(example)


def test_remote_code_is_not_run(tmp_path: Path) -> None:
    auto_map = {"AutoConfig": "code.Config", "AutoModelForCausalLM": "code.Model"}
    config_folder(tmp_path, model_type="brings_code", auto_map=auto_map)
    (tmp_path / "code.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')\n")
    with pytest.raises(ModelError):
        open_model(str(tmp_path))
    assert not (tmp_path / "ran").exists()

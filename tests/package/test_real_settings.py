"""What the configurations of published models say beyond the defaults: large windows, long rotary tables, wrappers."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest

from inlay.errors import ContractError
from inlay.flow import BuildOptions, build, compile_model
from inlay.frontend import capture
from inlay.package.copy_proof import prove
from inlay.package.loader import load_package
from tests.architectures import COMPRESSED, SMALL
from tests.models import random_model
from tests.small_packages import ROOM, check_tokens

if TYPE_CHECKING:
    from pathlib import Path

HEADS = {"head_dim": 16}
BY_LAYER = {"hidden_size_per_layer_input": 8, "vocab_size_per_layer_input": 256}
CHUNKED = {**HEADS, "num_local_experts": 4, "moe_layers": [], "intermediate_size_mlp": 96}
SWITCHED: dict[str, Any] = {
    "rope_type": "longrope",
    "rope_theta": 10000.0,
    "short_factor": [1.0 + each / 8 for each in range(8)],
    "long_factor": [2.0 + each / 4 for each in range(8)],
    "original_max_position_embeddings": ROOM,
}
"""Rotary frequencies of short sequences, and others of long ones."""
LONG = {"sliding_window": 262144, "max_position_embeddings": 131072, "original_max_position_embeddings": ROOM}
SETTINGS: dict[str, dict[str, Any]] = {
    "mistral, window 4096": {"model_type": "mistral", "sliding_window": 4096, "max_position_embeddings": 32768},
    "gemma2, window 4096": {"model_type": "gemma2", "sliding_window": 4096, "max_position_embeddings": 8192, **HEADS},
    "phi3, LongRoPE": {"model_type": "phi3", **LONG, "rope_parameters": SWITCHED},
    "llama4_text, chunks of 8192": {
        **{"model_type": "llama4_text", "attention_chunk_size": 8192, "max_position_embeddings": 131072},
        **{"layer_types": ["chunked_attention"] * 3 + ["full_attention"], **CHUNKED},
    },
    "gemma4_text": {
        **{"model_type": "gemma4_text", "sliding_window": 16, "num_hidden_layers": 6},
        **{"global_head_dim": 32, "max_position_embeddings": 131072, **HEADS, **BY_LAYER},
    },
    "deepseek_v3, dense": {
        **{"model_type": "deepseek_v3", "first_k_dense_replace": 4, "n_routed_experts": 4, "num_experts_per_tok": 2},
        **{"moe_intermediate_size": 32, "n_group": 2, "topk_group": 1, **COMPRESSED},
    },
    "gemma3, multimodal": {
        "model_type": "gemma3",
        "image_token_id": 255,
        "text_config": {**SMALL, "sliding_window": 16, "num_hidden_layers": 6, **HEADS},
        "vision_config": {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2},
    },
}
IN_CI = ("gemma3, multimodal",)


def _config(name: str) -> dict[str, Any]:
    return SETTINGS[name] if "text_config" in SETTINGS[name] else SMALL | SETTINGS[name]


@pytest.mark.parametrize(
    "name", [pytest.param(each, marks=() if each in IN_CI else pytest.mark.nightly, id=each) for each in SETTINGS]
)
def test_real_settings(name: str, tmp_path: Path) -> None:
    """64 greedy tokens at batch 1 and 4 are those of transformers."""
    eager = random_model(_config(name))
    eager.save_pretrained(tmp_path)
    executable = compile_model(str(tmp_path), "eager", BuildOptions(max_length=ROOM, max_batch=4, buckets=()))
    check_tokens(executable, eager)


@pytest.mark.nightly
@pytest.mark.parametrize("name", SETTINGS)
def test_real_settings_as_packages(name: str, tmp_path: Path) -> None:
    eager = random_model(_config(name))
    eager.save_pretrained(tmp_path / "model")
    build(str(tmp_path / "model"), tmp_path / "package", BuildOptions(max_length=ROOM, max_batch=4, buckets=()))
    package = load_package(tmp_path / "package")
    check_tokens(package, eager)
    proof = prove(package)
    assert proof.holds, proof.problems


def test_what_tokens_do_not_reach_is_left_out(tmp_path: Path) -> None:
    """The vision part has weights in the files and none in the program."""
    random_model(_config("gemma3, multimodal")).save_pretrained(tmp_path)
    assert "Gemma3ForConditionalGeneration" in json.loads((tmp_path / "config.json").read_text())["architectures"]
    program = capture(str(tmp_path))
    assert program.facts.left_out == ("model.vision_tower", "model.multi_modal_projector")
    assert not [row.target for row in program.bindings.ins if "vision" in row.target]
    assert program.facts.architecture == "gemma3_text"


@pytest.mark.nightly
def test_rows_that_a_longer_sequence_would_have_rotated_otherwise(tmp_path: Path) -> None:
    """Beyond the switch of LongRoPE, the frequencies of all rows change: a cache cannot hold both."""
    random_model(_config("phi3, LongRoPE")).save_pretrained(tmp_path)
    with pytest.raises(ContractError, match=rf"set max_length to {ROOM} or less"):
        compile_model(str(tmp_path), "eager", BuildOptions(max_length=ROOM + 1, max_batch=1, buckets=()))

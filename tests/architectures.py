"""Small random-weight configurations of stock architectures. Data only: nothing here is known to src/."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pathlib import Path

SMALL: dict[str, Any] = {
    "num_hidden_layers": 4,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 256,
    "max_position_embeddings": 512,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
COMPRESSED: dict[str, Any] = {
    "q_lora_rank": 24,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 16,
    "num_key_value_heads": 4,
}
"""Multi-head latent attention: keys and values are computed from one short vector."""
EXPERTS: dict[str, Any] = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}


@dataclass(frozen=True)
class Architecture:
    """A model type, how its small configuration differs from SMALL, and how often each kind of layer is repeated."""

    model_type: str
    config: dict[str, Any] = field(default_factory=dict)
    folds: tuple[int, ...] = (4,)
    without_attention: int = 0
    """How many layers have none."""
    deviations: int = 0
    """How many layers are not exactly like the others of their kind."""

    def full_config(self) -> dict[str, Any]:
        return SMALL | self.config


NOT_BUILT = frozenset({"lfm2"})
"""Convolutions read earlier positions: no KV cache can be inserted."""
ARCHITECTURES = (
    Architecture("llama"),
    Architecture("mistral", {"sliding_window": 16}),
    Architecture("qwen2"),
    Architecture("qwen3", {"head_dim": 16}),
    Architecture("gemma", {"head_dim": 16}),
    Architecture("gemma2", {"head_dim": 16, "sliding_window": 16}),
    Architecture("gemma3_text", {"head_dim": 16, "sliding_window": 16, "num_hidden_layers": 7}, folds=(7,)),
    Architecture("phi"),
    Architecture("phi3", {"sliding_window": 16}),
    Architecture("olmo2"),
    Architecture("smollm3", {"num_hidden_layers": 8}, folds=(6, 2)),
    Architecture("granite"),
    Architecture("starcoder2"),
    Architecture("stablelm"),
    Architecture("cohere"),
    Architecture("glm4", {"head_dim": 16}),
    Architecture("gpt2", {"n_embd": 64, "n_inner": 96}),
    Architecture("gpt_neox"),
    Architecture("opt", {"ffn_dim": 96, "word_embed_proj_dim": 64}),
    Architecture("bloom"),
    Architecture("mixtral", {"num_local_experts": 4}),
    Architecture("qwen3_moe", {"head_dim": 16, **EXPERTS}),
    Architecture("gpt_oss", {"head_dim": 16, "num_local_experts": 4, "sliding_window": 16}),
    Architecture("olmoe", {"num_experts": 4, "num_experts_per_tok": 2}),
    Architecture("granitemoe", {"num_local_experts": 4, "num_experts_per_tok": 2}),
    Architecture(
        "glm4_moe",
        {
            "n_routed_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 32,
            "head_dim": 16,
            "n_group": 1,
            "topk_group": 1,
            "first_k_dense_replace": 2,
            "num_hidden_layers": 5,
        },
        folds=(2, 3),
    ),
    Architecture("falcon", {"new_decoder_architecture": True, "num_kv_heads": 2}),
    Architecture(
        "deepseek_v3",
        {
            "n_routed_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 32,
            "n_group": 2,
            "topk_group": 1,
            "first_k_dense_replace": 2,
            "num_hidden_layers": 5,
            **COMPRESSED,
        },
        folds=(2, 3),
    ),
    Architecture(
        "lfm2",
        {"num_hidden_layers": 6, "layer_types": ["conv", "conv", "full_attention"] * 2, "block_multiple_of": 32},
        folds=(4, 2),
        without_attention=4,
    ),
    Architecture("apertus"),
    Architecture("arcee"),
    Architecture("biogpt"),
    Architecture("bitnet"),
    Architecture("cohere2", {"head_dim": 16, "sliding_window": 16}, folds=(3,), deviations=1),
    Architecture("cwm", {"head_dim": 16, "sliding_window": 16}, folds=(3,), deviations=1),
    Architecture("ernie4_5", {"head_dim": 16}),
    Architecture("exaone4", {"head_dim": 16, "sliding_window": 16}, folds=(3,), deviations=1),
    Architecture("glm", {"head_dim": 16}),
    Architecture("gpt_bigcode", {"n_embd": 64, "n_inner": 96}),
    Architecture("granite_swa", {"sliding_window": 16, "attention_multiplier": 0.25}, folds=(3,), deviations=1),
    Architecture("helium", {"head_dim": 16}),
    Architecture("hunyuan_v1_dense", {"head_dim": 16}),
    Architecture("hyperclovax"),
    Architecture("minicpm3", COMPRESSED),
    Architecture("ministral3", {"head_dim": 16, "sliding_window": 16}),
    Architecture("nemotron", {"head_dim": 16}),
    Architecture("olmo"),
    Architecture("olmo3", {"sliding_window": 16}),
    Architecture("seed_oss", {"head_dim": 16}),
    Architecture("vaultgemma", {"head_dim": 16, "sliding_window": 16}),
)


def config_of(model_type: str, **changes: Any) -> dict[str, Any]:
    """The small configuration of an architecture, with changes."""
    found = next(each for each in ARCHITECTURES if each.model_type == model_type)
    return {**found.full_config(), "model_type": model_type, **changes}


def without_weights(folder: Path, model_type: str, layers: int) -> str:
    """A Hugging Face folder with the small configuration of an architecture, and no weights."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config_of(model_type, num_hidden_layers=layers)))
    return str(folder)

"""Checks that reject checkpoints with weights in an unsupported quantization format.

Three things are checked: the configuration of the checkpoint, the dtype of its tensors, and tensors that belong to a
quantized weight (scales, zero points, codebooks) but to no parameter. A weight that is used without its scale is wrong
by a factor of thousands, so any one of the three is enough to reject.
"""

from __future__ import annotations

import json
import re
from typing import TYPE_CHECKING, Any

from inlay.errors import ModelError

if TYPE_CHECKING:
    from collections.abc import Iterable
    from pathlib import Path

_CONFIG_KEYS = ("quantization_config", "compression_config", "quantization")
"""Keys of config.json that state a quantization: transformers, older compressed-tensors, MLX."""
_METHOD_FILES = {"quantize_config.json": "gptq", "quant_config.json": "awq", "hf_quant_config.json": "modelopt"}
"""Files in the same folder that state a quantization, and their methods."""
_DETAILS = ("bits", "w_bit", "bnb_4bit_quant_type", "format", "fmt", "quant_algo", "weight_block_size", "group_size")
_QUANTIZATION_TENSORS = re.compile(
    r"(scale|zero_?point|qzeros|qweight|weight_packed|g_idx|absmax|quant_map|quant_state|nested_|codebook"
    r"|\.SCB$|weight_format$|_blocks$|_scales$)"
)
"""Names of tensors that belong to quantized weights."""
_FLOAT_DTYPES = ("F64", "F32", "F16", "BF16")
"""Dtypes of safetensors files whose values need no scale."""
_REMEDY = (
    "Use the checkpoint it was quantized from (`inlay build --weights int4` or `int8` quantizes it), "
    "or a GGUF file of the model."
)


def refuse_quantized_config(folder: Path, name: str) -> None:
    """Reject a folder whose files state that its weights are quantized."""
    found = _find_method(_read_json(folder / "config.json"))
    if found is not None:
        raise ModelError(f"{name} is quantized by {found} (see config.json), which is not supported yet.", _REMEDY)
    for file, method in _METHOD_FILES.items():
        if (folder / file).is_file():
            method = _describe_method(_read_json(folder / file)) or method
            raise ModelError(f"{name} is quantized by {method} (see {file}), which is not supported yet.", _REMEDY)


def refuse_quantized_dtype(name: str, target: str, formats: Iterable[str]) -> None:
    """Reject dtypes whose values are not the weights themselves."""
    for stored in formats:
        if stored not in _FLOAT_DTYPES:
            raise ModelError(
                f"{name} stores {target} as {stored}, a quantized format that is not supported yet.", _REMEDY
            )


def refuse_quantization_tensors(name: str, leftover: Iterable[str]) -> None:
    """Reject tensors that belong to quantized weights."""
    parts = [key for key in leftover if _QUANTIZATION_TENSORS.search(key)]
    if parts:
        raise ModelError(
            f"{name} contains {summarize_names(parts)}, which belong to an unsupported quantization format.", _REMEDY
        )


def summarize_names(names: list[str]) -> str:
    """Join the first three names and the number of the others.

    >>> summarize_names(["a", "b", "c", "d"])
    'a, b, c and 1 more'
    """
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    return ", ".join(names[:3]) + more


def _read_json(file: Path) -> Any:
    try:
        return json.loads(file.read_text("utf-8"))
    except (OSError, ValueError):  # reported where the configuration is loaded
        return None


def _find_method(config: Any) -> str | None:
    """Return the quantization method that a configuration, or a part of it, states.

    >>> _find_method({"text_config": {"quantization_config": {"quant_method": "gptq", "bits": 4}}})
    'gptq (bits 4)'
    """
    if not isinstance(config, dict):
        return None
    for key in _CONFIG_KEYS:
        if isinstance(config.get(key), dict) and config[key]:
            return _describe_method(config[key]) or key
    return next((found for value in config.values() if (found := _find_method(value))), None)


def _describe_method(stated: Any) -> str:
    """Return the method that a checkpoint states, with details of its format."""
    if not isinstance(stated, dict):
        return ""
    nested = stated.get("quantization")
    stated = {**nested, **stated} if isinstance(nested, dict) else stated
    method = str(stated.get("quant_method") or "")
    details = [f"{key} {stated[key]}" for key in _DETAILS if stated.get(key) is not None]
    details += [key for key in ("load_in_4bit", "load_in_8bit") if stated.get(key) is True]
    return f"{method} ({', '.join(details)})".strip() if details else method

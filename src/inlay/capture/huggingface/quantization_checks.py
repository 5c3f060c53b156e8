"""Checkpoints whose weights are quantised in a form that is not read: refused by name.

Three things tell: what the checkpoint says of itself, the number format its tensors are stored in, and tensors that
belong to a quantised weight (scales, zero points, code books) and to no parameter. A weight that is taken without its
scale is wrong by a factor of thousands, so each of them alone is enough.
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
"""Where config.json says it: transformers, older compressed-tensors, MLX."""
_METHOD_FILES = {"quantize_config.json": "gptq", "quant_config.json": "awq", "hf_quant_config.json": "modelopt"}
"""Files beside config.json that say it, and whose they are."""
_DETAILS = ("bits", "w_bit", "bnb_4bit_quant_type", "format", "fmt", "quant_algo", "weight_block_size", "group_size")
_QUANTIZATION_TENSORS = re.compile(
    r"(scale|zero_?point|qzeros|qweight|weight_packed|g_idx|absmax|quant_map|quant_state|nested_|codebook"
    r"|\.SCB$|weight_format$|_blocks$|_scales$)"
)
"""Names of tensors that quantised weights come with."""
_FLOAT_DTYPES = ("F64", "F32", "F16", "BF16")
"""Number formats of safetensors files in which a value is the weight."""
_REMEDY = (
    "Use the checkpoint it was quantised from (`inlay build --weights int4` or `int8` quantises it), "
    "or a GGUF file of the model."
)


def refuse_quantized_config(folder: Path, name: str) -> None:
    """Refuse a folder that says its weights are quantised."""
    found = _find_method(_read_json(folder / "config.json"))
    if found is not None:
        raise ModelError(f"{name} is quantised by {found}, which is not read yet: its config.json says so.", _REMEDY)
    for file, method in _METHOD_FILES.items():
        if (folder / file).is_file():
            method = _describe_method(_read_json(folder / file)) or method
            raise ModelError(f"{name} is quantised by {method}, which is not read yet: it comes with {file}.", _REMEDY)


def refuse_quantized_dtype(name: str, target: str, formats: Iterable[str]) -> None:
    """Refuse number formats of which no value is the weight itself."""
    for stored in formats:
        if stored not in _FLOAT_DTYPES:
            raise ModelError(
                f"{name} stores {target} as {stored}, so it is quantised, in a form that is not read yet.", _REMEDY
            )


def refuse_quantization_tensors(name: str, leftover: Iterable[str]) -> None:
    """Refuse tensors that belong to quantised weights."""
    parts = [key for key in leftover if _QUANTIZATION_TENSORS.search(key)]
    if parts:
        raise ModelError(
            f"{name} holds {summarize_names(parts)}, which belong to quantised weights in a form that is not read yet.",
            _REMEDY,
        )


def summarize_names(names: list[str]) -> str:
    """A few names, and how many more there are.

    >>> summarize_names(["a", "b", "c", "d"])
    'a, b, c and 1 more'
    """
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    return ", ".join(names[:3]) + more


def _read_json(file: Path) -> Any:
    try:
        return json.loads(file.read_text("utf-8"))
    except (OSError, ValueError):  # whoever reads the configuration says so
        return None


def _find_method(config: Any) -> str | None:
    """What a configuration, or a part of it, says its weights are quantised by.

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
    """The method a checkpoint states, and what describes its format."""
    if not isinstance(stated, dict):
        return ""
    nested = stated.get("quantization")
    stated = {**nested, **stated} if isinstance(nested, dict) else stated
    method = str(stated.get("quant_method") or "")
    details = [f"{key} {stated[key]}" for key in _DETAILS if stated.get(key) is not None]
    details += [key for key in ("load_in_4bit", "load_in_8bit") if stated.get(key) is True]
    return f"{method} ({', '.join(details)})".strip() if details else method

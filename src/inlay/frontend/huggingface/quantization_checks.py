"""Checks that find the quantization of a checkpoint, and reject those that are not read.

Three things are checked: the configuration of the checkpoint, the dtype of its tensors, and tensors that belong to a
quantized weight (scales, zero points, codebooks) but to no parameter. A weight that is used without its scale is wrong
by a factor of thousands, so any one of the three is enough to reject.
"""

from __future__ import annotations

import json
import re
from typing import TYPE_CHECKING, Any

from inlay.errors import ModelError
from inlay.frontend.huggingface.quantized_weights import Quantization

if TYPE_CHECKING:
    from collections.abc import Iterable
    from pathlib import Path

_CONFIG_KEYS = {
    "quantization_config": "an unnamed method",
    "compression_config": "compressed-tensors",
    "quantization": "MLX",
}
"""Keys of config.json that state a quantization, and the method if they do not name it."""
_METHOD_FILES = {"quantize_config.json": "gptq", "quant_config.json": "awq", "hf_quant_config.json": "modelopt"}
"""Files in the same folder that state a quantization, and the method if they do not name it."""
_DETAILS = ("bits", "w_bit", "bnb_4bit_quant_type", "format", "fmt", "quant_algo", "weight_block_size", "group_size")
_BITSANDBYTES = ("load_in_4bit", "load_in_8bit")
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


def find_quantization(folder: Path, name: str) -> Quantization | None:
    """Return the quantization that a folder's files state, or None. One that is not read is rejected."""
    files = {folder / "config.json": _find_stated(_read_json(folder / "config.json"))}
    for file, method in _METHOD_FILES.items():
        if (folder / file).is_file():
            stated = _read_json(folder / file)
            files[folder / file] = _name_method(stated if isinstance(stated, dict) else {}, method)
    found = next(((stated, file) for file, stated in files.items() if stated is not None), None)
    if found is None:
        return None
    quantization = Quantization(*found)
    setting = quantization.unsupported()
    if setting is not None:
        what = f"{name} is quantized by {_describe_method(found[0])} (see {found[1].name})"
        raise ModelError(f"{what}, {f'with {setting}, ' if setting else ''}which is not supported yet.", _REMEDY)
    return quantization


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


def _find_stated(config: Any) -> dict[str, Any] | None:
    """Return the quantization that a configuration, or a part of it, states.

    >>> _find_stated({"text_config": {"quantization_config": {"quant_method": "gptq", "bits": 4}}})
    {'quant_method': 'gptq', 'bits': 4}
    """
    if not isinstance(config, dict):
        return None
    for key, method in _CONFIG_KEYS.items():
        if isinstance(config.get(key), dict) and config[key]:
            return _name_method(config[key], method)
    return next((found for value in config.values() if (found := _find_stated(value))), None)


def _name_method(stated: dict[str, Any], default: str) -> dict[str, Any]:
    """Return what a checkpoint states, with the name of its method.

    >>> _name_method({"load_in_4bit": True}, "an unnamed method")["quant_method"]
    'bitsandbytes'
    """
    nested = stated.get("quantization")
    stated = {**nested, **stated} if isinstance(nested, dict) else stated
    if any(stated.get(key) is True for key in _BITSANDBYTES):
        default = "bitsandbytes"
    return stated | {"quant_method": str(stated.get("quant_method") or default)}


def _describe_method(stated: dict[str, Any]) -> str:
    """Return the method that a checkpoint states, with details of its format."""
    details = [f"{key} {stated[key]}" for key in _DETAILS if stated.get(key) is not None]
    details += [key for key in _BITSANDBYTES if stated.get(key) is True]
    return f"{stated['quant_method']} ({', '.join(details)})" if details else str(stated["quant_method"])

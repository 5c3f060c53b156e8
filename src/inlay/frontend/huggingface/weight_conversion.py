"""Adapter to the mapping from checkpoint names to parameters in transformers (renames, merged experts, prefixes).

`transformers.core_model_loading` and `transformers.conversion_mapping` are not public API; this file is the only one
that imports them.
"""

from __future__ import annotations

import re
from copy import deepcopy
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import WeightConverter, WeightRenaming, dot_natural_key, rename_source_key

from inlay.errors import ModelError, one_line

if TYPE_CHECKING:
    from collections.abc import Mapping

    from inlay.frontend.huggingface.quantized_weights import QuantizedTensor
    from inlay.frontend.safetensors_files import SafetensorsTensor
    from inlay.program.weights import TensorRef


@dataclass(frozen=True, eq=False)
class ConvertedTensor:
    """A parameter that the checkpoint stores differently: several tensors merged, one split, an axis swapped."""

    target: str
    sources: tuple[tuple[str, SafetensorsTensor | QuantizedTensor], ...]
    converter: Any
    model: Any

    @property
    def origin(self) -> str:
        steps = " + ".join(type(op).__name__ for op in self.converter.operations)
        more = f" and {len(self.sources) - 1} more" if len(self.sources) > 1 else ""
        return f"{self.sources[0][1].origin}{more} via {steps}"

    @property
    def dtype_names(self) -> tuple[str, ...]:
        """The stored dtypes of its source tensors."""
        return tuple(stored.dtype_name for _, stored in self.sources)

    @property
    def shape(self) -> tuple[int, ...] | None:
        """The shape after conversion, computed without reading tensor data."""
        empty = [torch.empty(stored.shape, device="meta") for _, stored in self.sources]
        return tuple(self._convert(empty).shape)

    def read(self) -> torch.Tensor:
        return self._convert([stored.read() for _, stored in self.sources]).contiguous()

    def _convert(self, tensors: list[torch.Tensor]) -> torch.Tensor:
        converter = deepcopy(self.converter)
        for (pattern, stored), tensor in zip(self.sources, tensors, strict=True):
            converter.add_tensor(self.target, stored.key, pattern, tensor)
        try:
            made = converter.convert(self.target, model=self.model, config=self.model.config)[self.target]
        except Exception as error:
            raise ModelError(
                f"{self.target} cannot be made from {self.origin}: {one_line(error)}.", "Download the model again."
            ) from error
        result: torch.Tensor = made[0] if isinstance(made, list) else made
        return result


def map_tensors(stored: Mapping[str, SafetensorsTensor | QuantizedTensor], model: Any) -> dict[str, TensorRef]:
    """Map qualified parameter names to tensors of the checkpoint."""
    rules = get_model_conversion_mapping(model)
    renames = [rule for rule in rules if isinstance(rule, WeightRenaming)]
    converters = [rule for rule in rules if isinstance(rule, WeightConverter)]
    by_pattern = {pattern: rule for rule in converters for pattern in rule.source_patterns}
    expected = model.state_dict()
    refs: dict[str, TensorRef] = {}
    parts: dict[str, list[tuple[str, SafetensorsTensor | QuantizedTensor]]] = {}
    for key in sorted(stored, key=dot_natural_key):
        target, pattern = rename_source_key(key, renames, converters, model.base_model_prefix, expected)
        if target not in expected and key in expected:
            target, pattern = key, None
        if pattern is None:
            refs[target] = stored[key]
        else:
            parts.setdefault(target, []).append((pattern, stored[key]))
    for target, sources in parts.items():
        rule = by_pattern[sources[0][0]]
        refs.update(
            {name: ConvertedTensor(name, tuple(sources), rule, model) for name in _targets(target, rule, expected)}
        )
    return refs


def unexpected_keys(refs: Mapping[str, Any], model: Any) -> list[str]:
    """Return the tensors that no parameter or buffer uses, except those that the model class ignores."""
    used = {name for name, _ in (*model.named_parameters(remove_duplicate=False), *model.named_buffers())}
    known = [*_IGNORED_KEYS, *(model._keys_to_ignore_on_load_unexpected or ())]
    return [
        name
        for name, ref in refs.items()
        if name not in used and not any(re.search(each, name) for each in known) and not _is_mask(name, ref)
    ]


_IGNORED_KEYS = (
    *(r"rotary_emb\.inv_freq$", r"(^|\.)position_ids$"),
    r"(^|\.)(attn|attention)\.(masked_bias|causal_mask)$",
)
"""Buffers that older checkpoints contain and that the model computes."""


def _is_mask(name: str, ref: Any) -> bool:
    """Whether a tensor is a causal mask: older checkpoints name it `bias`, and it has four axes."""
    return re.search(r"(^|\.)(attn|attention)\.bias$", name) is not None and len(getattr(ref, "shape", ())) == 4


def _targets(first: str, rule: Any, expected: Mapping[str, Any]) -> list[str]:
    """Return all targets of a rule that may split a tensor; `first` names only the first of them."""
    names = [first]
    for pattern in rule.target_patterns:
        if pattern in first:
            names = [first.replace(pattern, other) for other in rule.target_patterns]
            break
    return [name for name in names if name in expected] or [first]

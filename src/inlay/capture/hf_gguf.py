"""Adapter: what transformers knows about GGUF — configuration, tensor names, row order.

`transformers.modeling_gguf_pytorch_utils` is not public API; this file is the only one that imports it.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Any
from unittest.mock import patch

import gguf
import numpy as np
import torch
from transformers import modeling_gguf_pytorch_utils as hf

from inlay.capture.gguf import GGUFFile, GGUFTensor
from inlay.errors import ModelError, one_line

if TYPE_CHECKING:
    from collections.abc import Mapping

    import numpy.typing as npt

    from inlay.program.weights import Blocks, TensorRef


def read_config(header: GGUFFile) -> Any:
    """The Hugging Face configuration of a GGUF file."""
    from transformers import CONFIG_MAPPING

    try:
        with patch("gguf.GGUFReader", lambda path: _ReaderView(header)):
            fields = hf.load_gguf_checkpoint(str(header.path), return_tensors=False)["config"]
        model_type = fields.pop("model_type")
        return CONFIG_MAPPING[model_type].from_dict(fields)
    except Exception as error:
        raise ModelError(
            f"{header.path.name} holds a model of architecture {header.architecture!r} whose configuration cannot be"
            f" understood: {one_line(error)}.",
            "`inlay show` works with the GGUF architectures the installed transformers knows; upgrading it may help.",
        ) from error


class _ReaderView:
    """The checked header in the shape of gguf.GGUFReader.

    transformers reads the file again by itself, tokenizer and all, and trusts every count in it. It gets the scalars
    and short arrays of our header instead.
    """

    def __init__(self, header: GGUFFile) -> None:
        values = {key: value for key, value in header.metadata.items() if not _is_long(value)}
        tokens = header.metadata.get("tokenizer.ggml.tokens")
        if isinstance(tokens, list):
            values.setdefault(f"{header.architecture}.vocab_size", len(tokens))
        self.fields = {key: _FieldView(value) for key, value in values.items()}
        self.tensors = list(header.tensors.values())


def _is_long(value: Any) -> bool:
    return isinstance(value, list) and (len(value) > _LONGEST_ARRAY or any(isinstance(item, str) for item in value))


class _FieldView:
    """One value in the shape of gguf.ReaderField."""

    def __init__(self, value: Any) -> None:
        items = value if isinstance(value, list) else [value]
        self.parts = [list(item.encode()) if isinstance(item, str) else [item] for item in items]
        self.data = list(range(len(items)))
        first = items[0] if items else 0
        kind = 8 if isinstance(first, str) else 7 if isinstance(first, bool) else 6 if isinstance(first, float) else 11
        self.types = [9, kind] if isinstance(value, list) else [kind]


def map_tensors(header: GGUFFile, model: Any) -> dict[str, TensorRef]:
    """Qualified parameter name → tensor of the file, through the row order and offsets that GGUF changed."""
    processor_class = hf.TENSOR_PROCESSORS.get(header.architecture, hf.TensorProcessor)
    processor = processor_class(config=model.config.to_dict())
    try:
        # transformers builds the same table again for every submodule.
        with patch("gguf.get_tensor_name_map", cache(gguf.get_tensor_name_map)):
            names = hf.get_gguf_hf_weights_map(model, processor)
    except NotImplementedError as error:
        raise ModelError(f"{header.path.name}: {one_line(error)}.", "Upgrade the gguf package.") from error
    plain = processor_class is hf.TensorProcessor
    refs: dict[str, TensorRef] = {}
    for name, target in names.items():
        if name not in header.tensors:
            continue
        stored = GGUFTensor(header, header.tensors[name])
        refs[target] = stored if plain else Reordered(stored, processor, names)
    return refs


_LONGEST_ARRAY = 1024
"""No configuration has longer lists: one entry a layer at most."""


@dataclass(frozen=True, eq=False)
class Reordered:
    """A GGUF tensor after what transformers does to it (un-permuting attention rows, Gemma's `1 + w`, transposing)."""

    stored: GGUFTensor
    processor: Any
    names: Mapping[str, str]

    @property
    def origin(self) -> str:
        return f"{self.stored.origin} via {type(self.processor).__name__}"

    @property
    def shape(self) -> tuple[int, ...] | None:
        """The shape after the map, or None when only reading can tell."""
        return self.stored.shape if self.row_order() is not None else None

    @property
    def quantised(self) -> Blocks | None:
        """The stored blocks in the parameter's order, or None when they are not the parameter's values."""
        order = self.row_order()
        return None if order is None else self.stored.rows(order)

    def read(self) -> torch.Tensor:
        try:
            values = self._process(self.stored.read().numpy())
        except ValueError as error:
            raise ModelError(f"{self.origin} cannot be read: {one_line(error)}.", "Download the file again.") from error
        return torch.from_numpy(np.ascontiguousarray(values))

    def row_order(self) -> npt.NDArray[np.int64] | None:
        """Which stored row each row of the parameter is, or None when the map is more than an order of rows.

        Found by sending numbered rows through the map, so it needs no list of tensors or architectures.
        """
        rows = self.stored.shape[0]
        probe = np.arange(1, rows + 1, dtype=np.float32)
        if len(self.stored.shape) == 2:
            probe = np.stack([probe, np.full(rows, -7.0, dtype=np.float32)], axis=1)
        try:
            out = self._process(probe)
        except ValueError:
            return None
        if out.shape != probe.shape or (out.ndim == 2 and not np.array_equal(out[:, 1], probe[:, 1])):
            return None
        order = (out[:, 0] if out.ndim == 2 else out).astype(np.int64) - 1
        return order if np.array_equal(np.sort(order), np.arange(rows)) else None

    def _process(self, values: npt.NDArray[Any]) -> npt.NDArray[Any]:
        result = self.processor.process(
            weights=values,
            name=self.stored.info.name,
            tensor_key_mapping=self.names,
            parsed_parameters={"tensors": {}},
        )
        return np.asarray(result.weights)

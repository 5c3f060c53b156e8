"""Adapter to the GGUF support of transformers: configuration, tensor names, row order.

`transformers.modeling_gguf_pytorch_utils` is not public API; this file is the only one that imports it.
"""

from __future__ import annotations

import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import gguf
import numpy as np
import torch
from transformers import modeling_gguf_pytorch_utils as hf

from inlay.errors import ModelError, one_line
from inlay.program.weights import is_bfloat16

if TYPE_CHECKING:
    from collections.abc import Mapping

    import numpy.typing as npt

    from inlay.frontend.gguf.reader import GGUFFile, GGUFTensor
    from inlay.program.weights import QuantizedBlocks


def read_config(header: GGUFFile) -> Any:
    """Return the Hugging Face configuration of a GGUF file.

    transformers would read the whole file, tokenizer included, and trust every count in it. It gets a small file
    instead, with the scalars and short arrays of the checked header and the names of the tensors.
    """
    from transformers import CONFIG_MAPPING

    try:
        with tempfile.TemporaryDirectory(prefix="inlay-gguf-") as folder:
            path = Path(folder, "header.gguf")
            _write_header(header, path)
            fields = hf.load_gguf_checkpoint(str(path), return_tensors=False)["config"]
        model_type = fields.pop("model_type")
        return CONFIG_MAPPING[model_type].from_dict(fields)
    except Exception as error:
        raise ModelError(
            f"{header.path.name} contains a model of architecture {header.architecture!r} whose configuration cannot be"
            f" read: {one_line(error)}.",
            "Upgrade transformers: Inlay reads the GGUF architectures that the installed version supports.",
        ) from error


def _write_header(header: GGUFFile, path: Path) -> None:
    writer = gguf.GGUFWriter(path, header.architecture)
    values = {key: value for key, value in header.metadata.items() if not _is_non_config_list(value)}
    for key in ("general.architecture", "general.alignment"):  # the writer sets these
        values.pop(key, None)
    tokens = header.metadata.get("tokenizer.ggml.tokens")
    if isinstance(tokens, list):
        values.setdefault(f"{header.architecture}.vocab_size", len(tokens))
    for key, value in values.items():
        if isinstance(value, list):
            writer.add_key_value(key, value, _ARRAY, _value_type(value[0]))
        else:
            writer.add_key_value(key, value, _value_type(value))
    for name in header.tensors:
        writer.add_tensor(name, np.zeros(1, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


_ARRAY = gguf.GGUFValueType.ARRAY


def _value_type(value: Any) -> gguf.GGUFValueType:
    if isinstance(value, bool):
        return gguf.GGUFValueType.BOOL
    if isinstance(value, int):
        return gguf.GGUFValueType.INT64 if value < 1 << 63 else gguf.GGUFValueType.UINT64
    return gguf.GGUFValueType.FLOAT64 if isinstance(value, float) else gguf.GGUFValueType.STRING


def _is_non_config_list(value: Any) -> bool:
    """Whether a value is a list that no configuration contains: of strings, of lists, empty, or too long."""
    return isinstance(value, list) and (
        not 0 < len(value) <= _MAX_ARRAY_LENGTH or any(isinstance(item, (str, list)) for item in value)
    )


def map_tensors(header: GGUFFile, model: Any) -> tuple[dict[str, GGUFTensor | ReorderedTensor], list[str]]:
    """Map qualified parameter names to tensors of the file, undoing the row order and offsets of GGUF.

    Also return the names of tensors that belong to no parameter.
    """
    processor_class = hf.TENSOR_PROCESSORS.get(header.architecture, hf.TensorProcessor)
    processor = processor_class(config=model.config.to_dict())
    try:
        names = _map_names(header, model, processor)
    except NotImplementedError as error:
        raise ModelError(f"{header.path.name}: {one_line(error)}.", "Upgrade the gguf package.") from error
    plain = processor_class is hf.TensorProcessor
    refs: dict[str, GGUFTensor | ReorderedTensor] = {}
    for name, target in names.items():
        if name not in header.tensors:
            continue
        stored = header.tensors[name]
        refs[target] = stored if plain else ReorderedTensor(stored, processor, names)
    return refs, [name for name in header.tensors if name not in names and not _is_unit_rope_factor(header, name)]


def find_dtype(refs: Mapping[str, GGUFTensor | ReorderedTensor]) -> torch.dtype:
    """Return bfloat16 for a file of 16-bit floats if it represents every value exactly, otherwise float32.

    F16 files are mostly converted from bfloat16 checkpoints, whose values F16 rounds to fewer bits, never to more.
    """
    tensors = [ref.tensor if isinstance(ref, ReorderedTensor) else ref for ref in refs.values()]
    kinds = {tensor.type_name for tensor in tensors}
    matrices = {tensor.type_name for tensor in tensors if len(tensor.shape) > 1}
    if not kinds <= {"F32", "F16", "BF16"} or matrices <= {"F32"}:
        return torch.float32
    return torch.bfloat16 if all(map(_is_bfloat16, refs.values())) else torch.float32


def _is_bfloat16(ref: GGUFTensor | ReorderedTensor) -> bool:
    """Whether bfloat16 represents all values of a tensor exactly."""
    if isinstance(ref, ReorderedTensor) and ref.row_order() is None:
        return is_bfloat16(ref.read())
    tensor = ref.tensor if isinstance(ref, ReorderedTensor) else ref
    if tensor.type_name == "BF16":
        return True
    dtype = torch.float16 if tensor.type_name == "F16" else torch.float32
    return is_bfloat16(torch.from_numpy(tensor.stored_bytes()).view(dtype))


def _is_unit_rope_factor(header: GGUFFile, name: str) -> bool:
    """Whether a tensor contains rotary frequency factors that are all 1; transformers does not read them."""
    return name == "rope_freqs.weight" and bool((header.tensors[name].read() == 1).all())


def _map_names(header: GGUFFile, model: Any, processor: Any) -> dict[str, str]:
    """Map tensor names to qualified parameter names.

    A file was converted from the whole model, or from a part of it, whose names lack a prefix. transformers tries the
    model and each of its modules, with a new table of names each time. Here modules are tried until every tensor of
    the file has a parameter.
    """
    config = model.config
    names: dict[str, str] = {}
    for prefix, module in model.named_modules():
        alone = _ModuleWithoutChildren(module, config)
        found = hf.get_gguf_hf_weights_map(alone, processor, None, None, f"{prefix}." if prefix else "")
        names = found | names
        if header.tensors.keys() <= names.keys():
            break
    return names


@dataclass(frozen=True)
class _ModuleWithoutChildren:
    """A module without its children, with the interface that transformers requires."""

    module: torch.nn.Module
    config: Any

    def state_dict(self) -> Mapping[str, Any]:
        return self.module.state_dict()

    def named_children(self) -> tuple[()]:
        return ()


_MAX_ARRAY_LENGTH = 1024
"""Lists of a configuration are not longer: they have at most one entry for each layer."""


@dataclass(frozen=True, eq=False)
class ReorderedTensor:
    """A GGUF tensor as transformers processes it (un-permuted attention rows, Gemma's `1 + w`, transposed)."""

    tensor: GGUFTensor
    processor: Any
    names: Mapping[str, str]

    @property
    def origin(self) -> str:
        return f"{self.tensor.origin} via {type(self.processor).__name__}"

    @property
    def shape(self) -> tuple[int, ...] | None:
        """The shape after processing, or None if it is only known after reading."""
        return self.tensor.shape if self.row_order() is not None else None

    @property
    def quantized_blocks(self) -> QuantizedBlocks | None:
        """The stored blocks in the row order of the parameter, or None if processing does more than reorder rows."""
        order = self.row_order()
        return None if order is None else self.tensor.ordered_blocks(order)

    def read(self) -> torch.Tensor:
        try:
            values = self._process(self.tensor.read().numpy())
        except ValueError as error:
            raise ModelError(f"{self.origin} cannot be read: {one_line(error)}.", "Download the file again.") from error
        return torch.from_numpy(np.ascontiguousarray(values))

    def row_order(self) -> npt.NDArray[np.int64] | None:
        """Return the stored row of each parameter row, or None if processing does more than reorder rows.

        The order is found by processing numbered rows, so no list of tensors or architectures is needed.
        """
        rows = self.tensor.shape[0]
        probe = np.arange(1, rows + 1, dtype=np.float32)
        if len(self.tensor.shape) == 2:
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
            weights=values, name=self.tensor.name, tensor_key_mapping=self.names, parsed_parameters={"tensors": {}}
        )
        return np.asarray(result.weights)

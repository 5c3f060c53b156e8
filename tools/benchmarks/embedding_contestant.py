"""A text encoder as a contestant: Inlay, transformers, torch.compile, OpenVINO or onnxruntime on the same batches.

`src/inlay/bench/protocol.py` runs this file, in Inlay's environment or in that of the peers, where Inlay is not
installed. All compute mean pooling and normalization.
"""

from __future__ import annotations

import tempfile
from pathlib import Path
from time import perf_counter
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

if TYPE_CHECKING:
    from collections.abc import Callable

    Inputs = dict[str, np.ndarray]


class Sentence(torch.nn.Module):
    """A stock encoder with mean pooling and normalization."""

    def __init__(self, model: str) -> None:
        super().__init__()
        from transformers import AutoModel

        self.encoder = AutoModel.from_pretrained(model, dtype=torch.float32).eval()

    def forward(
        self, input_ids: torch.Tensor, attention_mask: torch.Tensor, token_type_ids: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Return embeddings."""
        types = {} if token_type_ids is None else {"token_type_ids": token_type_ids}
        hidden = self.encoder(input_ids=input_ids, attention_mask=attention_mask, **types)[0]
        weights = attention_mask.unsqueeze(-1).to(hidden.dtype)
        return torch.nn.functional.normalize((hidden * weights).sum(1) / weights.sum(1), dim=-1)


class EncoderContestant:
    """An encoder, and the batches that all contestants get."""

    def __init__(self, run: Callable[[Inputs], np.ndarray], version: str, batches: list[Inputs]) -> None:
        self._run, self.version, self._batches = run, version, batches
        self.embed()

    def embed(self) -> list[float]:
        """Compute all batches once; return the seconds of each."""
        seconds = []
        for batch in self._batches:
            start = perf_counter()
            self._run(batch)
            seconds.append(perf_counter() - start)
        return seconds

    def values(self) -> list[float]:
        """Return the embeddings of all batches, one number after the other, to compare contestants."""
        return [float(value) for batch in self._batches for value in self._run(batch).ravel()]


def open_inlay(arguments: dict[str, Any], batch: Inputs) -> tuple[Callable[[Inputs], np.ndarray], str]:
    """A package: its program, without the tokenizer."""
    from inlay import __version__
    from inlay.package.loader import load_package

    package = load_package(arguments["package"])
    version = f"Inlay {__version__}, torch {torch.__version__}"
    return lambda given: package(_tensors(given))["embeddings"].numpy(), version


def open_transformers(arguments: dict[str, Any], batch: Inputs) -> tuple[Callable[[Inputs], np.ndarray], str]:
    """The stock model, eager."""
    import transformers

    model = Sentence(arguments["model"])
    version = f"transformers {transformers.__version__}, torch {torch.__version__}"
    return lambda given: model(**_tensors(given)).numpy(), version


def open_compiled(arguments: dict[str, Any], batch: Inputs) -> tuple[Callable[[Inputs], np.ndarray], str]:
    """The stock model with torch.compile for dynamic sizes, with the options for the fastest code on a CPU."""
    model = torch.compile(Sentence(arguments["model"]), dynamic=True, options={"freezing": True, "cpp_wrapper": True})
    return lambda given: model(**_tensors(given)).numpy(), f"torch.compile, torch {torch.__version__}"


def open_openvino(arguments: dict[str, Any], batch: Inputs) -> tuple[Callable[[Inputs], np.ndarray], str]:
    """OpenVINO, converted from the stock model, in float32 with dynamic sizes."""
    import openvino

    core = openvino.Core()
    converted = openvino.convert_model(Sentence(arguments["model"]), example_input=_tensors(batch))
    settings = {"INFERENCE_NUM_THREADS": arguments["threads"], "INFERENCE_PRECISION_HINT": "f32"}
    compiled = core.compile_model(converted, "CPU", {**settings, "PERFORMANCE_HINT": "LATENCY"})
    request = compiled.create_infer_request()
    return lambda given: np.array(request.infer(dict(given))[0]), f"openvino {openvino.__version__}"


def open_onnxruntime(arguments: dict[str, Any], batch: Inputs) -> tuple[Callable[[Inputs], np.ndarray], str]:
    """onnxruntime, exported from the stock model, in float32 with dynamic sizes."""
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = arguments["threads"]
    axes = {0: torch.export.Dim.DYNAMIC, 1: torch.export.Dim.DYNAMIC}
    example = {name: torch.cat([value, value]) for name, value in _tensors(batch).items()}
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "model.onnx"
        torch.onnx.export(
            Sentence(arguments["model"]),
            (),
            file,
            kwargs=example,
            dynamo=True,
            dynamic_shapes=dict.fromkeys(example, axes),
        )
        session = onnxruntime.InferenceSession(str(file), options, providers=["CPUExecutionProvider"])
    return lambda given: session.run(None, given)[0], f"onnxruntime {onnxruntime.__version__}"


OPENERS = {
    "inlay": open_inlay,
    "transformers": open_transformers,
    "compiled": open_compiled,
    "openvino": open_openvino,
    "onnxruntime": open_onnxruntime,
}


def open_contestant(arguments: dict[str, Any]) -> EncoderContestant:
    """Return the contestant; the benchmark protocol calls this function."""
    torch.set_num_threads(arguments["threads"])
    torch.set_grad_enabled(False)
    held = np.load(arguments["batches"])
    batches: list[Inputs] = [{} for _ in range(int(held["count"]))]
    for key in held.files:
        place, _, name = key.partition(":")
        if name:
            batches[int(place)][name] = held[key]
    run, version = OPENERS[arguments["variant"]](arguments, batches[0])
    return EncoderContestant(run, version, batches)


def _tensors(given: Inputs) -> dict[str, torch.Tensor]:
    return {name: torch.from_numpy(value) for name, value in given.items()}

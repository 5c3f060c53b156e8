"""OpenVINO GenAI as a contestant, on a model that tools/benchmarks/convert.sh wrote into the peers' environment."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import openvino
import openvino_genai as lib

VARIANTS = ("int4", "int8")


class Contestant:
    """Uses the times reported by OpenVINO, per token and to the first one. Prompts differ, so no prefix is reused."""

    version = f"OpenVINO GenAI {lib.__version__}"

    def __init__(self, folder: Path, threads: int) -> None:
        self._pipe = lib.LLMPipeline(folder, "CPU", INFERENCE_NUM_THREADS=threads)
        self._random = np.random.default_rng(0)
        self._generate(1, 1, 1)

    def decode(self, tokens: int, context_tokens: int) -> list[float]:
        """Decode single tokens of one sequence after a context."""
        return self.batch(1, tokens, context_tokens)

    def batch(self, sequences: int, tokens: int, context_tokens: int) -> list[float]:
        """Decode single tokens of several sequences in a batch."""
        # reported durations are divided by the number of sequences, so use the end times of steps
        ends = self._generate(sequences, context_tokens, tokens + 1).raw_metrics.m_new_token_times
        return [float(each) / 1000 for each in np.diff(ends)]

    def prefill(self, tokens: int) -> list[float]:
        """Compute a prompt, up to the first token."""
        return [self._generate(1, tokens, 1).get_ttft().mean / 1000]

    def _generate(self, sequences: int, length: int, new: int) -> Any:
        config = lib.GenerationConfig()
        config.max_new_tokens, config.ignore_eos, config.do_sample = new, True, False
        tokens = self._random.integers(1, 1000, (sequences, length))
        given = lib.TokenizedInputs(openvino.Tensor(tokens), openvino.Tensor(np.ones_like(tokens)))
        return self._pipe.generate(given, config).perf_metrics


def open_contestant(arguments: dict[str, Any]) -> Contestant:
    """Return the contestant; the benchmark protocol calls this function."""
    model = Path(arguments.get("model") or "model").stem
    folder = Path(arguments["peers"], "models", f"{model}-{arguments['variant']}")
    if not folder.is_dir():
        raise SystemExit(f"the model {folder.name} is missing; create it with tools/benchmarks/convert.sh.")
    return Contestant(folder, arguments["threads"])

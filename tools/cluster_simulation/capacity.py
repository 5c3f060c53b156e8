"""Computes how many replicas a load needs, from recorded step times: the formula of docs/scale.md."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from tools.cluster_simulation.step_times import Recording

if TYPE_CHECKING:
    import argparse

    from tools.cluster_simulation.step_times import EngineShape, StepTimes


def request_seconds(
    times: StepTimes, shape: EngineShape, prompt: int, cached: int, answer: int, batch: int
) -> tuple[float, float]:
    """Return the seconds of a replica that one request takes for its prompt and for its answer.

    The prompt is computed in chunks beside the decode steps of other requests; a decode step is shared by `batch`
    sequences.

    >>> from tools.cluster_simulation.step_times import EngineShape, StepTimes
    >>> times = StepTimes((0.0, 0.01, 0.015), (0.0, 0.0, 0.0), (1, 65), (0, 1000), ((0.1, 0.1), (0.1, 0.1)))
    >>> [round(each, 3) for each in request_seconds(times, EngineShape(), 640, 320, 100, 2)]
    [0.5, 0.75]
    """
    chunk = shape.max_prefill_tokens
    starts = range(cached, prompt, chunk)
    computing = sum(times.prefill(min(chunk, prompt - start), start, 0) for start in starts)
    loading = times.load_block * (cached // shape.block_size)
    return computing + loading, answer * times.decode(batch, batch * (prompt + answer // 2)) / batch


def add_command(commands: Any) -> None:
    """Add the subcommand `capacity`."""
    options = commands.add_parser("capacity", help="compute how many replicas a load needs")
    options.add_argument("steps", type=Path, help="a recording")
    options.add_argument("--rate", type=float, default=10.0, help="requests per second")
    options.add_argument("--prompt", type=int, default=800, help="tokens")
    options.add_argument("--cached", type=float, default=0.8, help="share of the prompt that is cached")
    options.add_argument("--answer", type=int, default=100, help="tokens")
    options.add_argument("--batch", type=int, default=4, help="sequences that decode at once in a replica")
    options.add_argument("--utilisation", type=float, default=0.7, help="share of the time that a replica computes")
    options.add_argument("--price", type=float, default=0.04, help="of a replica for an hour")
    options.set_defaults(run=_run)


def _run(given: argparse.Namespace) -> None:
    recording = Recording.read(given.steps)
    cached = int(given.prompt * given.cached) // recording.shape.block_size * recording.shape.block_size
    prefill, decode = request_seconds(recording.times, recording.shape, given.prompt, cached, given.answer, given.batch)
    replicas = given.rate * (prefill + decode) / given.utilisation
    cost = (prefill + decode) / given.utilisation / 3600 * given.price
    print(f"a request: {prefill:.3f} s of a replica for the prompt, {decode:.3f} s for the answer")
    print(f"{given.rate:g} requests per second: {replicas:.1f} replicas")
    print(f"1,000 requests cost {1000 * cost:.4f}, a million tokens of answers {1e6 * cost / given.answer:.2f}")

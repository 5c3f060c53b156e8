"""Measure the benefit of running branches of a layer in parallel: `python -m tools.benchmarks.lanes`, on two cores.

Three layers of `examples/multistream_overlap.py` run at three numbers of tokens in three variants: operator by operator
in one lane, in two lanes, and in one lane with two intra-op threads. Rounds are interleaved. The output contains
medians of the ratios per round, and their range without the lowest and highest tenth.
"""

from __future__ import annotations

import sys
from contextlib import closing
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

import torch

sys.path.append(str(Path(__file__).parents[2] / "examples"))

from multistream_overlap import LAYERS, capture_layer

from inlay.streams import ScheduledExecution, open_executor, plan_overlap, serial_schedule
from inlay.streams.overlap_comparison import intra_op, time_rounds

if TYPE_CHECKING:
    from collections.abc import Callable

    from inlay.streams.executable_schedule import LaneExecutor
    from inlay.streams.overlap_comparison import Way

WIDTH, TOKENS, ROUNDS = 512, (1, 16, 256), 40
ONE, TWO, THREADS = "one lane", "two lanes", "two intra-op threads"


def ways(
    layer: str, tokens: int, lanes: LaneExecutor, on_two: Callable[..., Any]
) -> tuple[dict[str, Way], dict[str, Any], str]:
    """Return the three variants of a layer, its inputs, and a description of the plan."""
    program, given = capture_layer(LAYERS[layer](WIDTH, tokens))
    plan = plan_overlap(program, given)
    found: dict[str, Way] = {
        ONE: ScheduledExecution(plan.bound_work, serial_schedule(plan.work), lanes),
        TWO: ScheduledExecution(plan.bound_work, plan.schedule, lanes),
        THREADS: lambda values: on_two(plan.bound_work, values),
    }
    return found, given, f"{len(plan.schedule.lanes)} lanes"


def against(times: dict[str, list[float]], one: str, two: str) -> str:
    """Return the ratio of the first variant to the second, per round."""
    ratios = sorted(a / b for a, b in zip(times[one], times[two], strict=True))
    tenth = len(ratios) // 10
    return f"{median(ratios):.2f} ({ratios[tenth]:.2f} … {ratios[-1 - tenth]:.2f})"


def main() -> None:
    """Print the table of docs/streams.md."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    print(f"| layer | tokens | planned | {ONE} | {TWO} ÷ {ONE} | {TWO} ÷ {THREADS} |")
    print("|---|---|---|---|---|---|")
    with (
        torch.no_grad(),
        closing(open_executor(2, "cpu")) as lanes,
        intra_op(2) as on_two,
    ):
        for layer in LAYERS:
            for tokens in TOKENS:
                found, given, plans = ways(layer, tokens, lanes, on_two)
                times = time_rounds(found, given.copy, ROUNDS)
                cells = [against(times, *pair) for pair in ((TWO, ONE), (TWO, THREADS))]
                first = f"{1e3 * median(times[ONE]):.2f} ms"
                print(f"| {layer} | {tokens} | {plans} | {first} | {' | '.join(cells)} |", flush=True)


if __name__ == "__main__":
    main()

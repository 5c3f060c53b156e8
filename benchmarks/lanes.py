"""Does it pay to run branches of a layer beside each other? `python -m benchmarks.lanes`, on a machine of two cores.

Three layers of `examples/multistream_overlap.py`, each for three numbers of tokens, in five ways: operator by operator
in one lane, in two lanes, in one lane with two intra-op threads; and compiled by Inlay, whole for two intra-op threads,
and cut into the pieces of two lanes, one thread each. Rounds are interleaved. What is printed are medians of ratios,
round by round, and what lies between the lowest and the highest tenth of them.
"""

from __future__ import annotations

import sys
import tempfile
from contextlib import closing
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

import torch

sys.path.append(str(Path(__file__).parents[1] / "examples"))

from multistream_overlap import LAYERS, opened

from inlay.compile.load import load_package
from inlay.compile.pack import Contents, lower, pack
from inlay.streams import Overlapped, in_order, open_lanes, planned
from inlay.streams.comparing import in_rounds, intra_op
from inlay.streams.packed import cut, in_lanes, plan_lanes, save

if TYPE_CHECKING:
    from collections.abc import Callable

    from inlay.streams.comparing import Way
    from inlay.streams.course import Runner

WIDTH, TOKENS, ROUNDS = 512, (1, 16, 256), 40
ONE, TWO, THREADS = "one lane", "two lanes", "two intra-op threads"
COMPILED, COMPILED_LANES = "compiled, two threads", "compiled, two lanes"


def ways(
    layer: str, tokens: int, lanes: Runner, on_two: Callable[..., Any], folder: Path
) -> tuple[dict[str, Way], dict[str, Any], str]:
    """The five ways to run a layer, what it is given, and what was planned."""
    program, given = opened(LAYERS[layer](WIDTH, tokens))
    plan = planned(program, given)
    lowered = cut(program, plan.work)
    pack(lowered, folder / "lanes", Contents(layer))
    package = load_package(folder / "lanes")
    laned = plan_lanes(package, lowered, given, event_seconds=plan.event)
    save(folder / "lanes", laned)
    on_two(pack, lower(program), folder / "whole", Contents(layer))
    whole = load_package(folder / "whole")
    beside = in_lanes(load_package(folder / "lanes"), lanes)
    (expected,), (found,) = package(given).values(), beside(given).values()
    assert torch.equal(expected, found)
    found_ways = {
        ONE: Overlapped(plan.bound, in_order(plan.work), lanes),
        TWO: Overlapped(plan.bound, plan.schedule, lanes),
        THREADS: lambda values: on_two(plan.bound, values),
        COMPILED: lambda values: on_two(whole, values),
        COMPILED_LANES: beside,
    }
    return found_ways, given, f"{len(plan.schedule.lanes)} lanes, {len(laned.schedule.lanes)} compiled"


def against(times: dict[str, list[float]], one: str, two: str) -> str:
    """The first way over the second, round by round."""
    ratios = sorted(a / b for a, b in zip(times[one], times[two], strict=True))
    tenth = len(ratios) // 10
    return f"{median(ratios):.2f} ({ratios[tenth]:.2f} … {ratios[-1 - tenth]:.2f})"


def main() -> None:
    """Print the table of docs/streams.md."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    print(f"| layer | tokens | planned | {ONE} | {TWO} ÷ {ONE} | {TWO} ÷ {THREADS} | {COMPILED_LANES} ÷ {COMPILED} |")
    print("|---|---|---|---|---|---|---|")
    with (
        torch.no_grad(),
        tempfile.TemporaryDirectory() as folder,
        closing(open_lanes(2, "cpu")) as lanes,
        intra_op(2) as on_two,
    ):
        for layer in LAYERS:
            for tokens in TOKENS:
                found, given, plans = ways(layer, tokens, lanes, on_two, Path(folder) / f"{layer}{tokens}")
                times = in_rounds(found, lambda values=given: values, ROUNDS)
                cells = [against(times, *pair) for pair in ((TWO, ONE), (TWO, THREADS), (COMPILED_LANES, COMPILED))]
                first = f"{1e3 * median(times[ONE]):.2f} ms"
                print(f"| {layer} | {tokens} | {plans} | {first} | {' | '.join(cells)} |", flush=True)


if __name__ == "__main__":
    main()

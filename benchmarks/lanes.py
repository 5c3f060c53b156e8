"""Does it pay to run branches of a layer beside each other? `python -m benchmarks.lanes`, on a machine of two cores.

Three layers of `examples/multistream_overlap.py`, each for three numbers of tokens, in five ways: operator by operator
in one lane, in two lanes, in one lane with two intra-op threads; and compiled by Inlay, whole for two intra-op threads,
and cut into the pieces of two lanes, one thread each. Rounds are interleaved. What is printed are medians of ratios,
round by round, and what lies between the lowest and the highest tenth of them.
"""

from __future__ import annotations

import sys
import tempfile
from functools import partial
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

import torch

sys.path.append(str(Path(__file__).parents[1] / "examples"))

from multistream_overlap import LAYERS, WORTH, rounds, threaded, with_two_threads

from inlay.capture import capture
from inlay.compile.load import load_package
from inlay.compile.pack import Contents, lower, pack
from inlay.program.bindings import Role
from inlay.state import in_place
from inlay.streams import (
    Overlapped,
    bound_program,
    check,
    grouped,
    in_order,
    joined,
    measured_calls,
    measured_event,
    open_lanes,
    schedule,
    work_of_program,
)
from inlay.streams.packed import cut, in_lanes, planned, save

if TYPE_CHECKING:
    from collections.abc import Callable

    from inlay.streams import Lanes

WIDTH, TOKENS, ROUNDS = 512, (1, 16, 256), 40
ONE, TWO, THREADS = "one lane", "two lanes", "two intra-op threads"
COMPILED, COMPILED_LANES = "compiled, two threads", "compiled, two lanes"


def ways(layer: str, tokens: int, lanes: Lanes, folder: Path) -> tuple[dict[str, Callable[[], Any]], str]:
    """The five ways to run a layer, and what was planned."""
    example = LAYERS[layer](WIDTH, tokens)
    program = capture(example)
    given = dict(zip((row.name for row in program.bindings.of(Role.INPUT)), example.args, strict=True))
    event = measured_event()
    work = grouped(work_of_program(program, measured_calls(program, given)), WORTH * event)
    work, made = joined(work, schedule(work, lanes=2, event_seconds=event))
    assert check(work, made).ok
    bound = bound_program(in_place(program).program, work)
    pack(cut(program, work), folder / "lanes", Contents(layer))
    package = load_package(folder / "lanes")
    laned = planned(package, cut(program, work), given, event_seconds=event)
    save(folder / "lanes", laned)
    threaded(2, lambda: pack(lower(program), folder / "whole", Contents(layer)))
    whole = load_package(folder / "whole")
    beside = in_lanes(load_package(folder / "lanes"), lanes)
    (expected,), (found,) = package(given).values(), beside(given).values()
    assert torch.equal(expected, found)
    found_ways = {
        ONE: Overlapped(bound, in_order(work), lanes),
        TWO: Overlapped(bound, made, lanes),
        THREADS: with_two_threads(bound),
        COMPILED: with_two_threads(whole),
        COMPILED_LANES: beside,
    }
    plans = f"{len(made.lanes)} lanes, {len(laned.schedule.lanes)} compiled"
    return {name: partial(way, given) for name, way in found_ways.items()}, plans


def against(times: dict[str, list[float]], one: str, two: str) -> str:
    """The first way over the second, round by round."""
    ratios = sorted(a / b for a, b in zip(times[one], times[two], strict=True))
    tenth = len(ratios) // 10
    return f"{median(ratios):.2f} ({ratios[tenth]:.2f} … {ratios[-1 - tenth]:.2f})"


def main() -> None:
    """Print the table of docs/streams.md."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    lanes = open_lanes(2, "cpu")
    print(f"| layer | tokens | planned | {ONE} | {TWO} ÷ {ONE} | {TWO} ÷ {THREADS} | {COMPILED_LANES} ÷ {COMPILED} |")
    print("|---|---|---|---|---|---|---|")
    with torch.no_grad(), tempfile.TemporaryDirectory() as folder:
        for layer in LAYERS:
            for tokens in TOKENS:
                found, plans = ways(layer, tokens, lanes, Path(folder) / f"{layer}{tokens}")
                times = rounds(found, ROUNDS)
                cells = [against(times, *pair) for pair in ((TWO, ONE), (TWO, THREADS), (COMPILED_LANES, COMPILED))]
                first = f"{1e3 * median(times[ONE]):.2f} ms"
                print(f"| {layer} | {tokens} | {plans} | {first} | {' | '.join(cells)} |", flush=True)
    lanes.close()


if __name__ == "__main__":
    main()

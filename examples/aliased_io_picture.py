"""Chart of a decode step with in-place caches against one that copies them.

    python examples/aliased_io_picture.py -o docs/pictures/in_place.svg
    python examples/aliased_io_picture.py --lengths 256,512 --rounds 1 --backend eager

Both run the same step, which computes new caches from the old ones. *Aliased* declares that the new caches use the
storage of the old ones (`alias=`). *Copied* returns new tensors and passes them to the next step, as a system without
aliases does.

Attention reads a slice of the first 128 rows at every length. A mask over the whole cache would read all of it, and
both variants would grow with the length. The remaining growth is the cost of rows that a step neither reads nor
changes.

Bytes are measured: those written to the caches, in whole pages, and those allocated in blocks as large as a cache.
Times are medians of interleaved runs. The model has no weights, because only the cache matters here.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import showing  # noqa: F401 - quiets the profiler
import torch
from chart import Line, Panel, draw
from torch import Tensor, nn
from torch.nn import functional

from inlay import Example
from inlay.frontend import capture
from inlay.lowering.backends import BACKENDS
from inlay.lowering.compiled_program import CompiledProgram, compile_program
from inlay.package.memory_profiler import allocate_paged, profile_memory

if TYPE_CHECKING:
    from collections.abc import Sequence

FILLED_ROWS = 128
"""Rows that attention reads."""
HEAD_DIM, DTYPE = 64, torch.bfloat16
LENGTHS = tuple(256 * 2**each for each in range(8))
ROUND_SECONDS = 0.5
"""Time limit of one round in seconds; at least three steps are timed."""
KINDS = {"aliased": "#14967f", "copied": "#d5652a"}


@dataclass(frozen=True)
class CacheShape:
    name: str
    layers: int
    heads: int
    kv_heads: int


SHAPES = (CacheShape("one layer", 1, 8, 4), CacheShape("SmolLM2's shape", 30, 9, 3))


@dataclass(frozen=True)
class Measurement:
    """Time and bytes of one step."""

    shape: str
    kind: str
    length: int
    milliseconds: float
    bytes: int


class DecodeStep(nn.Module):
    """Adds a row to the caches of every layer and attends over the filled rows."""

    def forward(self, x: Tensor, at: Tensor, caches: list[Tensor]) -> tuple[Tensor, list[Tensor]]:
        made = []
        for old_keys, old_values in zip(caches[::2], caches[1::2], strict=True):
            keys = old_keys.index_copy(2, at, x.mean(2, keepdim=True))
            values = old_values.index_copy(2, at, x.amax(2, keepdim=True))
            x = x + functional.scaled_dot_product_attention(x, keys[:, :, :FILLED_ROWS], values[:, :, :FILLED_ROWS])
            made += [keys, values]
        return x, made


def measure(shape: CacheShape, length: int, backend: str, rounds: int) -> list[Measurement]:
    """Measure both variants at one length."""
    count = 2 * shape.layers
    x = torch.randn(1, shape.kv_heads, shape.heads // shape.kv_heads, HEAD_DIM, dtype=DTYPE)
    whole = allocate_paged([count, 1, shape.kv_heads, length, HEAD_DIM], DTYPE)  # all caches in one range, for tracking
    caches = list(whole.normal_().unbind(0))
    program = capture(Example(DecodeStep(), (x, torch.tensor([0]), caches)))
    steps = {
        "aliased": compile_program(program, backend, alias={1 + each: 2 + each for each in range(count)}),
        "copied": compile_program(program, backend),
    }
    check_results(steps, x, caches)
    moved = {kind: profile_memory(partial(step, x, torch.tensor([1]), caches), whole) for kind, step in steps.items()}
    times = time_interleaved(steps, x, caches, rounds)
    return [
        Measurement(
            shape.name,
            kind,
            length,
            times[kind],
            moved[kind].written_bytes + moved[kind].copied_bytes(caches[0].nbytes),
        )
        for kind in steps
    ]


def check_results(steps: dict[str, CompiledProgram], x: Tensor, caches: list[Tensor]) -> None:
    """Check that both variants equal eager PyTorch, and that only the aliased one returns the given caches."""
    wanted, rows = DecodeStep()(x, torch.tensor([0]), caches)
    for kind in ("copied", "aliased"):
        result, made = steps[kind](x, torch.tensor([0]), caches)
        torch.testing.assert_close(result, wanted, rtol=2e-2, atol=2e-2)
        torch.testing.assert_close(made, rows, rtol=2e-2, atol=2e-2)
        there = all(new is old for new, old in zip(made, caches, strict=True))
        if there is not (kind == "aliased"):
            raise SystemExit(f"The {kind} step returned {'the given' if there else 'other'} caches.")


def time_interleaved(
    steps: dict[str, CompiledProgram], x: Tensor, caches: list[Tensor], rounds: int
) -> dict[str, float]:
    """Return the median time of a step in milliseconds."""
    times: dict[str, list[float]] = {kind: [] for kind in steps}
    places = [torch.tensor([each]) for each in range(FILLED_ROWS)]
    for _ in range(rounds):
        for kind, step in steps.items():
            held, taken = caches, list[float]()
            while len(taken) < 4 or (len(taken) < 30 and sum(taken) < ROUND_SECONDS):
                begin = time.perf_counter()
                _, held = step(x, places[len(taken)], held)
                taken.append(time.perf_counter() - begin)
            times[kind] += taken[1:]  # the first step runs with the other variant's data in the CPU caches
    return {kind: 1000 * statistics.median(each) for kind, each in times.items()}


def draw_chart(points: Sequence[Measurement]) -> str:
    """Draw time and bytes over the cache length."""
    names = list(dict.fromkeys(point.shape for point in points))

    def lines(what: str) -> list[Line]:
        return [
            Line(
                f"{kind}, {name}",
                colour,
                name == names[0],
                {point.length: getattr(point, what) for point in points if (point.shape, point.kind) == (name, kind)},
            )
            for kind, colour in KINDS.items()
            for name in names
        ]

    return draw(
        "One step: caches in place (aliased) against copied",
        "Step time and bytes moved over the cache length: aliased is constant, copied grows.",
        f"cache length in rows, {FILLED_ROWS} of them filled",
        [
            Panel("time of a step", format_milliseconds, lines("milliseconds")),
            Panel("bytes moved in a step", format_bytes, lines("bytes")),
        ],
    )


def format_milliseconds(value: float) -> str:
    """Format a time in milliseconds or seconds."""
    return f"{value / 1000:.3g} s" if value >= 1000 else f"{value:.3g} ms" if value >= 0.01 else f"{value:.0e} ms"


def format_bytes(value: float) -> str:
    """Format a number of bytes."""
    for unit, many in (("GB", 1e9), ("MB", 1e6), ("KB", 1e3)):
        if value >= many:
            return f"{value / many:.3g} {unit}"
    return f"{value:.0f} B"


def format_table(points: Sequence[Measurement]) -> str:
    """Format the measurements as a Markdown table."""
    head = ("", "cache length", "time, aliased", "time, copied", "bytes, aliased", "bytes, copied")
    rows = [f"| {' | '.join(head)} |", "|---|--:|--:|--:|--:|--:|"]
    for aliased, copied in zip(points[::2], points[1::2], strict=True):
        cells = [format_milliseconds(aliased.milliseconds), format_milliseconds(copied.milliseconds)]
        cells += [format_bytes(aliased.bytes), format_bytes(copied.bytes)]
        rows.append(f"| {aliased.shape} | {aliased.length:,} | {' | '.join(cells)} |")
    return "\n".join(rows)


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("-o", "--output", type=Path, help="write the chart to this SVG file")
    parser.add_argument("--json", type=Path, help="write the measurements to this JSON file")
    parser.add_argument("--lengths", default=",".join(map(str, LENGTHS)), help="cache lengths (default: %(default)s)")
    parser.add_argument("--rounds", type=int, default=5, help="number of interleaved rounds (default: %(default)s)")
    parser.add_argument("--backend", choices=BACKENDS, default="inductor", help="backend of the step")
    options = parser.parse_args(arguments)
    lengths = [int(each) for each in options.lengths.split(",")]
    if min(lengths) < FILLED_ROWS:
        parser.error(f"a cache must have at least the {FILLED_ROWS} rows that are read")
    torch.manual_seed(0)
    points = []
    with torch.no_grad():
        for shape in SHAPES:
            for length in lengths:
                points += measure(shape, length, options.backend, options.rounds)
                print(f"{shape.name}, {length:,} rows: measured", file=sys.stderr)
    print(format_table(points))
    if options.output:
        options.output.write_text(draw_chart(points))
    if options.json:
        facts = {"backend": options.backend, "rounds": options.rounds, "threads": torch.get_num_threads()}
        facts |= {"dtype": str(DTYPE), "filled": FILLED_ROWS, "torch": torch.__version__}
        options.json.write_text(json.dumps(facts | {"points": [asdict(point) for point in points]}, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())

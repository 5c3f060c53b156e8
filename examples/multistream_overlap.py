"""Independent branches with joins: scheduled over lanes, checked, run, and drawn as they ran.

    python examples/multistream_overlap.py
    python examples/multistream_overlap.py --layer experts --picture experts.svg

Lanes are streams where there is an accelerator, and threads otherwise. Nothing about the overlap is said by hand: the
layer is captured, its operators are measured one by one with one intra-op thread, put together to pieces that pay for
an event, and scheduled; what a lane runs between two events becomes one piece, and the schedule is checked for races.
What is printed is the schedule, that the numbers are those of one lane, bit for bit, and three times of interleaved
rounds: one lane, two lanes, and one lane with two intra-op threads. The last line is JSON; its trace opens in
https://ui.perfetto.dev.
"""

from __future__ import annotations

import argparse
import json
import sys
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import TYPE_CHECKING, Any

import torch
from showing import check
from torch import Tensor, nn

from inlay import Example
from inlay.capture import capture
from inlay.program.bindings import Role
from inlay.state import in_place
from inlay.streams import (
    Overlapped,
    bound_program,
    grouped,
    in_order,
    joined,
    measured_calls,
    measured_event,
    open_lanes,
    schedule,
    work_of_program,
)
from inlay.streams import check as checked
from inlay.streams.picture import draw

if TYPE_CHECKING:
    from collections.abc import Callable

    from inlay.streams import Bound, Schedule

WORTH = 4
"""A piece takes at least so many times as long as an event."""


class Branches(nn.Module):
    """Two equal branches between a split and a join, twice."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.branches = nn.ModuleList(
            nn.Sequential(nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width)) for _ in range(4)
        )

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.branches[0](x) * self.branches[1](x)
        return x + self.branches[2](x) * self.branches[3](x)


def branches(width: int, tokens: int) -> Example:
    return Example(Branches(width), (torch.randn(tokens, width),))


def experts(width: int, tokens: int) -> Example:
    """A stock mixture of 8 experts, 2 of them for each token, with a shared expert beside them."""
    from transformers import Qwen2MoeConfig
    from transformers.models.qwen2_moe.modeling_qwen2_moe import Qwen2MoeSparseMoeBlock

    config = Qwen2MoeConfig(
        hidden_size=width,
        moe_intermediate_size=width,
        shared_expert_intermediate_size=2 * width,
        num_experts=8,
        num_experts_per_tok=2,
    )
    config._experts_implementation = "grouped_mm"  # what a whole model of it chooses
    block = Qwen2MoeSparseMoeBlock(config).eval()
    for weight in block.parameters():
        nn.init.normal_(weight, std=0.05)
    return Example(block, (torch.randn(1, tokens, width),))


class ParallelBlock(nn.Module):
    """A stock block whose attention and MLP both read the block's input."""

    def __init__(self, width: int) -> None:
        super().__init__()
        from transformers import GPTNeoXConfig
        from transformers.models.gpt_neox.modeling_gpt_neox import GPTNeoXLayer, GPTNeoXRotaryEmbedding

        config = GPTNeoXConfig(
            hidden_size=width,
            num_attention_heads=max(1, width // 64),
            intermediate_size=4 * width,
            num_hidden_layers=1,
            use_parallel_residual=True,
            attn_implementation="sdpa",
        )
        self.rotary, self.layer = GPTNeoXRotaryEmbedding(config), GPTNeoXLayer(config, 0)

    def forward(self, x: Tensor) -> Tensor:
        places = torch.arange(x.shape[1])[None]
        made = self.layer(x, attention_mask=None, position_ids=places, position_embeddings=self.rotary(x, places))
        return made[0] if isinstance(made, tuple) else made


def parallel(width: int, tokens: int) -> Example:
    return Example(ParallelBlock(width).eval(), (torch.randn(1, tokens, width),))


LAYERS: dict[str, Callable[[int, int], Example]] = {"branches": branches, "experts": experts, "parallel": parallel}


def planned(example: Example, event: float) -> tuple[Bound, Schedule, dict[str, Any]]:
    """From a layer to work that can be run, a schedule of it where an event takes so long, and what it is given."""
    program = in_place(capture(example)).program
    given = dict(zip((row.name for row in program.bindings.of(Role.INPUT)), example.args, strict=True))
    work = grouped(work_of_program(program, measured_calls(program, given)), WORTH * event)
    work, made = joined(work, schedule(work, lanes=2, event_seconds=event))
    return bound_program(program, work), made, given


def bits(values: list[Tensor]) -> list[bytes]:
    return [value.cpu().contiguous().view(torch.uint8).numpy().tobytes() for value in values]


def rounds(ways: dict[str, Callable[[], Any]], count: int) -> dict[str, list[float]]:
    """Seconds of each way, in rounds: whatever else the machine does, it does to all of them."""
    times: dict[str, list[float]] = {name: [] for name in ways}
    for place in range(count + 2):
        for name, way in ways.items():
            start = perf_counter()
            way()
            if place >= 2:
                times[name].append(perf_counter() - start)
    return times


def threaded(threads: int, call: Callable[[], Any]) -> Any:
    """A call with so many intra-op threads."""
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        return call()
    finally:
        torch.set_num_threads(before)


def with_two_threads(call: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """A call in a thread that keeps two intra-op threads: to change their number costs more than a call."""
    thread = ThreadPoolExecutor(1, initializer=torch.set_num_threads, initargs=(2,))
    return lambda given: thread.submit(call, given).result()


def finished(call: Callable[[Any], Any], given: Any) -> Any:
    """A call and all it launched on a device."""
    made = call(given)
    if torch.accelerator.is_available():
        torch.accelerator.synchronize()
    return made


def show(times: dict[str, list[float]]) -> float:
    """Print medians and spreads; the median of overlapped over serial, round by round."""
    print(f"{'':<24} {'median':>9} {'lowest':>9} {'highest':>9}")
    for name, each in times.items():
        row = (median(each), min(each), max(each))
        print(f"{name:<24} " + " ".join(f"{1e3 * value:>6.2f} ms" for value in row))
    pairs = zip(times["two lanes"], times["one lane"], strict=True)
    return median(two / one for two, one in pairs)


def overlap(options: argparse.Namespace) -> int:
    device = torch.accelerator.current_accelerator() or torch.device("cpu")
    example = LAYERS[options.layer](options.width, options.tokens)
    example.module.to(device)
    example = Example(example.module, tuple(each.to(device) for each in example.args))
    bound, made, given = threaded(1, partial(planned, example, measured_event()))
    print(f"{len(bound.work)} pieces, {len(made.lanes)} lanes, {len(made.events)} events\n{made}")
    right = check("the schedule has no race", checked(bound.work, made).ok)
    lanes = open_lanes(2, device)
    two, one = Overlapped(bound, made, lanes), Overlapped(bound, in_order(bound.work), lanes)
    equal = bits(finished(two, given)) == bits(finished(one, given))
    same = check("the numbers are those of one lane, bit for bit", equal)
    ways = {"one lane": partial(finished, one, given), "two lanes": partial(finished, two, given)}
    if device.type == "cpu":
        ways["one, two intra-op threads"] = partial(with_two_threads(bound), given)
    times = rounds(ways, options.rounds)
    ratio = show(times)
    timeline = min((two.timed(given)[1] for _ in range(options.rounds)), key=lambda each: each.seconds)
    print(timeline)
    lanes.close()
    options.trace.write_text(timeline.trace())
    if options.timeline:
        options.timeline.write_text(timeline.text())
    if options.picture:
        options.picture.write_text(draw(timeline, f"{options.layer}: two lanes against one, × {ratio:.2f}"))
    print(json.dumps({"overlapped_over_serial": round(ratio, 3), "trace": str(options.trace)}))
    return 0 if right and same else 1


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layer", choices=LAYERS, default="branches", help="what is run")
    parser.add_argument("--width", type=int, default=512, help="features")
    parser.add_argument("--tokens", type=int, default=256, help="rows")
    parser.add_argument("--rounds", type=int, default=20, help="how often each way is measured")
    parser.add_argument("--trace", type=Path, default=Path("overlap.json"), help="where the trace is written")
    parser.add_argument("--timeline", type=Path, help="where the timeline is saved, for `inlay report --timeline`")
    parser.add_argument("--picture", type=Path, help="where the timeline is drawn, as SVG")
    torch.manual_seed(0)
    with torch.no_grad():
        return overlap(parser.parse_args(arguments))


if __name__ == "__main__":
    sys.exit(main())

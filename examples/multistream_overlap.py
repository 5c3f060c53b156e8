"""Schedule independent branches of a layer over lanes, check the schedule, run it, and draw the timeline.

    python examples/multistream_overlap.py
    python examples/multistream_overlap.py --layer experts --picture experts.svg

Lanes are streams on an accelerator, and threads otherwise. The overlap needs no annotations: the layer is captured, its
operators are measured one by one with one intra-op thread, grouped into pieces that are worth an event, and scheduled.
The operators of a lane between two events become one piece, and the schedule is checked for races. The output contains
the schedule, a bitwise comparison with one lane, and the times of interleaved rounds: one lane, two lanes, and one lane
with two intra-op threads. The last line is JSON; open its trace in https://ui.perfetto.dev.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from showing import check
from torch import Tensor, nn

from inlay import Example
from inlay.frontend import capture
from inlay.lowering.state.in_place_writes import write_in_place
from inlay.program.bindings import Role
from inlay.streams import check_schedule, compare_lanes, plan_overlap
from inlay.streams.timeline_svg import draw_timeline

if TYPE_CHECKING:
    from collections.abc import Callable

    from inlay.program import Program
    from inlay.streams import OverlapComparison


class Branches(nn.Module):
    """Two equal branches between a split and a join, twice."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.branches = nn.ModuleList(
            nn.Sequential(nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width)) for _ in range(4)
        )

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.branches[0](x) * self.branches[1](x)
        result: Tensor = x + self.branches[2](x) * self.branches[3](x)
        return result


def branches(width: int, tokens: int) -> Example:
    return Example(Branches(width), (torch.randn(tokens, width),))


def experts(width: int, tokens: int) -> Example:
    """A mixture of 8 experts from transformers, 2 per token, with a shared expert."""
    from transformers import Qwen2MoeConfig
    from transformers.models.qwen2_moe.modeling_qwen2_moe import Qwen2MoeSparseMoeBlock

    config = Qwen2MoeConfig(
        hidden_size=width,
        moe_intermediate_size=width,
        shared_expert_intermediate_size=2 * width,
        num_experts=8,
        num_experts_per_tok=2,
    )
    config._experts_implementation = "grouped_mm"  # the default of a whole model
    block = Qwen2MoeSparseMoeBlock(config).eval()
    for weight in block.parameters():
        nn.init.normal_(weight, std=0.05)
    return Example(block, (torch.randn(1, tokens, width),))


class ParallelBlock(nn.Module):
    """A block from transformers whose attention and MLP both read the input of the block."""

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
        result: Tensor = made[0] if isinstance(made, tuple) else made
        return result


def parallel(width: int, tokens: int) -> Example:
    return Example(ParallelBlock(width).eval(), (torch.randn(1, tokens, width),))


LAYERS: dict[str, Callable[[int, int], Example]] = {"branches": branches, "experts": experts, "parallel": parallel}


def capture_layer(example: Example) -> tuple[Program, dict[str, Tensor]]:
    """Return a layer as a program, and its inputs."""
    program = write_in_place(capture(example)).program
    return program, dict(zip((row.name for row in program.bindings.with_role(Role.INPUT)), example.args, strict=True))


def print_times(compared: OverlapComparison) -> None:
    """Print median, lowest and highest times."""
    print(f"{'':<34} {'median':>9} {'lowest':>9} {'highest':>9}")
    for way, figures in compared.metrics().items():
        row = (figures["median"], figures["lowest"], figures["highest"])
        print(f"{way:<34} " + " ".join(f"{1e3 * value:>6.2f} ms" for value in row))


def run_overlap(options: argparse.Namespace) -> int:
    device = torch.accelerator.current_accelerator(check_available=True) or torch.device("cpu")
    example = LAYERS[options.layer](options.width, options.tokens)
    example.module.to(device)
    program, given = capture_layer(Example(example.module, tuple(each.to(device) for each in example.args)))
    plan = plan_overlap(program, given)
    made = plan.schedule
    print(f"{len(plan.work)} pieces, {len(made.lanes)} lanes, {len(made.events)} events\n{made}")
    right = check("the schedule has no race", check_schedule(plan.work, made).ok)
    compared = compare_lanes(plan, given, rounds=options.rounds, device=device)
    same = check("the results are bitwise equal to one lane", compared.is_identical)
    print_times(compared)
    timeline, ratio = compared.timeline, compared.ratio
    print(timeline)
    options.trace.write_text(timeline.trace())
    if options.timeline:
        options.timeline.write_text(timeline.to_json())
    if options.picture:
        options.picture.write_text(draw_timeline(timeline, f"{options.layer}: two lanes against one, × {ratio:.2f}"))
    print(json.dumps({"overlapped_over_serial": round(ratio, 3), "trace": str(options.trace)}))
    return 0 if right and same else 1


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layer", choices=LAYERS, default="branches", help="the layer to run")
    parser.add_argument("--width", type=int, default=512, help="features")
    parser.add_argument("--tokens", type=int, default=256, help="rows")
    parser.add_argument("--rounds", type=int, default=20, help="number of measurements of each variant")
    parser.add_argument("--trace", type=Path, default=Path("overlap.json"), help="write the trace to this file")
    parser.add_argument("--timeline", type=Path, help="save the timeline to this file, for `inlay report --timeline`")
    parser.add_argument("--picture", type=Path, help="draw the timeline to this SVG file")
    torch.manual_seed(0)
    with torch.no_grad():
        return run_overlap(parser.parse_args(arguments))


if __name__ == "__main__":
    sys.exit(main())

"""Layers with branches that do not need each other, from stock models, and how they are scheduled."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch.utils._pytree import tree_leaves

from inlay import Example
from inlay.capture import capture
from inlay.program.bindings import Role
from inlay.state import in_place
from inlay.streams import bound_program, grouped, measured_calls, schedule, work_of_program

if TYPE_CHECKING:
    from inlay.program import Program
    from inlay.streams import Bound, Schedule


def experts(hidden: int = 64, expert: int = 48, shared: int = 96, tokens: int = 8) -> Example:
    """A mixture of experts with a shared expert."""
    from transformers import Qwen2MoeConfig
    from transformers.models.qwen2_moe.modeling_qwen2_moe import Qwen2MoeSparseMoeBlock

    config = Qwen2MoeConfig(
        hidden_size=hidden,
        moe_intermediate_size=expert,
        shared_expert_intermediate_size=shared,
        num_experts=8,
        num_experts_per_tok=2,
    )
    config._experts_implementation = "grouped_mm"  # what a whole model of it chooses
    block = Qwen2MoeSparseMoeBlock(config).eval()
    for weight in block.parameters():
        torch.nn.init.normal_(weight, std=0.05)
    return Example(block, (torch.randn(1, tokens, hidden),))


class ParallelBlock(torch.nn.Module):
    """A stock block whose attention and MLP both read the block's input, with its rotary positions."""

    def __init__(self, hidden: int, heads: int) -> None:
        super().__init__()
        from transformers import GPTNeoXConfig
        from transformers.models.gpt_neox.modeling_gpt_neox import GPTNeoXLayer, GPTNeoXRotaryEmbedding

        config = GPTNeoXConfig(
            hidden_size=hidden,
            num_attention_heads=heads,
            intermediate_size=4 * hidden,
            num_hidden_layers=1,
            use_parallel_residual=True,
            attn_implementation="sdpa",
        )
        self.rotary, self.layer = GPTNeoXRotaryEmbedding(config), GPTNeoXLayer(config, 0)

    def forward(self, x: torch.Tensor) -> Any:
        places = torch.arange(x.shape[1])[None]
        made = self.layer(x, attention_mask=None, position_ids=places, position_embeddings=self.rotary(x, places))
        return made[0] if isinstance(made, tuple) else made


def parallel_block(hidden: int = 64, heads: int = 4, tokens: int = 16) -> Example:
    """A block with attention and MLP in parallel."""
    return Example(ParallelBlock(hidden, heads).eval(), (torch.randn(1, tokens, hidden),))


def prepared(example: Example) -> tuple[Program, dict[str, Any]]:
    """The program of an example, which writes its state itself, and what it is given."""
    program = in_place(capture(example)).program
    return program, dict(
        zip((row.name for row in program.bindings.of(Role.INPUT)), tree_leaves(example.args), strict=True)
    )


def scheduled(example: Example, event_seconds: float, lanes: int = 2) -> tuple[Bound, Schedule, dict[str, Any]]:
    """Captured, measured, put into pieces, scheduled and bound; nothing is said by hand."""
    program, given = prepared(example)
    work = grouped(work_of_program(program, measured_calls(program, given)), 4 * event_seconds)
    return bound_program(program, work), schedule(work, lanes=lanes, event_seconds=event_seconds), given

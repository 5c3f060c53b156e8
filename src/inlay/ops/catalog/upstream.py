"""Kernels of other projects, each with where it was seen. Paths are those of the repositories in August 2026."""

from __future__ import annotations

from inlay.ops.catalog.entry import Entry

_HALF = ("float16", "bfloat16")
_CUDA = "CUDA"
_STABLE = "vllm-project/vllm csrc/libtorch_stable/torch_bindings.cpp"


def _flashinfer(name: str, computes: tuple[str, ...], place: str, conditions: str = _CUDA) -> Entry:
    return Entry(
        f"flashinfer.{name}",
        "flashinfer",
        computes,
        f"flashinfer-ai/flashinfer flashinfer/{place}:{name}",
        package="flashinfer",
        dtypes=_HALF,
        conditions=conditions,
    )


def _vllm(name: str, computes: tuple[str, ...], conditions: str = "CUDA; a CPU build has it too") -> Entry:
    return Entry(f"vllm {name}", "vllm", computes, f"{_STABLE}:{name}", operator=f"_C::{name}", conditions=conditions)


def _tensorrt_llm(name: str, computes: tuple[str, ...], place: str, dtypes: tuple[str, ...]) -> Entry:
    return Entry(
        f"tensorrt_llm {name}",
        "tensorrt_llm",
        computes,
        f"NVIDIA/TensorRT-LLM {place}:{name}",
        package="tensorrt_llm",
        dtypes=dtypes,
        conditions=_CUDA,
    )


UPSTREAM = (
    _flashinfer("rmsnorm", ("rms_norm",), "norm/__init__.py"),
    _flashinfer("fused_add_rmsnorm", ("add_rms_norm",), "norm/__init__.py"),
    _flashinfer("layernorm", ("layer_norm",), "norm/__init__.py"),
    _flashinfer("silu_and_mul", ("swiglu",), "activation.py", "CUDA; gate and up lie beside each other"),
    _flashinfer("gelu_tanh_and_mul", ("geglu",), "activation.py", "CUDA; gate and up lie beside each other"),
    _flashinfer(
        "apply_rope_with_cos_sin_cache", ("rope", "rope_interleaved"), "rope.py", "CUDA; query and key at once"
    ),
    _flashinfer(
        "single_prefill_with_kv_cache",
        ("attention", "rope+attention"),
        "prefill.py",
        "CUDA; rotates query and key itself with pos_encoding_mode ROPE_LLAMA",
    ),
    _vllm("rms_norm", ("rms_norm",)),
    _vllm("fused_add_rms_norm", ("add_rms_norm",)),
    _vllm("silu_and_mul", ("swiglu",)),
    _vllm("gelu_and_mul", ("geglu",)),
    _vllm("swigluoai_and_mul", ("clamped_swiglu",), _CUDA),
    _vllm("rotary_embedding", ("rope", "rope_interleaved")),
    _vllm("fused_qk_norm_rope", ("rms_norm+rope",), "CUDA; query, key and value in one tensor"),
    Entry(
        "vllm causal_conv1d_fwd_cpu",
        "vllm",
        ("conv1d",),
        "vllm-project/vllm csrc/cpu/torch_bindings.cpp:causal_conv1d_fwd_cpu",
        operator="_C::causal_conv1d_fwd_cpu",
        conditions="a CPU build, on CUDA a kernel of its own; the convolution and a SiLU, no gates around it",
    ),
    _tensorrt_llm(
        "fused_qk_norm_rope",
        ("rms_norm+rope",),
        "cpp/tensorrt_llm/thop/fusedQKNormRopeOp.cpp",
        ("bfloat16",),
    ),
    _tensorrt_llm(
        "causal_conv1d_fwd",
        ("conv1d",),
        "cpp/tensorrt_llm/thop/causalConv1dOp.cpp",
        ("float32", *_HALF),
    ),
    _tensorrt_llm(
        "GemmSwigluPlugin",
        ("gemm+swiglu",),
        "cpp/tensorrt_llm/plugins/gemmSwigluPlugin/gemmSwigluPlugin.cpp",
        ("float8_e4m3fn",),
    ),
)

"""Kernels of torch, of Inlay and of third parties."""

from __future__ import annotations

from inlay.ops.catalog.entry import KernelEntry

_MKLDNN = "torch/_inductor/fx_passes/mkldnn_fusion.py"
_GEMM_EPILOGUES = ("relu", "sigmoid", "tanh", "gelu", "silu", "hardswish", "hardsigmoid", "add", "sub", "mul")
_HALF_DTYPES = ("bfloat16", "float16")


def _inlay(name: str, file: str, transform: str, conditions: str = "") -> KernelEntry:
    return KernelEntry(
        name,
        "inlay",
        (name,),
        f"inlay/ops/{file}.py:{name}",
        operator=f"inlay::{name}",
        conditions=conditions,
        transform=transform,
    )


BUNDLED_KERNELS = (
    _inlay("rms_norm", "norm", "match_rms_norm"),
    _inlay("add_rms_norm", "norm", "fuse_add_rms_norm", "after match_rms_norm"),
    _inlay("rope", "rope", "match_rope"),
    _inlay("rope_interleaved", "rope", "match_rope_interleaved"),
    _inlay("swiglu", "gated_activation", "match_swiglu"),
    _inlay("geglu", "gated_activation", "match_geglu"),
    _inlay("clamped_swiglu", "gated_activation", "match_clamped_swiglu"),
    _inlay("attention", "attention", "match_attention"),
    _inlay("expert_linear", "expert_linear", "match_routed_experts"),
    _inlay(
        "gated_short_conv",
        "short_conv",
        "match_gated_short_conv",
        "one kernel only on GPUs (Triton, not timed); elsewhere the compiler uses its reference",
    ),
    KernelEntry(
        "layer_norm",
        "aten",
        ("layer_norm",),
        "aten/src/ATen/native/layer_norm.cpp:layer_norm",
        operator="aten::layer_norm",
        transform="match_layer_norm",
    ),
    KernelEntry(
        "linear on concatenated weights",
        "aten",
        ("shared_input_gemms",),
        "aten/src/ATen/native/Linear.cpp:linear",
        operator="aten::linear",
        conditions="weights of one dtype, concatenated at build",
        transform="fuse_gemms",
    ),
    KernelEntry(
        "linear with an epilogue",
        "onednn",
        tuple(f"gemm+{each}" for each in _GEMM_EPILOGUES),
        f"{_MKLDNN}:_register_unary_fusion, _register_binary_fusion",
        operator="mkldnn::_linear_pointwise",
        dtypes=_HALF_DTYPES,
        conditions="CPU, frozen weights; Inductor inserts it",
    ),
    KernelEntry(
        "dynamic int8 linear with ReLU",
        "quantized",
        ("gemm+relu",),
        "aten/src/ATen/native/quantized/cpu/qlinear_dynamic.cpp:QLinearDynamicInt8",
        operator="quantized::linear_relu_dynamic",
        dtypes=("int8",),
    ),
    KernelEntry(
        "generated pointwise and reduction kernels",
        "inductor",
        ("pointwise", "reduction"),
        "torch/_inductor/scheduler.py:Scheduler.can_fuse_vertical",
        conditions="calls over the same rows, without a custom operator in between; needs no transform",
    ),
)
_HALF_DTYPES = ("float16", "bfloat16")
_CUDA = "CUDA"
_STABLE = "vllm-project/vllm csrc/libtorch_stable/torch_bindings.cpp"


def _flashinfer(name: str, computes: tuple[str, ...], place: str, conditions: str = _CUDA) -> KernelEntry:
    return KernelEntry(
        f"flashinfer.{name}",
        "flashinfer",
        computes,
        f"flashinfer-ai/flashinfer flashinfer/{place}:{name}",
        package="flashinfer",
        dtypes=_HALF_DTYPES,
        conditions=conditions,
    )


def _vllm(name: str, computes: tuple[str, ...], conditions: str = "CUDA; a CPU build has it too") -> KernelEntry:
    return KernelEntry(
        f"vllm {name}", "vllm", computes, f"{_STABLE}:{name}", operator=f"_C::{name}", conditions=conditions
    )


def _tensorrt_llm(name: str, computes: tuple[str, ...], place: str, dtypes: tuple[str, ...]) -> KernelEntry:
    return KernelEntry(
        f"tensorrt_llm {name}",
        "tensorrt_llm",
        computes,
        f"NVIDIA/TensorRT-LLM {place}:{name}",
        package="tensorrt_llm",
        dtypes=dtypes,
        conditions=_CUDA,
    )


THIRD_PARTY_KERNELS = (
    _flashinfer("rmsnorm", ("rms_norm",), "norm/__init__.py"),
    _flashinfer("fused_add_rmsnorm", ("add_rms_norm",), "norm/__init__.py"),
    _flashinfer("layernorm", ("layer_norm",), "norm/__init__.py"),
    _flashinfer("silu_and_mul", ("swiglu",), "activation.py", "CUDA; gate and up are concatenated"),
    _flashinfer("gelu_tanh_and_mul", ("geglu",), "activation.py", "CUDA; gate and up are concatenated"),
    _flashinfer(
        "apply_rope_with_cos_sin_cache", ("rope", "rope_interleaved"), "rope.py", "CUDA; query and key in one call"
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
    KernelEntry(
        "vllm causal_conv1d_fwd_cpu",
        "vllm",
        ("conv1d",),
        "vllm-project/vllm csrc/cpu/torch_bindings.cpp:causal_conv1d_fwd_cpu",
        operator="_C::causal_conv1d_fwd_cpu",
        conditions="CPU build (CUDA has another kernel); convolution and SiLU, without gates",
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
        ("float32", *_HALF_DTYPES),
    ),
    _tensorrt_llm(
        "GemmSwigluPlugin",
        ("gemm+swiglu",),
        "cpp/tensorrt_llm/plugins/gemmSwigluPlugin/gemmSwigluPlugin.cpp",
        ("float8_e4m3fn",),
    ),
)

"""Kernels that come with torch or with Inlay."""

from __future__ import annotations

from inlay.ops.catalog.entry import Entry

_MKLDNN = "torch/_inductor/fx_passes/mkldnn_fusion.py"
_GEMM_EPILOGUES = ("relu", "sigmoid", "tanh", "gelu", "silu", "hardswish", "hardsigmoid", "add", "sub", "mul")
_REDUCED = ("bfloat16", "float16")


def _inlay(name: str, file: str, transform: str, conditions: str = "") -> Entry:
    return Entry(
        name,
        "inlay",
        (name,),
        f"inlay/ops/{file}.py:{name}",
        operator=f"inlay::{name}",
        conditions=conditions,
        transform=transform,
    )


INSTALLED = (
    _inlay("rms_norm", "norm", "match_rms_norm"),
    _inlay("add_rms_norm", "norm", "fuse_add_rms_norm", "after match_rms_norm"),
    _inlay("rope", "rope", "match_rope"),
    _inlay("rope_interleaved", "rope", "match_rope_interleaved"),
    _inlay("swiglu", "gated", "match_swiglu"),
    _inlay("geglu", "gated", "match_geglu"),
    _inlay("clamped_swiglu", "gated", "match_clamped_swiglu"),
    _inlay("attention", "attention", "match_attention"),
    _inlay(
        "gated_short_conv",
        "short_conv",
        "match_gated_short_conv",
        "one kernel on a GPU alone (Triton, not timed); elsewhere the compiler sees its reference",
    ),
    Entry(
        "layer_norm",
        "aten",
        ("layer_norm",),
        "aten/src/ATen/native/layer_norm.cpp:layer_norm",
        operator="aten::layer_norm",
        transform="match_layer_norm",
    ),
    Entry(
        "linear on concatenated weights",
        "aten",
        ("shared_input_gemms",),
        "aten/src/ATen/native/Linear.cpp:linear",
        operator="aten::linear",
        conditions="weights of one dtype, put one below the other when the program is built",
        transform="fuse_gemms",
    ),
    Entry(
        "linear with an epilogue",
        "onednn",
        tuple(f"gemm+{each}" for each in _GEMM_EPILOGUES),
        f"{_MKLDNN}:_register_unary_fusion, _register_binary_fusion",
        operator="mkldnn::_linear_pointwise",
        dtypes=_REDUCED,
        conditions="CPU, weights frozen; Inductor puts it in by itself",
    ),
    Entry(
        "dynamic int8 linear with ReLU",
        "quantized",
        ("gemm+relu",),
        "aten/src/ATen/native/quantized/cpu/qlinear_dynamic.cpp:QLinearDynamicInt8",
        operator="quantized::linear_relu_dynamic",
        dtypes=("int8",),
    ),
    Entry(
        "generated pointwise and reduction kernels",
        "inductor",
        ("pointwise", "reduction"),
        "torch/_inductor/scheduler.py:Scheduler.can_fuse_vertical",
        conditions="calls over the same rows; it needs no transform, and no custom operator in between",
    ),
)

"""What we use of other people's private API. When one of these fails, the named adapter has to follow."""

from __future__ import annotations

import inspect
import os
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.models import tiny_gguf

pytestmark = pytest.mark.fast


def test_symbolic_shapes() -> None:
    """program/symbols.py: symbols are what they are called, whatever their example sizes."""
    from inlay.program import Symbol
    from inlay.program.symbols import FakeValues, is_data_dependent

    assert not is_data_dependent(3)
    fakes = FakeValues([Symbol("batch", 1, None, 4), Symbol("length", 1, 99, 4)])
    one = fakes.tensor(torch.float32, ("batch", "length", 4))
    two = fakes.tensor(torch.int64, ("length", "batch"))
    assert str(one.shape[0]) == str(two.shape[1]) != str(one.shape[1])
    assert {symbol.name for symbol in fakes.symbols.values()} == {"batch", "length"}
    assert str(fakes.tensor(torch.int64, ("2*length + 1",)).shape[0]) == f"2*{one.shape[1]} + 1"
    assert not is_data_dependent(one.shape[0])
    with fakes.activate():
        assert is_data_dependent(torch.ones(2).nonzero().shape[0])


def test_fake_parameters() -> None:
    """frontend/fake_tensors.py: the registration hook sees every new parameter, and its result is taken."""
    from inlay.frontend.fake_tensors import fake_mode_of, fake_parameters, is_fake

    with fake_parameters():
        made = torch.nn.TransformerEncoderLayer(8, 2)
        made.extra = torch.nn.Parameter(torch.ones(3))
    assert all(is_fake(parameter) for parameter in made.parameters())
    with fake_mode_of(made.linear1):
        assert made.linear1(torch.ones(5, 8)).shape == (5, 2048)
    with fake_mode_of(torch.nn.Linear(2, 2)):
        assert not is_fake(torch.ones(1))
    assert not is_fake(torch.nn.Linear(2, 2).weight)


def test_custom_operator_home() -> None:
    """program/text/literals.py: torch keeps where a custom operator was defined."""
    from inlay.program.text.literals import registering_module

    @torch.library.custom_op("inlay_test::twice", mutates_args=())
    def twice(x: torch.Tensor) -> torch.Tensor:
        return x * 2

    assert registering_module(torch.ops.inlay_test.twice.default) == __name__
    assert registering_module(torch.ops.aten.mul.Tensor) == ""


def test_guards_of_sizes() -> None:
    """frontend/guards.py: torch keeps what it assumed of sizes, and the line that asked."""
    from inlay.frontend.guards import collect_guards

    class Branches(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x * 2 if x.shape[0] // 4 == 1 else x

    dynamic = {"x": {0: torch.export.Dim.DYNAMIC}}
    exported = torch.export.export(Branches(), (torch.ones(5),), dynamic_shapes=dynamic, strict=False)
    (found,) = [each for each in collect_guards(exported.graph) if each.source]
    assert found.source.startswith("test_adapters.py:")
    assert "//4" in str(found.expression)


def test_transformers_loading() -> None:
    """frontend/huggingface/weight_conversion.py"""
    from transformers.core_model_loading import WeightConverter, rename_source_key

    assert list(inspect.signature(rename_source_key).parameters)[:5] == [
        "source_key",
        "weight_renamings",
        "weight_converters",
        "base_model_prefix",
        "meta_state_dict",
    ]
    assert {"add_tensor", "convert"} <= set(dir(WeightConverter))


def test_transformers_gguf(tmp_path: Path) -> None:
    """frontend/gguf/conversion.py: what transformers makes of a small file with the header alone."""
    from inlay.frontend.gguf.conversion import read_config
    from inlay.frontend.gguf.reader import read_header

    config = read_config(read_header(tiny_gguf(tmp_path / "tiny.gguf")))
    assert (config.num_hidden_layers, config.vocab_size, config.num_key_value_heads) == (2, 96, 2)


def test_transformers_caches() -> None:
    """frontend/huggingface/static_cache.py: what a layer of a static cache holds, and why a sliding one cannot be
    captured as it is.
    """
    from transformers import LlamaConfig
    from transformers.cache_utils import StaticCache, StaticLayer, StaticSlidingWindowLayer

    layer, rows = StaticLayer(max_cache_len=4), torch.ones(1, 2, 1, 3)
    layer.update(rows, rows)
    assert set(vars(layer)) == {
        *("keys", "values", "cumulative_length", "dtype", "device", "is_initialized", "max_cache_len"),
        *("batch_size", "num_heads", "k_head_dim", "v_head_dim"),
    }
    assert torch.equal(layer.cumulative_length, torch.tensor(1))
    assert torch.equal(layer.keys[:, :, :1], rows)
    sliding = StaticSlidingWindowLayer(max_cache_len=4, sliding_window=2)
    sliding.update(rows, rows)
    assert sliding.cumulative_length_int == 1
    assert vars(StaticCache(LlamaConfig(num_hidden_layers=1), max_cache_len=4)).keys() == {
        *("layers", "layer_class_to_replicate", "offloading"),
    }


def test_exported_program_can_be_built() -> None:
    """program/exported_program.py: an ExportedProgram can be built from its parts and saved."""
    import io

    from inlay.frontend import capture
    from tests.models import convolutions

    buffer = io.BytesIO()
    torch.export.save(capture(convolutions()).to_exported(), buffer)
    buffer.seek(0)
    again = torch.export.load(buffer).module()
    audio = torch.randn(3, 1, 40)
    assert torch.equal(again(audio), convolutions().module(audio))


def test_tracer() -> None:
    """program/tracer.py: operators made of others stay whole, in-place ones are seen."""
    from inlay.program.tracer import trace_function

    def step(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.linear(x, weight).add_(1)

    graph = trace_function(step, [torch.ones(2, 3), torch.ones(4, 3)]).graph
    aten = torch.ops.aten
    assert [node.target for node in graph.nodes if node.op == "call_function"] == [
        aten.linear.default,
        aten.add_.Tensor,
    ]


def test_in_place_graph_becomes_functional() -> None:
    """program/functionalization.py: what is written to is an output; sizes stay in the shape environment they came
    from.
    """
    from inlay.program import Symbol
    from inlay.program.functionalization import functionalize
    from inlay.program.symbols import FakeValues
    from inlay.program.tracer import trace_function

    fakes = FakeValues([Symbol("rows", 1, None, 4)])
    values = [fakes.tensor(torch.float32, ("rows", 3)), fakes.tensor(torch.float32, ("rows", 3))]

    def step(x: torch.Tensor, cache: torch.Tensor) -> tuple[torch.Tensor]:
        cache.add_(x)
        return (cache * torch.tensor([1.0, 2.0, 3.0]),)

    with fakes.activate():
        module = trace_function(step, values)
    program = functionalize(module, fakes, "piece")
    assert [(row.name, row.alias.binding if row.alias else None) for row in program.bindings.outs] == [
        ("cache_1.out", "cache_1"),
        ("output.0", None),
    ]
    assert not any(name.endswith("_") for name in (each.split(".")[1] for each in program.op_counts()))
    held = {node.meta["val"].fake_mode.shape_env for node in program.graph.nodes if node.name in ("x_1", "cache_1")}
    assert held == {fakes.mode.shape_env}
    cache = torch.ones(2, 3)
    (made,) = program.module()(torch.ones(2, 3), cache)
    assert torch.equal(made, torch.tensor([[2.0, 4.0, 6.0]] * 2))
    assert torch.equal(cache, torch.full((2, 3), 2.0))


def test_calls_made_functional_side_by_side() -> None:
    """program/functionalization.py, frontend/call_kinds.py: inputs and outputs stay in order, those nobody uses
    included.
    """
    from inlay.program import Symbol
    from inlay.program.functionalization import functionalize_to_exported
    from inlay.program.symbols import FakeValues
    from inlay.program.tracer import trace_function

    fakes = FakeValues([Symbol("rows", 1, None, 4)])
    values = [fakes.tensor(torch.float32, ("rows", 3)) for _ in range(3)]

    def step(x: torch.Tensor, unused: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return y.t().reshape(-1), x.contiguous(), x.exp(), x.view(-1)

    with fakes.activate():
        module = trace_function(step, values)
    exported = functionalize_to_exported(module, fakes)
    x, unused, y = (node for node in exported.graph.nodes if node.op == "placeholder")
    assert not unused.users
    output = next(iter(reversed(exported.graph.nodes)))
    flat, same, exponential, view = output.args[0]
    aten = torch.ops.aten
    assert (exponential.target, exponential.args, view.target) == (aten.exp.default, (x,), aten.view.default)
    assert same is x
    assert flat.target is aten._unsafe_view.default
    assert flat.args[0].target is aten.clone.default
    assert flat.args[0].all_input_nodes[0].args[0] is y
    assert list(map(str, exported.range_constraints)) == list(fakes.symbols)


def test_exported_wrappers_and_symbols() -> None:
    """frontend/call_kinds.py: the nested graph torch.export makes of `no_grad`; sizes that data decides are no `s`."""

    class Wrapped(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            with torch.no_grad():
                y = x * 2
            return y[y > 0]

    shapes = {"x": {0: torch.export.Dim.DYNAMIC}}
    graph = torch.export.export(Wrapped(), (torch.ones(3),), dynamic_shapes=shapes).graph
    called = [node for node in graph.nodes if node.target is torch.ops.higher_order.wrap_with_set_grad_enabled]
    assert [node.args[0] for node in called] == [False]
    assert called[0].args[1].op == "get_attr"
    sizes = [str(node.meta["val"].shape[0]) for node in graph.nodes if isinstance(node.meta.get("val"), torch.Tensor)]
    assert {size[0] for size in sizes} == {"s", "u"}


def test_inductor_takes_decompositions() -> None:
    """lowering/inner_backend.py"""
    from torch._inductor.compile_fx import compile_fx
    from torch._inductor.decomposition import select_decomp_table

    assert "decompositions" in inspect.signature(compile_fx).parameters
    assert torch.ops.aten.silu.default in select_decomp_table()


def test_place_among_the_passes_of_inductor() -> None:
    """integrations/post_grad.py: our pass sees which clones are gone, and decides before Inductor does."""
    from torch._inductor.fx_passes import post_grad

    source = inspect.getsource(post_grad.post_grad_passes)
    order = ["remove_noop_ops", "config.post_grad_custom_post_pass", "reinplace_inplaceable_ops", "decompose_auto_func"]
    places = [source.index(each) for each in order]
    assert places == sorted(places)


def test_wrappers_of_functionalization() -> None:
    """analysis/auto_functionalized.py: how functionalization tells a written argument in terms of its base."""
    from tools.fuzz_writes import operators  # noqa: F401
    from torch._higher_order_ops.auto_functionalize import write_view_information_to_args

    from inlay.analysis.auto_functionalized import _view

    base = torch.arange(12).reshape(3, 4).clone()
    types: list[Any] = [argument.type for argument in torch.ops.inlay_fuzz.put.default._schema.arguments[:1]]
    for given in (base, base[:], base[1:3], base[:, 1:3], base.t()[1], base.view(-1)):
        told: dict[str, object] = {"x": given}
        write_view_information_to_args(["x"], types, told, {"x": 0})
        view = _view(told, "_x")
        assert view is not None
        assert torch.equal(view.apply(base, lambda target, *args: target(*args)), given)
    missing: dict[str, object] = {"x": None}
    write_view_information_to_args(["x"], types, missing, {})
    assert _view(missing, "_x") is None


def test_what_the_compiler_tells() -> None:
    """testing/compiler.py: the names that `inlay.testing` reads counts, reasons, graphs and code by."""
    from torch._dynamo import utils
    from torch._functorch import config as functorch_config
    from torch._inductor import compile_fx, config
    from torch._inductor.graph import GraphLowering
    from torch.compiler._cache import CacheArtifactManager

    fields = utils.CompilationMetrics.__dataclass_fields__
    assert {"compile_id", "co_name", "co_filename", "co_firstlineno", "recompile_reason"} <= set(fields)
    assert utils.get_compilation_metrics.__module__ == utils.__name__
    assert utils.DEFAULT_COMPILATION_METRICS_LIMIT > 0
    called = inspect.getsource(compile_fx._InProcessFxCompile.codegen_and_compile)
    assert "_recursive_post_grad_passes(gm, is_inference=is_inference)" in called
    assert list(inspect.signature(compile_fx._recursive_post_grad_passes).parameters) == ["gm", "is_inference"]
    assert hasattr(GraphLowering, "save_output_code")
    assert hasattr(CacheArtifactManager, "with_fresh_cache")
    settings = config.fx_graph_cache, config.fallback_random, config.cpp_cache_precompile_headers
    assert all(isinstance(each, bool) for each in (*settings, functorch_config.enable_autograd_cache))


def test_what_compiled_functions_are_known_by() -> None:
    """testing/compiler.py"""
    from inlay.testing.compiler import is_compiled

    assert is_compiled(torch.compile(torch.nn.Linear(2, 2)))
    assert is_compiled(torch.compile(torch.sin))
    assert not is_compiled(torch.nn.Linear(2, 2))
    assert not is_compiled(torch.sin)


def test_libraries_are_loaded_directly() -> None:
    """lowering/aoti_runtime.py: containers of one library, user-managed constants, AMX first."""
    from torch._C import _aoti

    runner = _aoti.AOTIModelContainerRunnerCpu
    for name in (
        "run",
        "update_constant_buffer",
        "get_constant_names_to_original_fqns",
        "get_constant_names_to_dtypes",
    ):
        assert hasattr(runner, name), f"packages cannot be loaded without {name}"
    assert "user_managed: bool = False" in str(runner.update_constant_buffer.__doc__), "weights would be copied"
    assert callable(torch.cpu._init_amx), "AMX code dies with SIGILL when nobody asked for it"


def test_what_packages_ask_of_inductor() -> None:
    """lowering/aoti.py: options of AOTInductor, the scheduler's dependencies, names in the generated source."""
    from torch._inductor import config

    for name in ("always_keep_tensor_constants", "joint_graph_constant_folding", "_post_fusion_custom_pass"):
        assert hasattr(config, name), f"lowering/aoti.py sets {name}"
    assert hasattr(config.aot_inductor, "package_constants_in_so"), "libraries would hold weights"

    from inlay.lowering.aoti import build_library
    from inlay.testing import program_of

    def step(x: torch.Tensor, cache: torch.Tensor, at: torch.Tensor) -> torch.Tensor:
        cache.index_copy_(0, at, x)
        return cache.sum(0)

    program = program_of(step, [torch.ones(2, 4), torch.zeros(64, 4), torch.tensor([1, 2])])
    state = program.bindings.state[0].name
    built = build_library(program, [state])
    assert {access.state for access in built.accesses} == {state}, "the scheduler hook sees the state"
    assert any(access.writes == "32" for access in built.accesses), "two rows of four numbers"
    assert not any(access.copies or access.unknown for access in built.accesses)
    assert "AOTInductorModel::run_impl" in built.source, "the proof reads this function"


def test_parallel_reductions_do_not_run_with_more_threads_than_they_have_room_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """lowering/aoti.py: the name of the array of partial sums, and the option that fixes the number of threads."""
    import torch._inductor as inductor

    from inlay.lowering.aoti import build_library
    from inlay.testing import program_of

    kernels: list[str] = []
    real = inductor.aot_compile

    def aot_compile(*arguments: Any, options: dict[str, Any]) -> Any:
        made = real(*arguments, options=options)
        folder = Path(options["aot_inductor.output_path"]).parent
        kernels.append("".join(file.read_text() for file in folder.glob("*.kernel.cpp")))
        return made

    monkeypatch.setattr(inductor, "aot_compile", aot_compile)
    monkeypatch.setattr(os, "cpu_count", lambda: 2)
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(2)
        build_library(program_of(lambda x: (x * x).sum(), [torch.ones(1 << 16)]))
    finally:
        torch.set_num_threads(threads)
    loose, fixed = kernels
    assert "_arr[2]" in loose
    assert "#pragma omp parallel\n" in loose, "torch fixes the number itself: build_library need not compile twice"
    assert "_arr[tid]" in fixed
    assert "#pragma omp parallel num_threads(2)\n" in fixed
    assert "#pragma omp parallel\n" not in fixed


def test_registered_operators() -> None:
    """ops/catalog/operator_registry.py: torch lists every operator, and a new namespace is somebody else's."""
    from inlay.ops.catalog.operator_registry import TORCH_NAMESPACES, is_registered, operators_by_namespace

    assert all("::" in name for name in torch._C._dispatch_get_all_op_names())
    assert operators_by_namespace().keys() - TORCH_NAMESPACES >= {"inlay"}
    assert {"aten", "mkldnn", "quantized", "prims"} <= TORCH_NAMESPACES & operators_by_namespace().keys()
    assert is_registered("mkldnn::_linear_pointwise")


def test_triton_without_a_gpu() -> None:
    """testing/triton.py"""
    compiler = pytest.importorskip("triton.compiler")
    from triton.backends.compiler import GPUTarget

    assert {"fn", "signature", "constexprs"} <= set(inspect.signature(compiler.ASTSource.__init__).parameters)
    assert GPUTarget("cuda", 80, 32).arch == 80


def test_structured_trace() -> None:
    """transforms/structured_trace.py: the handler knows the folder of the trace; how an artifact is written."""
    from torch._logging import _internal

    from inlay.transforms.structured_trace import emit

    parameters = inspect.signature(_internal.trace_structured).parameters
    assert {"name", "metadata_fn", "payload_fn", "expect_trace_id"} <= set(parameters)
    assert hasattr(_internal.LOG_TRACE_HANDLER, "root_dir")
    emit("inlay_test", "text")  # without TORCH_TRACE nothing happens


def test_backends_by_name_and_tracing_contexts() -> None:
    """lowering/inner_backend.py finds a backend by its name; rewrite/pattern_trees.py traces patterns outside of
    Dynamo's context.
    """
    from torch._dynamo import lookup_backend
    from torch._guards import TracingContext, tracing

    assert callable(lookup_backend("aot_eager"))
    with tracing(None):
        assert TracingContext.try_get() is None

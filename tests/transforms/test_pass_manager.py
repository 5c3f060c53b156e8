"""Registry, configuration, pipeline, contracts, dumps."""

from __future__ import annotations

import json
import operator
from importlib import resources
from importlib.metadata import EntryPoint
from typing import TYPE_CHECKING, Any

import pytest
import torch

from inlay.config import resolve_config
from inlay.config.layers import find_overlays
from inlay.errors import ContractError, TransformError, UsageError
from inlay.frontend import Example, capture
from inlay.insight import explain
from inlay.insight.verify import Change, NumericsCheck
from inlay.program.text.printer import dump
from inlay.rewrite import Match, Rule
from inlay.testing import assert_rewrites, program_of
from inlay.transforms import Numerics, Stage, Transform, TransformResult, base, configure, run, steps_through
from inlay.transforms.base import transform
from inlay.transforms.instruments import Dump
from inlay.transforms.lock import lock_model
from inlay.transforms.pass_manager import TransformStep, expected_count

if TYPE_CHECKING:
    from pathlib import Path

    from inlay.program import Program
    from inlay.transforms import TransformRecord

pytestmark = pytest.mark.fast


def _model(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    total = x + x.tanh()
    return weight * (total * torch.rsqrt(total.pow(2).mean(-1, keepdim=True) + 1e-6))


@pytest.fixture(scope="module")
def program() -> Program:
    return program_of(_model, [torch.randn(2, 3, 8), torch.rand(8)])


class Half(Transform):
    """Breaks half-way."""

    name, stage, numerics = "half", Stage.CLEAN, Numerics.EXACT

    def apply(self, program: Program) -> TransformResult:
        for count, node in enumerate(program.graph.nodes):
            if node.op == "call_function":
                node.target = torch.ops.aten.relu.default
            if count == 4:
                raise ValueError("out of luck")
        raise AssertionError


class NoTypes(Transform):
    """Forgets the type of what it makes."""

    name, stage, numerics = "no_types", Stage.CLEAN, Numerics.EXACT

    def apply(self, program: Program) -> TransformResult:
        output = next(iter(reversed(program.graph.nodes)))
        with program.graph.inserting_before(output):
            program.graph.call_function(torch.ops.aten.relu.default, (output.all_input_nodes[0],))
        return TransformResult(program, 1)


def test_an_error_leaves_the_program_as_it_was(program: Program) -> None:
    before = dump(program)
    steps = [*configure(resolve_config())[::2][:2], TransformStep("half", Half())]
    with pytest.raises(
        TransformError, match=r"half after clean_noops, match_layer_norm failed: ValueError: out of luck"
    ):
        run(program, steps)
    assert dump(program) == before


def test_types_are_checked(program: Program) -> None:
    with pytest.raises(TransformError, match="has no type"):
        run(program, [TransformStep("no_types", NoTypes())])


def test_records(program: Program) -> None:
    result, records = run(program, configure(resolve_config(settings=["match_rope.enabled=false"])))
    by_key = {record.key: record for record in records}
    assert by_key["match_rms_norm"].sites == 1
    assert by_key["fuse_add_rms_norm"].sites == 1
    assert by_key["match_rope"].summary == "match_rope: [SUMMARY] disabled"
    assert "[SUMMARY] matches=1 " in by_key["match_rms_norm"].summary
    assert json.loads(json.dumps(by_key["match_rms_norm"].to_json()))["matches"] == 1
    assert result.op_counts()["inlay.add_rms_norm.default"] == 1


def test_dumps(program: Program, tmp_path: Path) -> None:
    folder = tmp_path / "dumps"
    run(program, configure(resolve_config(settings=["match_rope.enabled=false"])), [Dump(folder)])
    names = {file.name for file in folder.iterdir()}
    assert {"000_capture_program.py", "001_canonicalize_match_rms_norm.py", "002_fuse_fuse_add_rms_norm.py"} <= names
    index = {entry["transform"]: entry for entry in json.loads((folder / "index.json").read_text())}
    assert index["match_rope"]["why"] == "enabled: false"
    assert index["clean_noops"]["why"] == "no node starts a match"
    assert index["match_swiglu"] == {
        "transform": "match_swiglu",
        "stage": "canonicalize",
        "status": "skipped",
        "why": "the program has no aten.silu.default",
    }


def test_dump_leaves_files_of_others_alone(program: Program, tmp_path: Path) -> None:
    precious = tmp_path / "000_capture_program.py"
    precious.write_text("mine")
    other = tmp_path / "notes.txt"
    other.write_text("mine too")
    with pytest.raises(Exception, match="is not an Inlay dump"):
        run(program, configure(resolve_config()), [Dump(tmp_path)])
    assert precious.read_text() == "mine"
    assert other.read_text() == "mine too"


def _other_norm(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return weight * (x * torch.rsqrt(x.pow(2).sum(-1, keepdim=True) + 1e-6))


def test_anchor_without_a_match_is_an_error_with_the_nearest_miss() -> None:
    written_differently = program_of(_other_norm, [torch.randn(2, 3, 8), torch.rand(8)])
    with pytest.raises(ContractError) as error:
        run(written_differently, configure(resolve_config()))
    text = str(error.value)
    assert "match_rms_norm matched nothing although the program has aten.rsqrt.default" in text
    assert "aten.mean.dim expected, aten.sum.dim_IntList found" in text
    allowed = resolve_config(settings=["match_rms_norm.expect=any", "match_rms_norm.reason=other norm"])
    run(written_differently, configure(allowed))


def test_a_lost_match_that_costs_only_speed(program: Program) -> None:
    """A build notes it. A stated number must hold, and a cache must be there."""
    written_differently = program_of(_other_norm, [torch.randn(2, 3, 8), torch.rand(8)])
    _, records = run(written_differently, configure(resolve_config()), optional_matches=True)
    (note,) = next(each.notes for each in records if each.key == "match_rms_norm")
    assert "matched nothing although the program has aten.rsqrt.default" in note.reason
    assert "The result is correct, but slower." in note.reason
    with pytest.raises(ContractError, match="matched 0 sites, expected 1"):
        run(written_differently, configure(resolve_config(settings=["match_rms_norm.expect=1"])), optional_matches=True)
    attention = torch.nn.functional.scaled_dot_product_attention
    not_causal = program_of(lambda x: attention(x, x, x), [torch.randn(1, 2, 5, 4)])
    cached = resolve_config(settings=["insert_kv_cache.enabled=true"])
    with pytest.raises(ContractError, match="insert_kv_cache matched nothing"):
        run(not_causal, configure(cached), optional_matches=True)


def _silu_by_hand(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return x * torch.sigmoid(x) * y


def _norm_by_root(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return weight * (x / torch.sqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6))


def _one(program: Program, name: str, *settings: str) -> TransformRecord:
    steps = steps_through(name, configure(resolve_config(settings=[f"{name}.{each}" for each in settings])))
    return run(program, steps[-1:])[1][0]


def test_skipped_says_what_the_program_lacks() -> None:
    record = _one(program_of(_silu_by_hand, [torch.randn(2, 8)] * 2), "match_swiglu")
    assert (record.status, record.sites, record.was_applied) == ("skipped", 0, True)
    assert record.summary == "match_swiglu: [SUMMARY] skipped (the program has no aten.silu.default)"
    assert record.to_json()["skip_reason"] == "the program has no aten.silu.default"
    norm = _one(program_of(torch.relu, [torch.ones(2)]), "fuse_add_rms_norm")  # has no pattern: its anchors decide
    assert norm.skip_reason == "the program has no inlay.rms_norm.default"
    assert _one(program_of(torch.abs, [torch.ones(2, dtype=torch.int64)]), "match_swiglu").skip_reason == (
        "the program has no floating-point values"
    )


def test_a_zero_that_matters_is_not_skipped(program: Program) -> None:
    """A contract that is not met, an anchor, a miss, and a transform that needs nothing in particular."""
    by_hand = program_of(_silu_by_hand, [torch.randn(2, 8)] * 2)
    with pytest.raises(ContractError, match="matched 0 sites, expected 1"):
        _one(by_hand, "match_swiglu", "expect=1")
    there = program_of(torch.nn.functional.silu, [torch.randn(2, 8)])  # an anchor, and no multiplication at all
    assert _one(there, "match_swiglu", "expect=any", "reason=any").status == "ran"
    written_differently = program_of(_other_norm, [torch.randn(2, 3, 8), torch.rand(8)])
    record = _one(written_differently, "match_rms_norm", "expect=any", "reason=other norm")
    assert record.status == "ran"
    assert record.misses
    assert _one(program, "clean_noops").status == "ran"


def test_a_skipped_transform_is_locked_verified_and_explained() -> None:
    by_root = program_of(_norm_by_root, [torch.randn(2, 8), torch.rand(8)])
    resolved = resolve_config()
    seen = NumericsCheck({"match_rms_norm": 1}, rounds=1)
    _, records = run(by_root, configure(resolved), [seen])
    skipped = {record.key for record in records if record.status == "skipped"}
    assert "match_rms_norm" in skipped
    assert skipped <= set(lock_model("by root", by_root, resolved, records).transforms)
    (lost,) = seen.verdicts
    assert (lost.transform, lost.change) == ("match_rms_norm", Change.MATCH_LOSS)
    (explained,) = explain(by_root, configure(resolved), "match_rms_norm")
    assert explained.status == "skipped"
    assert "aten.rsqrt.default expected, aten.sqrt.default found" in explained.findings[0].text


def test_stated_counts(program: Program) -> None:
    run(program, configure(resolve_config(settings=["match_rms_norm.expect=1"])))
    with pytest.raises(ContractError, match="matched 1 sites, expected 2"):
        run(program, configure(resolve_config(settings=["match_rms_norm.expect=2"])))


def test_expressions_of_facts() -> None:
    from dataclasses import replace

    from inlay.program import Fact, Facts

    made = replace(program_of(torch.relu, [torch.ones(2)]), facts=Facts(layers=Fact(30, "config")))
    assert expected_count("2 * layers + 1", made) == 61
    with pytest.raises(UsageError, match="Did you mean layers"):
        expected_count("2 * layer", made)
    for bad in ("__import__('os')", "layers ** 9", "1 +", "layers.real"):
        with pytest.raises(UsageError):
            expected_count(bad, made)


@pytest.mark.parametrize(
    ("settings", "text", "sentence"),
    [
        (["match_rop.enabled=false"], "", "Did you mean match_rope"),
        (["match_rope.enabed=false"], "", "Did you mean enabled"),
        (["match_rope.enabled=maybe"], "", "match_rope.enabled (from --set match_rope.enabled=maybe)"),
        (["nonsense"], "", "is not a setting"),
        (["match_rope.expect=any", "match_rope.reason=''"], "", "`expect: any` needs a reason"),
        ([], "transforms: {fuse_norn: {}}", "There is no transform fuse_norn"),
        ([], "transform: {}", "Did you mean transforms"),
        ([], "transforms: [", "is not YAML"),
        ([], "transforms: 3", "transforms"),
        ([], "aliases: {match_rope: match_swiglu}", "match_rope is a configured transform and cannot be an alias of"),
        ([], "aliases: {match_rope#2: match_swiglu}", "match_rope#2 is a configured transform and cannot be an alias"),
        (
            [],
            "aliases: {gate: match_swiglo}",
            "alias gate stands for match_swiglo, but there is no such transform. Did",
        ),
        ([], "aliases: {gate: zzz#2}", "stands for zzz#2, but there is no such transform. `inlay passes` lists them."),
        ([], "aliases: {one: two, two: one}", "The aliases form a cycle: one → two → one."),
        ([], "aliases: {one: one}", "The aliases form a cycle: one → one."),
        ([], "aliases: {one: 'one#2'}", "The aliases form a cycle: one → one#2"),
        (["one.enabled=false"], "aliases: {one: two, two: 'one#2'}", "The aliases form a cycle: one → two → one#2"),
    ],
)
def test_mistakes_in_the_configuration(settings: list[str], text: str, sentence: str, tmp_path: Path) -> None:
    file = tmp_path / "mine.yaml"
    file.write_text(text)
    with pytest.raises(UsageError) as error:
        configure(resolve_config(files=[file], settings=settings))
    assert sentence in str(error.value)
    assert "\n" not in str(error.value)


def test_layers_and_their_origin(tmp_path: Path) -> None:
    file = tmp_path / "mine.yaml"
    file.write_text("transforms: {match_rope: {enabled: false}, 'clean_noops#2': {enabled: true}}")
    resolved = resolve_config(files=[file], settings=["match_rope.enabled=true"])
    options: dict[str, Any] = {entry.key: entry.options for entry in resolved.entries}
    assert options["match_rope"]["enabled"].origin == "--set match_rope.enabled=true"
    assert options["match_rope"]["expect"].origin == "default.yaml"
    steps = configure(resolved)
    assert [step.key for step in steps if step.transform.name == "clean_noops"] == ["clean_noops", "clean_noops#2"]


def test_another_name_of_a_transform(tmp_path: Path) -> None:
    file = tmp_path / "mine.yaml"
    file.write_text("transforms: {fuse_norm: {enabled: false}}")
    for resolved in (resolve_config(files=[file]), resolve_config(settings=["fuse_norm.enabled=false"])):
        steps = {step.key: step.transform for step in configure(resolved)}
        assert "fuse_norm" not in steps
        assert not steps["fuse_add_rms_norm"].options.enabled
    assert [entry.key for entry in resolve_config(files=[file]).entries] == [
        entry.key for entry in resolve_config().entries
    ]


def test_an_alias_names_a_step(tmp_path: Path) -> None:
    steps = configure(resolve_config())
    assert [step.key for step in steps_through("fuse_norm", steps)][-1] == "fuse_add_rms_norm"
    file = tmp_path / "mine.yaml"
    file.write_text("aliases: {gate: match_swiglu}\ntransforms: {gate: {enabled: false}}")
    *_, last = steps_through("gate", configure(resolve_config(files=[file])))
    assert (last.key, last.aliases, last.transform.options.enabled) == ("match_swiglu", ("gate",), True)
    with pytest.raises(UsageError, match="There is no transform gate"):
        steps_through("gate", steps)


@pytest.mark.parametrize(
    ("name", "key"),
    [("mine", "fuse_add_rms_norm"), ("fuse_norm#2", "fuse_add_rms_norm#2"), ("mine#2", "fuse_add_rms_norm#2")],
)
def test_an_alias_is_resolved_to_the_end(name: str, key: str, tmp_path: Path) -> None:
    """An alias of an alias, and `alias#2`, name the same step in files, settings and commands."""
    aliases, off = tmp_path / "aliases.yaml", tmp_path / "off.yaml"
    aliases.write_text("aliases: {mine: fuse_norm}\ntransforms: {fuse_add_rms_norm#2: {}}")
    off.write_text(f"transforms: {{'{name}': {{enabled: false}}}}")
    expected = {step.key for step in configure(resolve_config())} | {"fuse_add_rms_norm#2"}
    for resolved in (
        resolve_config(files=[aliases, off]),
        resolve_config(files=[aliases], settings=[f"{name}.enabled=false"]),
    ):
        steps = configure(resolved)
        assert {step.key for step in steps} == expected
        uses = [step for step in steps if step.key.startswith("fuse_add")]
        assert [step.key for step in uses if not step.transform.options.enabled] == [key]
        assert steps_through(name, steps)[-1].key == key


def test_an_alias_of_a_second_use(tmp_path: Path) -> None:
    file = tmp_path / "mine.yaml"
    file.write_text("aliases: {again: 'clean_noops#2'}\ntransforms: {again: {}, 'again#3': {}}")
    steps = configure(resolve_config(files=[file]))
    keys = [step.key for step in steps if step.transform.name == "clean_noops"]
    assert keys == ["clean_noops", "clean_noops#2", "clean_noops#3"]
    assert steps_through("again", steps)[-1].key == "clean_noops#2"


def test_overlays_that_use_an_alias(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "models").mkdir()
    default = resources.files("inlay.config").joinpath("default.yaml").read_text()
    (tmp_path / "default.yaml").write_text(default)
    overlay = "match: {model: [mine]}\naliases: {gate: match_swiglu}\n"
    overlay += "transforms: {'fuse_norm#2': {expect: 1}, gate: {expect: 2}}"
    (tmp_path / "models" / "mine.yaml").write_text(overlay)
    monkeypatch.setattr(resources, "files", lambda _: tmp_path)
    assert find_overlays("fuse_add_rms_norm") == {"models/mine.yaml": {"expect": 1}}
    assert find_overlays("match_swiglu") == {"models/mine.yaml": {"expect": 2}}
    assert find_overlays("match_rope") == {}


def test_a_transform_is_not_registered_under_an_alias(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """It would never run: the configuration reads the name as the alias."""
    monkeypatch.setattr(base, "_REGISTRY", dict(base.registry()))
    with pytest.raises(UsageError, match="fuse_norm is an alias of fuse_add_rms_norm and cannot be the name of Half"):
        transform("fuse_norm", stage=Stage.CLEAN, numerics=Numerics.EXACT)(Half)
    assert "fuse_norm" not in base.registry()
    transform("half", stage=Stage.CLEAN, numerics=Numerics.EXACT)(Half)
    file = tmp_path / "mine.yaml"
    file.write_text("transforms: {half: {}}")
    assert "half" in [step.key for step in configure(resolve_config(files=[file]))]
    file.write_text("aliases: {half: match_swiglu}")
    with pytest.raises(UsageError, match="half is a transform and cannot be an alias of match_swiglu"):
        configure(resolve_config(files=[file]))


def test_only_the_last_row_of_an_output() -> None:
    def head(x: torch.Tensor, weight: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"hidden": x.relu(), "scores": torch.nn.functional.linear(x.relu(), weight).tanh()}

    before = program_of(head, [torch.randn(2, 5, 8), torch.randn(4, 8)])
    settings = ["gather_last_logits.output=scores"]
    after, records = run(before, configure(resolve_config(settings=settings)))
    assert {record.key: record.sites for record in records}["gather_last_logits"] == 1
    assert after.bindings["scores"].shape == (2, 1, 4)
    x, weight = torch.randn(2, 5, 8), torch.randn(4, 8)
    one, two = before.module()(x, weight), after.module()(x, weight)
    torch.testing.assert_close(two["scores"], one["scores"][:, -1:])
    assert torch.equal(two["hidden"], one["hidden"])
    text = dump(after)
    assert text.index("aten.slice") < text.index("aten.linear")
    with pytest.raises(TransformError, match="no output score\\. "):
        run(before, configure(resolve_config(settings=["gather_last_logits.output=score"])))


def test_a_broken_package_is_named_and_the_others_load(monkeypatch: pytest.MonkeyPatch) -> None:
    broken = EntryPoint("mine", "no_such_module_of_mine", "inlay.transforms")
    monkeypatch.setattr(base, "entry_points", lambda group: [broken])
    base._load.cache_clear()
    with pytest.warns(
        UserWarning, match="The transforms of no_such_module_of_mine .* cannot be loaded: ModuleNotFound"
    ):
        assert "match_rope" in base.registry()
    base._load.cache_clear()


def test_a_setting_enables_a_transform_that_no_file_names(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(base._REGISTRY, "half", Half)
    assert "half" in [step.key for step in configure(resolve_config(settings=["half.enabled=true"]))]
    with pytest.raises(UsageError, match="has no transform half"):
        resolve_config(settings=["half.enabled=false"])
    with pytest.raises(UsageError, match="Did you mean match_rope"):
        configure(resolve_config(settings=["match_rop.enabled=true"]))


def test_nodes_do_not_count_getitem(program: Program) -> None:
    """A fused norm has two results, each read by a getitem."""
    result, records = run(program, configure(resolve_config()))
    before, after = next(record.nodes for record in records if record.key == "fuse_add_rms_norm")
    assert any(node.target is operator.getitem for node in result.graph.nodes)
    assert after < before


class _Same(Rule):
    name = "same"

    def examples(self, dtype: torch.dtype) -> dict[str, Any]:
        one = torch.ones(3, dtype=dtype)
        return {"x": one, "y": one}

    def pattern(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return x.relu() * y


def test_mistakes_of_authors_are_sentences() -> None:
    module = torch.nn.ReLU()
    exported = torch.export.export(module, (torch.ones(3),))
    with pytest.raises(UsageError, match=r"ReLU cannot be captured\. Use Example\(module, args\)"):
        capture(module)  # type: ignore[arg-type]
    for each in (exported, Example(exported.module(), (torch.ones(3),))):
        assert capture(each).op_counts() == {"aten.relu.default": 1}
    with pytest.raises(UsageError, match="x and y of its examples are the same tensor"):
        list(_Same().alternatives({torch.float32}))
    silu = torch.nn.functional.silu
    with pytest.raises(AssertionError, match=r"0 sites instead of 1: extra node: neg .* stands in between"):
        assert_rewrites(lambda g, u: silu(g).neg() * u, "match_swiglu", args=[torch.ones(3)] * 2, sites=1)
    node = next(node for node in exported.graph.nodes if node.op == "call_function")
    with pytest.raises(UsageError, match=r"no argument wieght. Did you mean weight\?"):
        Match.at(node, weight=node).value("wieght")

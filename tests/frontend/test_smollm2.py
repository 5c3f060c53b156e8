"""SmolLM2-135M with its real weights, from the GGUF file as people have it."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import TYPE_CHECKING, Any

import pytest
import torch

from inlay.program.fold import fold
from inlay.program.text.folded_printer import dump_folded
from inlay.program.text.printer import dump

if TYPE_CHECKING:
    from pathlib import Path

    from inlay.program import Program


def test_folded_form_fits_a_screen(smollm2_program: Program) -> None:
    lines = dump_folded(smollm2_program).splitlines()
    assert len(lines) <= 60
    assert max(map(len, lines)) <= 120
    assert sum("× 30" in line for line in lines) == 2, "the block and the loop over it"


def test_facts(smollm2_program: Program) -> None:
    known = {name: fact.value for name, fact in smollm2_program.facts.items()}
    assert known == {
        "layers": 30,
        "heads": 9,
        "kv_heads": 3,
        "head_size": 64,
        "hidden_size": 576,
        "vocabulary": 49152,
        "max_length": 8192,
    }
    assert [len(kind) for kind in fold(smollm2_program).kinds] == [30]


def test_transforms(smollm2_program: Program) -> None:
    from inlay.config import resolve_config
    from inlay.transforms import configure, run

    program, records = run(smollm2_program, configure(resolve_config()))
    sites = {record.key: record.sites for record in records}
    assert sites["match_rms_norm"] == 61
    assert sites["fuse_add_rms_norm"] == 60
    assert sites["match_attention"] == 30
    assert sites["match_rope"] == 60, "30 pairs of query and key"
    assert sites["match_swiglu"] == 30
    for node in program.graph.nodes:
        if node.target is torch.ops.inlay.attention.default:
            query, key, value = (operand.meta["val"] for operand in node.args[:3])
            assert (query.shape[1], key.shape[1], value.shape[1]) == (9, 3, 3), "heads are grouped, not repeated"
            assert node.args[3] is None, "the mask is the causal flag"
            assert node.args[5] is True
    ids = torch.tensor([[504, 3575, 282, 4649, 314, 7042, 30]])
    with torch.no_grad():
        before, after = (each.module()(input_ids=ids)["logits"] for each in (smollm2_program, program))
    torch.testing.assert_close(after, before, rtol=0, atol=1e-4)


def test_what_a_transform_changes_fits_a_screen(smollm2_program: Program) -> None:
    from tests.show_pass_checks import check_each_pass

    fused = check_each_pass(smollm2_program)["fuse_add_rms_norm"]
    assert sum("× 29" in line for line in fused) >= 2


def test_full_form_is_complete(smollm2_program: Program) -> None:
    text = dump(smollm2_program)
    calls = sum(node.op == "call_function" for node in smollm2_program.graph.nodes)
    assert sum(" = aten." in line or " = operator." in line for line in text.splitlines()) == calls


def test_copy_is_cheap(smollm2_program: Program) -> None:
    copied = smollm2_program.copy()
    assert copied.tensors is smollm2_program.tensors
    pairs = zip(copied.graph.nodes, smollm2_program.graph.nodes, strict=True)
    assert all(one.meta.get("val") is two.meta.get("val") for one, two in pairs), "no value is computed again"
    assert dump(copied) == dump(smollm2_program)


@pytest.mark.nightly
def test_numbers(smollm2_program: Program, smollm2: Path) -> None:
    from transformers import AutoModelForCausalLM

    eager = AutoModelForCausalLM.from_pretrained(smollm2.parent, gguf_file=smollm2.name, dtype=torch.float32).eval()
    ids = torch.tensor([[504, 3575, 282, 4649, 314, 7042, 30]])
    with torch.no_grad():
        expected = eager(ids, use_cache=False).logits
        actual = smollm2_program.module()(input_ids=ids)["logits"]
        space: dict[str, Any] = {}
        exec(compile(dump_folded(smollm2_program), "folded.py", "exec"), space)
        (folded,) = space["forward"](eager, ids)
    assert torch.equal(folded, expected), "the folded text computes the model bit for bit"
    torch.testing.assert_close(actual, expected, rtol=0, atol=1e-4)


def test_tokenizer(smollm2_tokenizer: Any) -> None:
    ids = smollm2_tokenizer("The capital of France is")["input_ids"]
    assert smollm2_tokenizer.decode(ids) == "The capital of France is"


SEVENTY = """
import json, resource, sys, time
from inlay.frontend import capture
from inlay.program.fold import fold
from inlay.program.text.folded_printer import dump_folded
from inlay.program.text.printer import dump
start = time.perf_counter()
program = capture(sys.argv[1])
captured = time.perf_counter()
folds = fold(program)
text, folded = dump(program), dump_folded(program, folds=folds)
print(json.dumps({
    "parameters": program.parameter_count(), "folds": [len(kind) for kind in folds.kinds],
    "capture_s": captured - start, "fold_and_dump_s": time.perf_counter() - captured,
    "lines": [len(text.splitlines()), len(folded.splitlines())],
    "gib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20,
}))
"""


@pytest.mark.nightly
def test_seventy_billion_parameters_without_weights(tmp_path: Path) -> None:
    from tests.models import SEVENTY_BILLION, config_folder

    folder = config_folder(tmp_path, **SEVENTY_BILLION)
    run = subprocess.run([sys.executable, "-c", SEVENTY, str(folder)], capture_output=True, text=True, check=True)
    figures = json.loads(run.stdout.splitlines()[-1])
    print(figures)
    assert figures["parameters"] > 70e9
    assert figures["folds"] == [80]
    assert figures["gib"] <= 2
    assert figures["lines"][1] <= 80

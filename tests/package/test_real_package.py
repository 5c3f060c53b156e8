"""The real model, end to end: GGUF file → package → new process → the tokens transformers gives, nothing copied."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest
import torch
from typer.testing import CliRunner

from inlay.cli.main import app
from package.packages import in_new_process

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.xdist_group("smollm2")
PROMPT = "The three most important inventions of the nineteenth century were"
GENERATE = """
import json, sys, inlay
made = inlay.load(sys.argv[1]).generate(sys.argv[2], max_tokens=64, raw=True)
heavy = [name for name in sys.modules if name.startswith(("torch._inductor", "transformers"))]
print(json.dumps([list(made.tokens), heavy]))
"""


@pytest.fixture(scope="session")
def smollm2_package(smollm2: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("smollm2") / "package"
    command = ["build", str(smollm2), "-o", str(path), "--max-length", "256", "--json"]
    built = CliRunner().invoke(app, command)
    assert built.exit_code == 0, built.output
    summary = json.loads(built.stdout)
    sites = {each["key"]: each["matches"] for each in summary["transforms"]}
    assert (sites["match_attention"], sites["insert_kv_cache"], sites["fuse_add_rms_norm"]) == (30, 30, 60)
    assert [piece["steps"] for piece in summary["pieces"]] == [1, 30, 1, 1, 30, 1]
    return path


def test_same_tokens_as_transformers(smollm2: Path, smollm2_package: Path, smollm2_tokenizer: Any) -> None:
    from transformers import AutoModelForCausalLM

    answer = in_new_process(GENERATE, smollm2_package, PROMPT)
    tokens, heavy = json.loads(answer.stdout)
    assert heavy == []
    assert len(tokens) == 64
    model = AutoModelForCausalLM.from_pretrained(smollm2.parent, gguf_file=smollm2.name, dtype=torch.float32)
    ids = smollm2_tokenizer(PROMPT, return_tensors="pt").input_ids
    with torch.no_grad():
        expected = model.generate(ids, max_new_tokens=64, do_sample=False)[0, ids.shape[1] :]
    assert tokens == expected.tolist()


def test_nothing_is_copied(smollm2_package: Path) -> None:
    shown = CliRunner().invoke(app, ["prove", str(smollm2_package), "--json"])
    assert shown.exit_code == 0, shown.output
    rows = json.loads(shown.stdout)["bindings"]
    assert len(rows) == 60
    assert {row["bytes_copied"] for row in rows} == {0}
    assert {row["bytes_written"] for row in rows} == {3 * 64 * 4}


def test_the_command_line(smollm2_package: Path) -> None:
    runner = CliRunner()
    answer = runner.invoke(app, ["run", str(smollm2_package), "What is the capital of France?", "--max-tokens", "24"])
    assert answer.exit_code == 0, answer.output
    assert "Paris" in answer.stdout
    assert "tokens/s, first token after" in answer.stderr.splitlines()[-1]
    about = runner.invoke(app, ["inspect", str(smollm2_package), "--verify"])
    assert about.exit_code == 0, about.output
    assert "keys.0 … values.29 (× 60)" in about.stdout

"""The real model, end to end: GGUF file → package → new process → the tokens transformers gives, nothing copied.

In float32 the tokens are the same. As stored (four bits, the default) activations become bytes in linear
layers and the cache is bfloat16: there the loss on a text is compared.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest
import torch
from typer.testing import CliRunner

import inlay
from inlay.cli.main import app
from inlay.package.loader import load_package
from inlay.runtime.session import Session
from tests.small_packages import in_new_process

if TYPE_CHECKING:
    from pathlib import Path

PROMPT = "The three most important inventions of the nineteenth century were"
GENERATE = """
import json, sys, inlay
made = inlay.load(sys.argv[1]).generate(sys.argv[2], max_tokens=64, raw=True)
heavy = [name for name in sys.modules if name.startswith(("torch._inductor", "transformers"))]
print(json.dumps([list(made.tokens), heavy]))
"""


def _built(model: Path, path: Path, *more: str) -> dict[str, Any]:
    built = CliRunner().invoke(app, ["build", str(model), "-o", str(path), "--max-length", "256", "--json", *more])
    assert built.exit_code == 0, built.output
    summary: dict[str, Any] = json.loads(built.stdout)
    sites = {each["key"]: each["matches"] for each in summary["transforms"]}
    assert (sites["match_attention"], sites["insert_kv_cache"], sites["fuse_add_rms_norm"]) == (30, 30, 60)
    assert sites["fuse_gemms"] == 60
    return summary


@pytest.fixture(scope="session")
def smollm2_package(smollm2: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Weights as stored, which is the default, and code for all sizes only."""
    path = tmp_path_factory.mktemp("smollm2") / "package"
    summary = _built(smollm2, path, "--buckets", "none")
    assert [piece["steps"] for piece in summary["pieces"]] == [1, 30, 1]
    assert summary["weights_bytes"] < smollm2.stat().st_size
    return path


@pytest.fixture(scope="session")
def exact_package(smollm2: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("smollm2") / "float32"
    _built(smollm2, path, "--weights", "float32", "--buckets", "none")
    return path


@pytest.fixture(scope="session")
def eager(smollm2: Path) -> Any:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(smollm2.parent, gguf_file=smollm2.name, dtype=torch.float32)


@pytest.mark.nightly
def test_same_tokens_as_transformers(exact_package: Path, eager: Any, smollm2_tokenizer: Any) -> None:
    answer = in_new_process(GENERATE, exact_package, PROMPT)
    tokens, heavy = json.loads(answer.stdout)
    assert heavy == []
    assert len(tokens) == 64
    ids = smollm2_tokenizer(PROMPT, return_tensors="pt").input_ids
    with torch.no_grad():
        expected = eager.generate(ids, max_new_tokens=64, do_sample=False)[0, ids.shape[1] :]
    assert tokens == expected.tolist()


def test_as_good_as_stored(smollm2_package: Path, eager: Any, smollm2_tokenizer: Any) -> None:
    """A small gate; docs/benchmarks.md has the whole text. One token at a time, and all at once."""
    ids = smollm2_tokenizer(json.__doc__, return_tensors="pt").input_ids[:, :200]
    with torch.no_grad():
        wanted = eager(ids).logits[0]
    session = Session(load_package(smollm2_package))
    found = torch.cat([session.advance(ids[:, place : place + 1]) for place in range(ids.shape[1])])
    losses = [torch.nn.functional.cross_entropy(each[:-1], ids[0, 1:]).item() for each in (wanted, found)]
    assert abs(losses[1] / losses[0] - 1) < 0.01, losses
    session.restart()
    assert torch.equal(session.advance(ids).argmax(-1), found[-1:].argmax(-1))


@pytest.mark.nightly
def test_a_bucket_for_decode(smollm2: Path, smollm2_package: Path, tmp_path: Path) -> None:
    """The default has code of its own for one token."""
    summary = _built(smollm2, tmp_path / "package")
    assert [piece["steps"] for piece in summary["pieces"]] == [1, 30, 1, 1, 30, 1]
    made = [
        inlay.load(path).generate(PROMPT, max_tokens=32, raw=True).tokens
        for path in (smollm2_package, tmp_path / "package")
    ]
    assert made[0][:8] == made[1][:8]


def test_nothing_is_copied(smollm2_package: Path) -> None:
    shown = CliRunner().invoke(app, ["prove", str(smollm2_package), "--json"])
    assert shown.exit_code == 0, shown.output
    rows = json.loads(shown.stdout)["states"]
    assert len(rows) == 60
    assert {row["bytes_copied"] for row in rows} == {0}
    assert {row["bytes_written"] for row in rows} == {3 * 64 * 2}  # a row of three heads in bfloat16


def test_the_command_line(smollm2_package: Path) -> None:
    runner = CliRunner()
    question = "What is the capital of France?"
    answer = runner.invoke(app, ["run", str(smollm2_package), question, "--max-tokens", "24"])
    assert answer.exit_code == 0, answer.output
    assert answer.stdout.strip() == inlay.load(smollm2_package).generate(question, max_tokens=24).text.strip() != ""
    assert "tokens/s, first token after" in answer.stderr.splitlines()[-1]
    about = runner.invoke(app, ["inspect", str(smollm2_package), "--verify"])
    assert about.exit_code == 0, about.output
    assert "keys.0 … values.29 (× 60)" in about.stdout

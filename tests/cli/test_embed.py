"""`inlay embed`, on a small text encoder that runs eagerly in place of a package."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest
import torch
import typer
from typer.testing import CliRunner

import inlay
from inlay.cli import console, model_options
from inlay.cli.console import Command
from inlay.cli.embed import embed
from inlay.flow import compile_model
from inlay.frontend import open_model
from inlay.runtime.encoder import Encoder
from tests.encoders import encoder_folder, random_encoder

if TYPE_CHECKING:
    from pathlib import Path

    from typer.testing import Result

app = typer.Typer(rich_markup_mode="rich")
app.command(cls=Command)(embed)
TEXTS = ["the quick fox", "paris", "a city"]


@pytest.fixture(scope="module")
def encoder(tmp_path_factory: pytest.TempPathFactory) -> Encoder:
    source = open_model(str(encoder_folder(tmp_path_factory.mktemp("encoder"), random_encoder("distilbert"))))
    assert source.encoder is not None
    assert source.load_tokenizer is not None
    tokenizer = source.load_tokenizer().backend_tokenizer
    return Encoder(compile_model(source, "eager"), source.encoder, tokenizer)


@pytest.fixture(autouse=True)
def _loaded(encoder: Encoder, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(inlay, "load_encoder", lambda path: encoder, raising=False)
    monkeypatch.setattr(model_options, "ensure_package", lambda target: target)


def _run(*arguments: str, code: int = 0, stdin: str | bytes = "") -> Result:
    result = CliRunner().invoke(app, ["package", *arguments], input=stdin, env={"COLUMNS": "200"})
    assert result.exit_code == code, result.output
    return result


def _numbers(result: Result) -> torch.Tensor:
    return torch.tensor([[float(value) for value in line.split()] for line in result.stdout.splitlines()])


def test_a_line_for_each_text(encoder: Encoder) -> None:
    assert torch.equal(_numbers(_run(*TEXTS)), encoder.embed(TEXTS))


def test_json(encoder: Encoder) -> None:
    found: dict[str, Any] = json.loads(_run(*TEXTS, "--json").stdout)
    assert found["dimension"] == encoder.dimension
    assert [row["text"] for row in found["embeddings"]] == TEXTS
    assert torch.equal(torch.tensor([row["embedding"] for row in found["embeddings"]]), encoder.embed(TEXTS))


def test_file_and_standard_input(encoder: Encoder, tmp_path: Path) -> None:
    file = tmp_path / "texts.txt"
    file.write_text("\n".join(TEXTS))
    expected = encoder.embed(TEXTS)
    torch.testing.assert_close(_numbers(_run("--file", str(file), "--batch", "1")), expected)
    torch.testing.assert_close(_numbers(_run("--file", "-", stdin=file.read_text())), expected)
    torch.testing.assert_close(_numbers(_run(TEXTS[0], "--file", str(file)))[1:], expected)
    assert _run("--file", "-").stdout == ""


def test_invalid_texts(tmp_path: Path) -> None:
    assert "There is no text. Pass texts, or --file FILE." in _run(code=2).stderr
    assert "cannot be read" in _run("--file", str(tmp_path / "missing.txt"), code=2).stderr
    assert "Pass a file in UTF-8." in _run("--file", "-", stdin=b"\xff\xfe", code=2).stderr
    assert "There is no prompt 'query'" in _run("fox", "--prompt", "query", code=2).stderr


def test_progress_of_long_work(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(console, "QUIET_SECONDS", -1.0)
    assert "embedding: 3 of 3" in _run(*TEXTS).stderr
    monkeypatch.undo()

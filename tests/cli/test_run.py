"""`inlay run`, on a stock model in place of a package."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest
import typer
from typer.testing import CliRunner

import inlay
from inlay.cli import model_options
from inlay.cli.console import Command
from inlay.cli.run import run
from inlay.runtime import LanguageModel, Sampling
from tests.text_models import EagerStepper, byte_tokenizer, small_model, text_of

if TYPE_CHECKING:
    from pathlib import Path

    from typer.testing import Result

pytestmark = pytest.mark.fast

app = typer.Typer(rich_markup_mode="rich")
app.command(cls=Command)(run)
SPEED = r"^\d+ tokens, \d+\.\d tokens/s, first token after \d+\.\d\d s$"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> LanguageModel:
    stock = small_model()
    return LanguageModel(text_of(byte_tokenizer(), tmp_path_factory.mktemp("text")), lambda: EagerStepper(stock, 128))


@pytest.fixture(autouse=True)
def _loaded(model: LanguageModel, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(inlay, "load", lambda path: model, raising=False)
    monkeypatch.setattr(model_options, "ensure_package", lambda target, *options: target)


def _run(*arguments: str, code: int = 0) -> Result:
    result = CliRunner().invoke(app, ["package", *arguments], env={"COLUMNS": "200"})
    assert result.exit_code == code, result.output
    return result


@pytest.mark.parametrize("form", [[], ["--no-stream"]])
def test_text_and_speed(model: LanguageModel, form: list[str]) -> None:
    import re

    result = _run("fox", "--max-tokens", "12", *form)
    assert result.stdout == model.generate("fox", max_tokens=12).text + "\n"
    assert re.match(SPEED, result.stderr.splitlines()[-1])


def test_options_reach_the_model(model: LanguageModel) -> None:
    options = "--max-tokens 20 --temperature 0.9 --top-k 50 --top-p 0.95 --min-p 0.01 --repetition-penalty 1.2 --seed 7"
    sampling = Sampling(temperature=0.9, top_k=50, top_p=0.95, min_p=0.01, repetition_penalty=1.2, seed=7)
    expected = model.generate("fox", max_tokens=20, sampling=sampling)
    made = json.loads(_run("fox", "--json", *options.split()).stdout)
    assert made["tokens"] == list(expected.tokens)
    assert made["text"] == expected.text
    assert made["finish_reason"] == "length"
    assert made["first_token_s"] > 0
    assert made["tokens_per_second"] > 0
    stops = [expected.text[5:7], expected.text[3:5]]
    stopped = json.loads(_run("fox", "--json", "--stop", stops[0], "--stop", stops[1], *options.split()).stdout)
    assert stopped["text"] == model.generate("fox", max_tokens=20, sampling=sampling, stop=stops).text
    assert stopped["finish_reason"] == "stop"


def test_raw_and_system(model: LanguageModel) -> None:
    def tokens(*arguments: str) -> Any:
        return json.loads(_run("fox", "--json", "--max-tokens", "6", *arguments).stdout)["tokens"]

    assert tokens("--raw") == list(model.generate("fox", max_tokens=6, raw=True).tokens)
    conversation = [{"role": "system", "content": "Bark."}, {"role": "user", "content": "fox"}]
    assert tokens("--system", "Bark.") == list(model.generate(conversation, max_tokens=6).tokens)


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["--top-p", "0.9"], "Add --temperature 0.7"),
        (["--seed", "1"], "Add --temperature 0.7"),
        (["--raw", "--system", "x"], "Remove one of them"),
        (["--temperature", "-1"], "temperature is -1.0, but must be 0 or"),
        (["--max-tokens", "0"], "must be at least 1"),
        (["--stop", ""], "non-empty strings"),
    ],
)
def test_wrong_usage_is_told(arguments: list[str], sentence: str) -> None:
    assert sentence in _run("fox", *arguments, code=2).stderr


def test_help_has_an_example() -> None:
    shown = CliRunner().invoke(app, ["--help"], env={"COLUMNS": "200"}).output
    assert "inlay run ./package" in shown


def test_a_folder_that_is_no_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    result = CliRunner().invoke(app, [str(tmp_path), "fox"], env={"COLUMNS": "200"})
    assert result.exit_code == 3
    assert "has no config.json" in result.stderr

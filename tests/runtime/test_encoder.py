"""Embeddings of texts with a package: equal to the stock model, whatever else is in the call."""

from __future__ import annotations

import base64
import struct
import threading
from typing import TYPE_CHECKING, Any

import httpx
import openai
import pytest
import torch
from torch.nn import functional

import inlay
from inlay.errors import UsageError
from tests.encoders import WORDS, random_encoder, sentence_folder
from tests.serve.server_process import NAME, Server

if TYPE_CHECKING:
    from pathlib import Path

TOLERANCE = 1e-5
LONGEST = 24
TEXTS = (
    "fox",
    "the quick brown fox",
    " ".join(WORDS),
    "a city " * 9,
    "paris",
    "",
    "unknown words here",
    "the dog " * 40,
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    text = {"max_seq_length": LONGEST, "do_lower_case": True}
    prompts = {"prompts": {"query": "the quick ", "document": ""}, "default_prompt_name": None}
    path = tmp_path_factory.mktemp("encoder")
    return sentence_folder(path, random_encoder("bert"), pooling={"pooling_mode": "mean"}, text=text, prompts=prompts)


@pytest.fixture(scope="module")
def package(folder: Path) -> Path:
    path = folder.parent / "package"
    assert inlay.build(str(folder), path).manifest.kind == "encoder"
    return path


@pytest.fixture(scope="module")
def encoder(package: Path) -> inlay.Encoder:
    return inlay.load_encoder(package)


@pytest.fixture(scope="module")
def stock(folder: Path) -> Any:
    """The stock model, a text at a time, without padding."""
    from transformers import AutoModel, AutoTokenizer

    model, tokenizer = AutoModel.from_pretrained(folder).eval(), AutoTokenizer.from_pretrained(folder)

    def embed(text: str) -> torch.Tensor:
        given = tokenizer(text, truncation=True, max_length=LONGEST, return_tensors="pt")
        with torch.no_grad():
            return functional.normalize(model(**given)[0][0].mean(0), dim=0)

    return embed


def close(made: torch.Tensor, expected: torch.Tensor) -> None:
    torch.testing.assert_close(made, expected, atol=TOLERANCE, rtol=0)


def test_equal_to_the_stock_model(encoder: inlay.Encoder, stock: Any) -> None:
    made = encoder.embed(TEXTS)
    assert (made.shape, made.dtype) == ((len(TEXTS), encoder.dimension), torch.float32)
    close(made, torch.stack([stock(text) for text in TEXTS]))


@pytest.mark.parametrize("batch_size", [1, 3, 100])
def test_neighbours_and_batches_do_not_matter(encoder: inlay.Encoder, batch_size: int) -> None:
    alone = torch.cat([encoder.embed([text]) for text in TEXTS])
    counts: list[int] = []
    close(encoder.embed(TEXTS, batch_size=batch_size, on_progress=counts.append), alone)
    assert counts == sorted(set(counts))
    assert counts[-1] == len(TEXTS)
    close(encoder.embed(TEXTS[::-1], batch_size=batch_size).flip(0), alone)


def test_case_and_prompts(encoder: inlay.Encoder, stock: Any) -> None:
    close(encoder.embed(["The FOX"]), stock("the fox")[None])
    close(encoder.embed(["fox"], prompt="query"), stock("the quick fox")[None])
    with pytest.raises(UsageError, match="There is no prompt 'quary'"):
        encoder.embed(["fox"], prompt="quary")


@pytest.mark.parametrize(
    "text", ["", " ", "fox " * 10_000, "\x00\x07\x1b[31m\u202e\ufffe", "[CLS] [PAD] [SEP]", "🦊" * 99]
)
def test_strange_texts(text: str, encoder: inlay.Encoder, stock: Any) -> None:
    close(encoder.embed([text]), stock(text)[None])


def test_no_texts(encoder: inlay.Encoder) -> None:
    assert encoder.embed([]).shape == (0, encoder.dimension)


@pytest.mark.parametrize(
    ("texts", "said"),
    [
        ("fox", "must be a list"),
        (["fox", 3], "Text 1 is a int"),
        ([None], "Text 0 is a NoneType"),
        (["\ud800"], "not valid Unicode"),
    ],
)
def test_invalid_texts(texts: Any, said: str, encoder: inlay.Encoder) -> None:
    with pytest.raises(UsageError, match=said):
        encoder.embed(texts)


def test_invalid_batch_size(encoder: inlay.Encoder) -> None:
    with pytest.raises(UsageError, match="batch size cannot be 0"):
        encoder.embed(["fox"], batch_size=0)


def test_two_threads(encoder: inlay.Encoder) -> None:
    expected = encoder.embed(TEXTS)
    found: list[torch.Tensor] = []

    def work() -> None:
        found.extend(encoder.embed(TEXTS, batch_size=2) for _ in range(20))

    threads = [threading.Thread(target=work) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 40
    for made in found:
        close(made, expected)


def test_it_is_not_a_language_model(package: Path) -> None:
    with pytest.raises(UsageError, match="is a text encoder, not a language model"):
        inlay.load(package)


def test_refit(package: Path, folder: Path, tmp_path: Path) -> None:
    """Other weights of the same model; the settings of texts stay. Another pooling is another model."""
    from inlay.package.refit import refit

    model = random_encoder("bert")
    with torch.no_grad():
        model.embeddings.word_embeddings.weight.neg_()
    same = {"max_seq_length": LONGEST, "do_lower_case": True}
    sentence_folder(tmp_path / "other", model, pooling={"pooling_mode": "mean"}, text=same)
    refit(package, str(tmp_path / "other"), output=tmp_path / "package")
    expected = inlay.load_encoder(package).embed(["fox"])
    made = inlay.load_encoder(tmp_path / "package").embed(["fox"])
    assert (made - expected).abs().max() > 0.01
    sentence_folder(tmp_path / "cls", model, pooling={"pooling_mode": "cls"}, text=same)
    with pytest.raises(UsageError, match="cls"):
        refit(package, str(tmp_path / "cls"), output=tmp_path / "package")


def test_the_server(package: Path, encoder: inlay.Encoder, tmp_path: Path) -> None:
    """OpenAI's client gets the embeddings of `inlay.load_encoder`, as numbers and in base64."""
    with Server(package, tmp_path) as server, openai.OpenAI(base_url=f"{server.url}/v1", api_key="none") as client:
        texts = ["the quick fox", "paris"]
        for encoding in ("float", "base64"):
            made = client.embeddings.create(model=NAME, input=texts, encoding_format=encoding)
            rows = [each.embedding for each in made.data]
            if encoding == "base64":
                rows = [list(struct.unpack(f"<{encoder.dimension}f", base64.b64decode(str(row)))) for row in rows]
            torch.testing.assert_close(torch.tensor(rows), encoder.embed(texts), rtol=0, atol=0)
            assert made.usage.prompt_tokens == sum(len(each.ids) for each in encoder.encode(texts))
        one = client.embeddings.create(model=NAME, input="paris")
        torch.testing.assert_close(torch.tensor(one.data[0].embedding), encoder.embed(["paris"])[0], rtol=0, atol=0)
        for wrong, param in (({"input": "fox " * 5000}, "input"), ({"input": "fox", "dimensions": 3}, "dimensions")):
            with pytest.raises(openai.BadRequestError) as refused:
                client.embeddings.create(model=NAME, **wrong)
            assert refused.value.param == param
        with pytest.raises(openai.NotFoundError):
            client.completions.create(model=NAME, prompt="fox")
        assert httpx.get(f"{server.url}/readyz").status_code == 200
        assert "inlay_" in httpx.get(f"{server.url}/metrics").text

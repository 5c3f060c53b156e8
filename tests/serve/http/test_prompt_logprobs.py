"""Logprobs of prompts are those of the stock model, and echo returns the prompt with them."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import pytest
import torch

from tests.serve.server_process import NAME, Server

openai = pytest.importorskip("openai")

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from inlay.runtime.engine import Engine

PROMPT = [0, *(3 + 7 * place % 250 for place in range(60))]


@pytest.fixture(scope="module")
def client(server: Server) -> Iterator[Any]:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as made:
        yield made


@pytest.fixture(scope="module")
def expected(package: Path) -> torch.Tensor:
    """The logprobs of the stock model after each token."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(package.parent / "model", dtype=torch.float32)
    with torch.no_grad():
        found: torch.Tensor = model(torch.tensor([PROMPT])).logits[0].log_softmax(-1)
    return found


def test_echo_and_prompt_logprobs(client: Any, expected: torch.Tensor) -> None:
    given: dict[str, Any] = {"model": NAME, "prompt": PROMPT, "max_tokens": 3, "temperature": 0}
    plain = client.completions.create(**given, logprobs=2)
    made = client.completions.create(**given, logprobs=2, echo=True, extra_body={"prompt_logprobs": 1})
    choice, count = made.choices[0], len(PROMPT)
    found = choice.logprobs
    assert found.token_logprobs[0] is found.top_logprobs[0] is None
    wanted = [float(expected[place, token]) for place, token in enumerate(PROMPT[1:])]
    assert found.token_logprobs[1:count] == pytest.approx(wanted, abs=1e-3)
    assert found.token_logprobs[count:] == pytest.approx(plain.choices[0].logprobs.token_logprobs, abs=1e-3)
    assert found.tokens[count:] == plain.choices[0].logprobs.tokens
    assert choice.text.endswith(plain.choices[0].text)
    assert choice.text.startswith("".join(found.tokens[:5]))
    offsets = [sum(map(len, found.tokens[:place])) for place in range(len(found.tokens))]
    assert found.text_offset == offsets
    first, *others = choice.prompt_logprobs
    assert first is None
    for place, (token, each) in enumerate(zip(PROMPT[1:], others, strict=True)):
        best = int(expected[place].argmax())
        assert each.keys() == {str(token), str(best)}
        assert each[str(token)]["logprob"] == pytest.approx(wanted[place], abs=1e-3)
        assert each[str(best)]["logprob"] == pytest.approx(float(expected[place, best]), abs=1e-3)
    assert made.usage.prompt_tokens_details.cached_tokens == 0
    again = client.completions.create(**given, logprobs=2)
    assert again.choices[0].logprobs == plain.choices[0].logprobs, "nothing was stored that differs"


def test_chat_and_several_prompts(client: Any) -> None:
    talk = [{"role": "user", "content": "Who is there?"}]
    chat = client.chat.completions.create(model=NAME, messages=talk, max_tokens=2, extra_body={"prompt_logprobs": 0})
    assert len(chat.choices[0].prompt_logprobs) == chat.usage.prompt_tokens
    texts = ["The quick", "brown fox jumps"]
    made = client.completions.create(model=NAME, prompt=texts, echo=True, max_tokens=2, n=2)
    assert [each.text.startswith(texts[at // 2]) for at, each in enumerate(made.choices)] == [True] * 4
    streamed = client.completions.create(model=NAME, prompt="The quick", echo=True, max_tokens=2, stream=True)
    assert "".join(chunk.choices[0].text for chunk in streamed).startswith("The quick")


def test_neighbors_are_not_changed(engine: Engine) -> None:
    """A request whose prompt is computed token by token runs beside others."""
    from inlay.runtime.outputs import collect
    from inlay.runtime.request import Request

    others = [Request((5, 6, 7 + place), max_tokens=20, ignore_eos=True) for place in range(3)]
    alone = [collect(engine.submit(each)).tokens for each in others]
    handles = [engine.submit(each) for each in (*others, Request(tuple(PROMPT), max_tokens=4, prompt_logprobs=0))]
    assert [collect(each).tokens for each in handles[:3]] == alone
    pieces = list(handles[3])
    assert all(math.isfinite(each.logprob) for each in pieces[0].prompt_logprobs or ())
    assert len(pieces[0].prompt_logprobs or ()) == len(PROMPT) - 1
    assert all(each.prompt_logprobs is None for each in pieces[1:])

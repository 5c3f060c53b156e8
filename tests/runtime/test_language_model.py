"""Generating text on a stock model gives what transformers' generate() gives."""

from __future__ import annotations

from itertools import combinations, pairwise
from time import sleep
from typing import TYPE_CHECKING, Any

import pytest
import torch

from inlay.errors import UsageError
from inlay.runtime import FinishReason, LanguageModel, Sampling
from inlay.runtime.generation_state import StopStrings
from inlay.runtime.language_model import generate
from inlay.runtime.outputs import collect
from inlay.runtime.text_codec import REPLACEMENT_CHARACTER, TextCodec, TextConfig
from tests.text_models import EagerStepper, byte_tokenizer, fallback_tokenizer, small_model, text_of

if TYPE_CHECKING:
    from collections.abc import Iterator

pytestmark = pytest.mark.fast

PROMPT = "The quick brown fox"


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> TextCodec:
    return text_of(byte_tokenizer(), tmp_path_factory.mktemp("text"))


@pytest.fixture(scope="module")
def stock() -> Any:
    return small_model()


@pytest.fixture(scope="module")
def model(text: TextCodec, stock: Any) -> LanguageModel:
    return LanguageModel(text, lambda: EagerStepper(stock))


def _transformers(stock: Any, text: TextCodec, prompt: list[int], count: int, **settings: Any) -> list[int]:
    ids = torch.tensor([prompt])
    settings |= {"max_new_tokens": count, "eos_token_id": sorted(text.eos), "pad_token_id": 0}
    made: list[int] = stock.generate(ids, attention_mask=torch.ones_like(ids), **settings)[0, len(prompt) :].tolist()
    return made


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize(
    "settings",
    [
        {"do_sample": False},
        {"do_sample": False, "repetition_penalty": 1.3},
        {"do_sample": True, "temperature": 0.8, "top_k": 30, "top_p": 0.9},
        {"do_sample": True, "temperature": 1.5, "top_k": 0, "min_p": 0.05, "repetition_penalty": 1.1},
    ],
    ids=str,
)
def test_tokens_are_those_of_transformers(text: TextCodec, settings: dict[str, Any], seed: int) -> None:
    stock = small_model(seed)
    prompt = text.encode(PROMPT)
    torch.manual_seed(seed)
    expected = _transformers(stock, text, prompt, 40, **settings)
    chosen = {name: value for name, value in settings.items() if name != "do_sample"}
    made = collect(generate(EagerStepper(stock), text, prompt, Sampling(**chosen, seed=seed), max_tokens=40))
    assert list(made.tokens) == expected
    assert made.finish_reason is (FinishReason.EOS if expected[-1] in text.eos else FinishReason.LENGTH)
    assert made.text == text.decode(expected)


def test_conversation_prompt_and_raw(model: LanguageModel, text: TextCodec, stock: Any) -> None:
    messages = [{"role": "user", "content": PROMPT}]
    asked = model.generate(PROMPT, max_tokens=8)
    assert asked.tokens == model.generate(messages, max_tokens=8).tokens
    assert list(asked.tokens) == _transformers(stock, text, text.encode_chat(messages), 8, do_sample=False)
    raw = model.generate(PROMPT, max_tokens=8, raw=True)
    assert list(raw.tokens) == _transformers(stock, text, text.encode(PROMPT), 8, do_sample=False)
    with pytest.raises(UsageError, match="`raw` needs a text"):
        model.generate(messages, raw=True)


def test_without_a_template_a_prompt_is_continued(stock: Any, tmp_path_factory: pytest.TempPathFactory) -> None:
    plain = LanguageModel(text_of(fallback_tokenizer(), tmp_path_factory.mktemp("plain")), lambda: EagerStepper(stock))
    assert plain.generate("a b", max_tokens=4).tokens == plain.generate("a b", max_tokens=4, raw=True).tokens
    with pytest.raises(UsageError, match="no chat template"):
        plain.generate([{"role": "user", "content": "a"}])


def test_streamed_and_whole_are_the_same(model: LanguageModel) -> None:
    sampling = Sampling(temperature=1.5, seed=1)
    whole = model.generate(PROMPT, sampling=sampling, max_tokens=40)
    pieces = list(model.generate(PROMPT, sampling=sampling, max_tokens=40, stream=True))
    assert "".join(piece.text for piece in pieces) == whole.text
    assert tuple(piece.token for piece in pieces) == whole.tokens
    assert [piece.finish_reason for piece in pieces] == [None] * (len(pieces) - 1) + [whole.finish_reason]
    assert not any(piece.text.endswith(REPLACEMENT_CHARACTER) for piece in pieces[:-1])


@pytest.mark.parametrize("special", [True, False])
def test_end_tokens(text: TextCodec, stock: Any, special: bool) -> None:
    prompt = text.encode(PROMPT)
    endless = collect(generate(EagerStepper(stock), text, prompt, Sampling(), max_tokens=20)).tokens
    end = endless[9]
    named = text.tokenizer.token_to_id("<end>")
    assert named is not None
    ends = {end} if not special else {end, named}
    ending = TextCodec(text.tokenizer, TextConfig(eos=frozenset(ends), special_tokens={}))
    made = collect(generate(EagerStepper(stock), ending, prompt, Sampling(), max_tokens=20))
    assert made.finish_reason is FinishReason.EOS
    assert list(made.tokens) == _transformers(stock, ending, prompt, 20, do_sample=False)
    assert made.tokens == endless[: endless.index(end) + 1]
    assert made.text == text.decode(list(made.tokens[:-1])), "the end token is no text"


def test_every_part_of_an_answer_can_stop_it(model: LanguageModel) -> None:
    sampling = Sampling(temperature=1.5, seed=2)
    whole = model.generate(PROMPT, max_tokens=24, sampling=sampling)
    parts = {whole.text[start : start + size] for start in range(len(whole.text)) for size in (1, 2, 3, 5, 8)}
    parts = {part for part in parts if REPLACEMENT_CHARACTER not in part}
    assert len(parts) > 40
    for part in parts:
        made = model.generate(PROMPT, max_tokens=24, stop=[part], sampling=sampling)
        assert made.finish_reason is FinishReason.STOP
        assert made.text == whole.text[: whole.text.index(part)]
        assert made.tokens == whole.tokens[: len(made.tokens)]


def _cuts(whole: str) -> Iterator[list[str]]:
    for count in range(len(whole)):
        for places in combinations(range(1, len(whole)), count):
            bounds = [0, *places, len(whole)]
            yield [whole[low:high] for low, high in pairwise(bounds)]


@pytest.mark.parametrize(
    ("whole", "stops", "shown", "found"),
    [
        ("xxENDyy", ["END"], "xx", True),
        ("ENENEND", ["END"], "ENEN", True),
        ("aabaabaac", ["aabaac"], "aab", True),
        ("abcd", ["abcd", "bc"], "a", True),
        ("xabab", ["ababc", "zz"], "xabab", False),
        ("a\n\nb", ["\n\n", "\n"], "a", True),
        ("🦊é🦊", ["é🦊"], "🦊", True),
        ("nothing", [], "nothing", False),
    ],
)
def test_stop_strings_at_every_cut(whole: str, stops: list[str], shown: str, found: bool) -> None:
    for pieces in _cuts(whole):
        filtered, out = StopStrings(stops), ""
        for piece in pieces:
            out += filtered.add(piece)
            assert shown.startswith(out), "text was shown that belongs to a stop string"
            if filtered.is_found:
                break
        assert filtered.is_found is found
        assert out + filtered.finish() == shown


def test_room(text: TextCodec, stock: Any) -> None:
    prompt = text.encode(PROMPT)
    endless = LanguageModel(text, lambda: EagerStepper(stock, max_seq_len=len(prompt) + 3))
    made = endless.generate(PROMPT, raw=True)
    assert made.finish_reason is FinishReason.LENGTH
    assert len(made.tokens) == 4, "the last token needs no room"
    full = EagerStepper(stock, max_seq_len=len(prompt))
    assert len(collect(generate(full, text, prompt, Sampling(), max_tokens=9)).tokens) == 1
    with pytest.raises(UsageError, match=f"has {len(prompt)} tokens, but the package is limited to 2"):
        collect(generate(EagerStepper(stock, max_seq_len=2), text, prompt, Sampling(), max_tokens=9))


def test_answers_may_overlap_and_steppers_are_used_again(text: TextCodec, stock: Any) -> None:
    made: list[EagerStepper] = []

    def open_stepper() -> EagerStepper:
        made.append(EagerStepper(stock))
        return made[-1]

    model = LanguageModel(text, open_stepper)
    alone = [model.generate(prompt, max_tokens=6).tokens for prompt in ("fox", "dog")]
    assert len(made) == 1
    streams = [model.generate(prompt, max_tokens=6, stream=True) for prompt in ("fox", "dog")]
    together = list(zip(*streams, strict=True))
    assert [tuple(piece.token for piece in pieces) for pieces in zip(*together, strict=True)] == alone
    assert len(made) == 2
    abandoned = model.generate("fox", stream=True)
    next(abandoned)
    del abandoned
    model.generate("fox", max_tokens=2)
    assert len(made) == 2


def test_a_slow_reader_does_not_slow_the_figures(model: LanguageModel) -> None:
    made = []
    for piece in model.generate(PROMPT, max_tokens=4, stream=True):
        made.append(piece)
        sleep(0.3)
    completion = collect(made)
    assert len(completion.tokens) == 4
    assert completion.tokens_per_second is not None
    assert completion.tokens_per_second > 3 / 0.9
    assert completion.first_token_s > 0
    assert model.generate(PROMPT, max_tokens=1).tokens_per_second is None


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ({"max_tokens": 0}, "max_tokens is 0"),
        ({"stop": [""]}, "non-empty strings"),
        ({"stop": "END"}, "a list of non-empty"),
    ],
    ids=str,
)
def test_wrong_calls(model: LanguageModel, arguments: dict[str, Any], sentence: str) -> None:
    with pytest.raises(UsageError, match=sentence):
        model.generate(PROMPT, **arguments)


def test_an_empty_prompt_needs_a_begin_token(model: LanguageModel, stock: Any, tmp_path: Any) -> None:
    assert model.generate("", raw=True, max_tokens=2).tokens
    bare = LanguageModel(text_of(byte_tokenizer(begin=False), tmp_path), lambda: EagerStepper(stock))
    with pytest.raises(UsageError, match="prompt is empty"):
        bare.generate("", raw=True)


def test_an_answer_that_is_not_read_to_the_end_is_not_collected(model: LanguageModel) -> None:
    with pytest.raises(UsageError, match="last output"):
        collect([next(model.generate(PROMPT, stream=True))])


def test_a_list_needs_an_engine(model: LanguageModel) -> None:
    with pytest.raises(UsageError, match=r"This model has no engine. Load it from a package with inlay\.load\."):
        model.generate(["fox"])
    nothing: list[str] = []
    assert model.generate(nothing) == []

"""Structured output: what is generated follows the grammar, alone and in batches, and is what sampling would choose."""

from __future__ import annotations

import json
import random
import re
import threading
from typing import TYPE_CHECKING, Any

import jsonschema_rs
import numpy as np
import pydantic
import pytest
import torch
from tools.benchmarks.random_schemas import random_schema

import inlay
from inlay.errors import UsageError
from inlay.runtime import FinishReason, Sampling
from inlay.runtime.engine import Engine
from inlay.runtime.grammar import MAX_CHARS, Grammar, GrammarCompiler, mask_logits
from inlay.runtime.outputs import collect
from inlay.runtime.request import Request
from inlay.runtime.settings import EngineSettings
from inlay.runtime.text_codec import TextCodec, TextConfig

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

WORD = {"type": "string", "maxLength": 6}
SCHEMAS: dict[str, dict[str, Any]] = {
    "object": {
        "type": "object",
        "properties": {"name": WORD, "age": {"type": "integer", "minimum": 0, "maximum": 120}},
        "required": ["name", "age"],
    },
    "nested": {
        "type": "object",
        "properties": {
            "tags": {"type": "array", "items": {"enum": ["a", "bc", "d"]}, "maxItems": 3},
            "on": {"type": "boolean"},
        },
        "required": ["tags", "on"],
        "additionalProperties": False,
    },
    "choice of types": {"anyOf": [{"type": "null"}, {"type": "integer", "minimum": -5, "maximum": 5}, {"const": "x"}]},
    "pattern": {"type": "string", "pattern": "^[0-9]{4}-[0-9]{2}$"},
    "reference": {
        "$defs": {
            "point": {"type": "array", "prefixItems": [{"enum": [1, 2]}, {"enum": [3]}], "items": False, "minItems": 2}
        },
        "$ref": "#/$defs/point",
    },
}
COMPLETE = (FinishReason.EOS, FinishReason.STOP)
SAMPLED = Sampling(temperature=1.0, seed=3)


@pytest.fixture(scope="module")
def engine(package: Path) -> Iterator[Engine]:
    made = Engine.open(package, EngineSettings(block_size=8, max_prefill_tokens=16))
    made.start()
    yield made
    made.close()


@pytest.fixture(scope="module")
def text(package: Path) -> TextCodec:
    return inlay.load(package).text


def _request(grammar: Grammar | None, number: int = 0, **more: Any) -> Request:
    sampling = Sampling() if number % 2 else Sampling(temperature=1.0, seed=number)
    return Request((5, 6, 7 + number % 50), sampling, **{"max_tokens": 120, "grammar": grammar, **more})


@pytest.mark.parametrize("name", SCHEMAS)
def test_json_of_a_schema(engine: Engine, name: str) -> None:
    """Finished answers validate, and are the same in a batch as alone."""
    requests = [_request(Grammar.json_schema(SCHEMAS[name]), number) for number in range(6)]
    alone = [collect(engine.submit(each)) for each in requests]
    together = [collect(each) for each in [engine.submit(each) for each in requests]]
    assert [each.text for each in together] == [each.text for each in alone]
    for each in alone:
        assert each.finish_reason in COMPLETE
        jsonschema_rs.validate(SCHEMAS[name], json.loads(each.text))


def test_random_schemas(engine: Engine) -> None:
    """Each answer to a random schema with bounds validates."""
    seed = random.SystemRandom().randrange(1 << 32)
    schemas = [random_schema(random.Random(seed + number)) for number in range(40)]
    handles = [
        engine.submit(_request(Grammar.json_schema(schema), number, max_tokens=300), wait=True)
        for number, schema in enumerate(schemas)
    ]
    for number, (schema, handle) in enumerate(zip(schemas, handles, strict=True)):
        made = collect(handle)
        if made.finish_reason in COMPLETE:  # a random model writes long numbers and spaces, so not all come to an end
            assert jsonschema_rs.is_valid(schema, json.loads(made.text)), f"seed {seed + number}: {made.text}"


def test_other_grammars(engine: Engine) -> None:
    def answer(grammar: Grammar, number: int) -> str:
        done = collect(engine.submit(_request(grammar, number)))
        assert done.finish_reason in COMPLETE
        return done.text

    for number in range(6):
        assert re.fullmatch(r"[a-c]{2,9}(!|\?)", answer(Grammar("regex", r"[a-c]{2,9}(!|\?)"), number))
        assert answer(Grammar.choice(["yes", "no", 'a "b"']), number) in ("yes", "no", 'a "b"')
        assert re.fullmatch(r"(ab)+;", answer(Grammar("grammar", 'start: "ab"{1,4} ";"'), number))
        assert re.fullmatch(r"x[0-9]y", answer(Grammar("grammar", 'root ::= "x" [0-9] "y"'), number)), "llama.cpp's"


def test_free_neighbours_are_not_changed(engine: Engine) -> None:
    """What has no grammar gets the same tokens beside requests that have one."""
    free = [_request(None, number, ignore_eos=True, max_tokens=30) for number in range(3)]
    alone = [collect(engine.submit(each)).tokens for each in free]
    bound = [engine.submit(_request(Grammar.json_schema(SCHEMAS["object"]), number)) for number in range(3)]
    handles = [engine.submit(each) for each in free]
    assert [collect(each).tokens for each in handles] == alone
    assert all(json.loads(collect(each).text) for each in bound)


def test_from_python(package: Path) -> None:
    class Person(pydantic.BaseModel):
        name: str = pydantic.Field(max_length=6)
        age: int = pydantic.Field(ge=0, le=120)

    with inlay.load(package) as model:
        made = model.generate("Who?", schema=Person, sampling=SAMPLED)
        assert 0 <= Person.model_validate_json(made.text).age <= 120
        several = model.generate(["Who?", "Else?"], schema=Person.model_json_schema(), sampling=SAMPLED)
        assert several[0].text == made.text
        assert all(Person.model_validate_json(each.text) for each in several)
        streamed = model.generate("Who?", schema=Person, sampling=SAMPLED, stream=True)
        assert "".join(each.text for each in streamed) == made.text
        with pytest.raises(UsageError, match="exclude each other"):
            model.generate("Who?", schema=Person, grammar=Grammar("regex", "a"))


def test_stop_strings_and_limits(engine: Engine) -> None:
    grammar = Grammar("regex", "[a]{30}")
    cut = collect(engine.submit(_request(grammar, max_tokens=4)))
    assert cut.finish_reason is FinishReason.LENGTH
    assert len(cut.tokens) == 4
    stopped = collect(engine.submit(_request(grammar, stop=("aaaaa",))))
    assert (stopped.finish_reason, stopped.text) == (FinishReason.STOP, "")
    with pytest.raises(UsageError, match="ignore_eos and a grammar exclude each other"):
        engine.submit(_request(grammar, ignore_eos=True))


@pytest.mark.parametrize(
    ("grammar", "said"),
    [
        (Grammar("json", '{"type": "nonsense"}'), "The JSON schema cannot be used"),
        (Grammar("json", "{"), "The JSON schema cannot be used"),
        (Grammar.json_schema({"type": "array", "uniqueItems": True}), "uniqueItems"),
        (Grammar.json_schema({"type": "integer", "minimum": 3, "maximum": 1}), "The JSON schema cannot be used"),
        (Grammar.json_schema({"const": 0.1 + 0.2}), "has a number of more than 15 digits"),
        (Grammar("json", "[" * 50_000), "The JSON schema"),
        (Grammar("regex", "(a"), "The regular expression cannot be used"),
        (Grammar("grammar", "start: nowhere"), "The grammar cannot be used"),
    ],
)
def test_refused(engine: Engine, grammar: Grammar, said: str) -> None:
    """What cannot be enforced is an error when the request is submitted."""
    with pytest.raises(UsageError, match=said):
        engine.submit(_request(grammar))


def test_an_ambiguous_grammar_is_stopped(text: TextCodec) -> None:
    """It ends with an error before a step of it holds up others."""
    matcher, letter = text.grammars.open(Grammar("grammar", 'start: s\ns: s s s s s | "a" | ""')), text.encode("a")[-1]

    def follow() -> None:
        for _ in range(200):
            matcher.allowed()
            matcher.add(letter)

    with pytest.raises(UsageError, match="cannot be followed further"):
        follow()


def test_a_tokenizer_without_end(text: TextCodec) -> None:
    blind = TextCodec(text.tokenizer, TextConfig(eos=frozenset(), special_tokens={}))
    blind.grammars.preload()
    with pytest.raises(UsageError, match="does not support this tokenizer"):
        blind.grammars.open(Grammar("regex", "a"))


def test_sizes() -> None:
    with pytest.raises(UsageError, match="the limit is"):
        Grammar("regex", "a" * (MAX_CHARS + 1))
    for choices in ([], [""]):
        with pytest.raises(UsageError, match="list of texts"):
            Grammar.choice(choices)


def test_masks(text: TextCodec) -> None:
    """The mask allows exactly the tokens that the grammar allows, and -inf removes all others at any temperature."""
    allowed = text.grammars.open(Grammar("regex", "[ab]c?")).allowed()
    found = {text.decode([token]) for token in np.flatnonzero(allowed).tolist()}
    assert found == {"a", "b"}
    scores = torch.randn(len(allowed) + 5)
    masked = mask_logits(scores, allowed)
    assert torch.equal(torch.isfinite(masked).nonzero()[:, 0], torch.from_numpy(np.flatnonzero(allowed)))
    assert torch.equal(masked[np.flatnonzero(allowed)], scores[np.flatnonzero(allowed)])
    assert len(mask_logits(scores[:3], allowed)) == 3, "a package may have fewer logits than the tokenizer has tokens"


def test_a_token_that_is_not_allowed(text: TextCodec) -> None:
    matcher = text.grammars.open(Grammar("regex", "a"))
    with pytest.raises(UsageError, match="The grammar cannot be followed"):
        matcher.add(text.encode("b")[-1])


def test_many_threads(text: TextCodec) -> None:
    """Threads that compile and follow the same grammars do not disturb each other."""
    compiler, found = GrammarCompiler(text), []

    def follow(number: int) -> None:
        for turn in range(20):
            word = "abcdefgh"[(number + turn) % 8]
            matcher = compiler.open(Grammar("regex", word * 5))
            while True:
                token = int(np.flatnonzero(matcher.allowed())[0])
                found.append(text.decode([token]).strip(word))
                if matcher.add(token):
                    break

    threads = [threading.Thread(target=follow, args=(number,)) for number in range(4)]
    for each in threads:
        each.start()
    for each in threads:
        each.join()
    assert set(found) == {""}
    assert len(found) >= 4 * 20


def test_the_library_is_missing(text: TextCodec, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "llguidance", None)
    with pytest.raises(UsageError, match=r"requires llguidance. pip install 'inlay\[structured\]'"):
        GrammarCompiler(text).open(Grammar("regex", "a"))

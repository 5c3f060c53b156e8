"""The text side of a package gives what transformers gives, without transformers."""

from __future__ import annotations

import json
import random
import subprocess
import sys
from typing import TYPE_CHECKING, Any

import pytest

from inlay.errors import ModelError, UsageError
from inlay.runtime.text_codec import REPLACEMENT_CHARACTER, TextCodec
from tests.text_models import byte_tokenizer, fallback_tokenizer, text_of

if TYPE_CHECKING:
    from pathlib import Path

    from inlay.runtime.chat_template import Messages

STRINGS = [
    "The capital of France is",
    "",
    "  two spaces,\n\na blank line\tand a tab ",
    "Größe, naïve café, œuvre",
    "你好,世界。こんにちは 안녕하세요",
    "🦊👩‍👩‍👧‍👦🏳️‍🌈 flags 🇫🇷 and 👍🏽",
    "<|im_start|>user\nnot a turn<|im_end|> <begin><end>",
    "مرحبا עולם नमस्ते",
    "a" * 300,
    "\x00\x7f\u200b\ufeff",
]
CONVERSATIONS: list[Messages] = [
    [{"role": "user", "content": "What is the capital of France?"}],
    [{"role": "system", "content": "Be brief.  "}, {"role": "user", "content": "Hello 🦊\n"}],
    [
        {"role": "user", "content": "one"},
        {"role": "assistant", "content": "two"},
        {"role": "user", "content": "{{ three }}"},
    ],
]


def assert_as_transformers(text: TextCodec, tokenizer: Any) -> None:
    for string in STRINGS:
        ids = tokenizer(string)["input_ids"]
        assert text.encode(string) == ids
        assert text.decode(ids) == tokenizer.decode(ids, skip_special_tokens=True)
        assert _streamed(text, ids) == text.decode(ids)
    for messages in CONVERSATIONS:
        rendered = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        assert text.chat is not None
        assert text.chat.render(messages) == rendered
        ids = tokenizer.apply_chat_template(messages, add_generation_prompt=True)["input_ids"]
        assert text.encode_chat(messages) == ids
    assert text.eos == {tokenizer.eos_token_id}


def _streamed(text: TextCodec, ids: list[int]) -> str:
    stream = text.detokenizer()
    pieces = [stream.add(token) for token in ids]
    assert not any(piece.endswith(REPLACEMENT_CHARACTER) for piece in pieces), "a character was given out in halves"
    return "".join(pieces) + stream.finish()


@pytest.mark.fast
@pytest.mark.parametrize("begin", [True, False])
def test_small_tokenizer(tmp_path: Path, begin: bool) -> None:
    tokenizer = byte_tokenizer(begin)
    text = text_of(tokenizer, tmp_path)
    assert_as_transformers(text, tokenizer)
    assert (text.encode("fox")[0] == tokenizer.bos_token_id) is begin
    assert text.encode_chat(CONVERSATIONS[0]).count(tokenizer.bos_token_id) == 0, "the template writes special tokens"


def test_real_tokenizer(smollm2_tokenizer: Any, tmp_path: Path) -> None:
    text = text_of(smollm2_tokenizer, tmp_path)
    assert_as_transformers(text, smollm2_tokenizer)
    shuffled = random.Random(0)
    for _ in range(50):
        ids = [shuffled.randrange(3, 49152) for _ in range(40)]
        assert _streamed(text, ids) == text.decode(ids) == smollm2_tokenizer.decode(ids, skip_special_tokens=True)


@pytest.mark.fast
def test_characters_of_several_tokens_come_whole(tmp_path: Path) -> None:
    text = text_of(byte_tokenizer(begin=False), tmp_path)
    ids = text.encode("é🦓")
    assert len(ids) > 3
    stream = text.detokenizer()
    assert [piece for token in ids if (piece := stream.add(token))] == ["é", "🦓"]
    cut = text.detokenizer()
    assert "".join(map(cut.add, ids[:-1])) == "é"
    assert cut.finish() == REPLACEMENT_CHARACTER, "what never becomes a character shows at the end"


@pytest.mark.fast
def test_random_bytes_stream_as_they_decode(tmp_path: Path) -> None:
    text = text_of(byte_tokenizer(begin=False), tmp_path)
    shuffled = random.Random(1)
    for _ in range(200):
        ids = [shuffled.randrange(3, 300) for _ in range(30)]
        assert _streamed(text, ids) == text.decode(ids)


@pytest.mark.fast
def test_spaces_and_bytes_of_pieces(tmp_path: Path) -> None:
    tokenizer = fallback_tokenizer()
    text = text_of(tokenizer, tmp_path)
    for string in ("a b ab a", "bébé a🦊b", "你好 a"):
        ids = tokenizer(string)["input_ids"]
        assert text.encode(string) == ids
        assert _streamed(text, ids) == tokenizer.decode(ids, skip_special_tokens=True) == string
    end = tokenizer.eos_token_id
    apart = [id_ for id_ in tokenizer("a b a")["input_ids"] for id_ in (id_, end, end)]
    assert _streamed(text, [end, *apart]) == "a b a", "special tokens between leave the spaces alone"
    byte, letter = 3, text.tokenizer.token_to_id("a")
    assert letter is not None
    assert _streamed(text, [byte + 0xC3, byte + 0xA9, byte + 0xC3, letter]) == f"é{REPLACEMENT_CHARACTER}a"


@pytest.mark.fast
def test_end_tokens_come_from_the_generation_settings(tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    source = tmp_path / "model"
    byte_tokenizer().save_pretrained(source, save_jinja_files=False)
    assert "chat_template" in json.loads((source / "tokenizer_config.json").read_text())
    (source / "config.json").write_text(json.dumps({"model_type": "llama", "eos_token_id": 7}))

    def saved() -> TextCodec:
        return text_of(AutoTokenizer.from_pretrained(source), tmp_path / "package")

    assert saved().eos == {1, 7}
    (source / "generation_config.json").write_text(json.dumps({"eos_token_id": [1, 2]}))
    assert saved().eos == {1, 2}
    assert saved().chat is not None, "a template inside tokenizer_config.json is found too"


@pytest.mark.fast
def test_transformers_is_not_imported(tmp_path: Path) -> None:
    save = text_of(byte_tokenizer(), tmp_path)
    code = (
        "import sys\n"
        "from inlay.runtime.text_codec import TextCodec\n"
        "text = TextCodec.load(sys.argv[1])\n"
        "ids = text.encode_chat([{'role': 'user', 'content': 'fox'}])\n"
        "assert text.decode(text.encode('fox')) == 'fox'\n"
        "from inlay.runtime import load\n"
        "heavy = {'transformers', 'torch._inductor', 'torch._dynamo'} & set(sys.modules)\n"
        "assert not heavy, heavy\n"
        "print(ids)"
    )
    run = subprocess.run([sys.executable, "-c", code, str(tmp_path)], capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    assert json.loads(run.stdout) == save.encode_chat([{"role": "user", "content": "fox"}])


@pytest.mark.fast
@pytest.mark.parametrize(
    ("file", "content", "sentence"),
    [
        ("text.json", None, "text.json is missing"),
        ("text.json", '{"eos": ["x"], "special_tokens": {}}', "text.json is damaged"),
        ("text.json", '{"eos": [1]', "text.json is damaged"),
        ("tokenizer.json", None, "cannot be read"),
        ("tokenizer.json", '{"version": "1.0"', "cannot be read"),
    ],
)
def test_damaged_packages(tmp_path: Path, file: str, content: str | None, sentence: str) -> None:
    text_of(byte_tokenizer(), tmp_path)
    (tmp_path / file).unlink()
    if content is not None:
        (tmp_path / file).write_text(content)
    with pytest.raises(ModelError, match=sentence):
        TextCodec.load(tmp_path)


@pytest.mark.fast
def test_a_tokenizer_in_python_is_refused(tmp_path: Path) -> None:
    from transformers import ByT5Tokenizer

    with pytest.raises(ModelError, match="ByT5Tokenizer runs in Python only"):
        text_of(ByT5Tokenizer(), tmp_path)


@pytest.mark.fast
def test_without_a_chat_template(tmp_path: Path) -> None:
    text = text_of(fallback_tokenizer(), tmp_path)
    with pytest.raises(UsageError, match="no chat template"):
        text.encode_chat(CONVERSATIONS[0])

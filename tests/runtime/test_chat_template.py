"""Chat templates render as transformers renders them."""

from __future__ import annotations

from typing import Any

import pytest

from inlay.errors import ModelError, UsageError
from inlay.runtime.chat_template import ChatTemplate
from tests.text_models import byte_tokenizer

pytestmark = pytest.mark.fast

MESSAGES: list[dict[str, Any]] = [
    {"role": "user", "content": 'Say "<b>ä</b>" & go\n'},
    {"role": "assistant", "content": "ok", "extra": [1, None]},
]
TEMPLATES = {
    "filters": "{{ messages | tojson }}|{{ messages | tojson(indent=2) }}|{{ messages[0].content | trim | upper }}",
    "blocks": "  {% for m in messages %}\n    {{ m.role }}\n  {%- if loop.last %}\n.{% endif %}\n{% endfor %}\n",
    "loop controls": "{% for m in messages %}{% if loop.index == 2 %}{% break %}{% endif %}{{ m.content }}{% endfor %}",
    "generation": "{% for m in messages %}{% generation %}{% set x = m.role %}{{ x }}{% endgeneration %}{% endfor %}",
    "namespace": "{% set n = namespace(n=0) %}{% for m in messages %}{% set n.n = n.n + 1 %}{% endfor %}{{ n.n }}",
    "self": "{{ namespace(self=3).self }}",
    "dict": "{{ dict(a=1)['a'] }}",
    "special tokens": "{{ bos_token }}{{ messages[0].content }}{{ eos_token }}{{ pad_token is defined }}",
    "nothing else": "{{ tools is none }}{{ documents is none }}{{ add_generation_prompt }}{{ missing }}",
    "date": "{{ strftime_now('%Y') | length }}",
    "methods": "{{ messages[0].content.split(' ')[0] }}{{ messages[1].items() | list | length }}",
}


@pytest.mark.parametrize("name", TEMPLATES)
def test_as_transformers(name: str) -> None:
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = TEMPLATES[name]
    expected = tokenizer.apply_chat_template(MESSAGES, tokenize=False, add_generation_prompt=True)
    assert ChatTemplate(TEMPLATES[name], tokenizer.special_tokens_map).render(MESSAGES) == expected


@pytest.mark.parametrize(
    ("template", "sentence"),
    [
        ("{{ raise_exception('roles must alternate') }}", "rejects the messages: roles must alternate"),
        ("{{ messages[0].nothing.deeper }}", "rejects"),
        ("{{ messages[0].content + 1 }}", "rejects"),
        ("{{ ''.__class__.__mro__ }}", "rejects"),
        ("{{ messages.append(1) }}", "rejects"),
        ("{% set ns = namespace(__class__=1) %}", "private name"),
        ("{% set ns = namespace() %}{% set ns.__init__ = 1 %}", "private name"),
    ],
)
def test_refusals_are_sentences(template: str, sentence: str) -> None:
    with pytest.raises(UsageError, match=sentence):
        ChatTemplate(template, {}).render(MESSAGES)


def test_not_a_template() -> None:
    with pytest.raises(ModelError, match="has a syntax error"):
        ChatTemplate("{% if %}", {}).render(MESSAGES)


@pytest.mark.parametrize(
    "wrong",
    [[], ["hello"], [{"content": "no role"}], [{"role": "user", "content": object()}]],
    ids=["empty", "a text", "no role", "an object"],
)
def test_not_a_conversation(wrong: Any) -> None:
    with pytest.raises(UsageError, match=r"A conversation|A message"):
        ChatTemplate("", {}).render(wrong)

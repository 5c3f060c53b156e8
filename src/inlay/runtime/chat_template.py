"""Chat templates: render messages to a prompt, with the same result as transformers but without importing it.

Templates come with a model, so they are untrusted code. They run in jinja2's sandbox and get plain data only.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from contextlib import suppress
from datetime import datetime
from functools import cached_property
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from jinja2 import TemplateError, TemplateSyntaxError, nodes
from jinja2.exceptions import SecurityError
from jinja2.ext import Extension, loopcontrols
from jinja2.meta import find_undeclared_variables
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace

from inlay.errors import ModelError, UsageError, one_line
from inlay.runtime.tool_format import Markup, explain_tools, shorten_ids

if TYPE_CHECKING:
    from jinja2 import Environment, Template
    from jinja2.parser import Parser

_RESERVED = frozenset({"messages", "tools", "documents", "add_generation_prompt"})
Messages = Sequence[Mapping[str, Any]]
"""A conversation: `[{"role": "user", "content": "Hello"}]`."""


class ChatTemplate:
    """The chat template of a model and the special tokens that it may use.

    >>> source = "{% for m in messages %}{{ m.role }}: {{ m.content }}{{ end }}{% endfor %}"
    >>> ChatTemplate(source, {"end": "."}).render([{"role": "user", "content": "Hello"}])
    'user: Hello.'
    """

    def __init__(self, source: str, special_tokens: Mapping[str, str]) -> None:
        self.source = source
        self.special_tokens = dict(special_tokens)

    def render(
        self,
        messages: Messages,
        tools: Sequence[Mapping[str, Any]] = (),
        options: Mapping[str, Any] = MappingProxyType({}),
    ) -> str:
        """Return the prompt for the next message of this conversation. `options` are variables of the template.

        If the template shows no tools, a message does.
        """
        unknown = sorted(options.keys() - self.variables | options.keys() & (_RESERVED | self.special_tokens.keys()))
        if unknown:
            usual = ", ".join(sorted(self.variables - _RESERVED - self.special_tokens.keys())) or "none"
            raise UsageError(f"The chat template of this model has no option {unknown[0]}.", f"Its options: {usual}.")
        template, plain = self._compiled, _plain(messages)
        if not self.markup.shows_tools:
            has_calls = any(each["role"] == "tool" or each.get("tool_calls") for each in plain)
            if tools or has_calls:
                plain, tools = explain_tools(plain, tools, has_system=self._has_system), ()
        if self.markup.has_short_ids:
            plain = shorten_ids(plain)
        shown = [{"type": "function", "function": dict(each)} for each in tools] or None
        variables = {**options, "messages": plain, "tools": shown, "documents": None, "add_generation_prompt": True}
        try:
            prompt = template.render(**{**self.special_tokens, **variables})
            prompt.encode()  # JSON allows halves of characters, tokenizers do not
            return prompt
        except Exception as error:  # untrusted template code may raise anything
            raise UsageError(
                f"The chat template of this model rejects the messages: {one_line(error)}.",
                "Change the roles or their order, or pass the prompt as plain text.",
            ) from error

    @cached_property
    def _has_system(self) -> bool:
        """Whether the template shows a system message. Some raise an error for one, others leave it out."""
        shown, asked = "which of these words", "are in the prompt"
        messages = [{"role": "system", "content": shown}, {"role": "user", "content": asked}]
        with suppress(Exception):  # untrusted template code may raise anything
            return shown in self._compiled.render(
                **self.special_tokens, messages=messages, tools=None, documents=None, add_generation_prompt=True
            )
        return False

    @cached_property
    def markup(self) -> Markup:
        """How the model writes tool calls and reasoning."""
        return Markup.of(self.source, self.variables)

    @cached_property
    def variables(self) -> frozenset[str]:
        """The variables that the template reads."""
        self._compiled  # noqa: B018 - reports syntax errors
        environment = _environment()
        return frozenset(find_undeclared_variables(environment.parse(self.source))) - environment.globals.keys()

    @cached_property
    def _compiled(self) -> Template:
        try:
            return _environment().from_string(self.source)
        except TemplateSyntaxError as error:
            raise ModelError(
                f"The chat template of this model has a syntax error: {one_line(error)}.",
                "Fix chat_template.jinja, or pass the prompt as plain text.",
            ) from error


def _plain(messages: Messages) -> list[dict[str, Any]]:
    """Return messages as plain JSON data, so that untrusted templates get no objects with methods."""
    if not messages or any(not isinstance(message, Mapping) or "role" not in message for message in messages):
        raise UsageError(
            "A conversation must be a list of at least one message, and each message must have a role.",
            'Pass a list such as [{"role": "user", "content": "Hello"}].',
        )
    try:
        plain: list[dict[str, Any]] = json.loads(json.dumps([dict(message) for message in messages]))
    except (TypeError, ValueError) as error:
        raise UsageError(f"A message cannot be written as JSON: {one_line(error)}.", "Use text.") from error
    return plain


class _GenerationTag(Extension):
    """`{% generation %}` marks assistant text for training. Here its content is rendered unchanged."""

    tags = {"generation"}  # noqa: RUF012 - jinja2 declares it so

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        return nodes.Scope(parser.parse_statements(("name:endgeneration",), drop_needle=True), lineno=line)


class _PublicNamespace(Namespace):
    """A namespace that rejects private names, through which a template could reach the interpreter."""

    def __init__(*args: Any, **attributes: Any) -> None:  # an attribute may be called self
        self, *given = args
        values = dict(*given, **attributes)
        for name in values:
            _check_public(name)
        Namespace.__init__(self, values)

    def __setitem__(self, name: str, value: Any) -> None:
        _check_public(name)
        super().__setitem__(name, value)


def _check_public(name: object) -> None:
    if str(name).startswith("_"):
        raise SecurityError(f"the template sets {name!r}, a private name")


def _raise_exception(message: str) -> None:
    raise TemplateError(message)


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Return JSON without HTML escapes, unlike jinja2's own filter."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _environment() -> Environment:
    """Return a jinja2 environment as chat templates expect it; see `_compile_jinja_template` of transformers."""
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationTag, loopcontrols]
    )
    environment.filters["tojson"] = _tojson
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
    environment.globals["namespace"] = _PublicNamespace
    return environment

"""The part of the site that is made when it is built: the reference, and the README's sections on the start page.

mkdocs.yml names this file under `hooks`. What it makes is not committed.

- `reference/commands.md` says what `--help` says, `reference/transforms.md` what the registry holds,
  `reference/python/*.md` what the docstrings of each package's `__all__` say.
- A line that is nothing but a link to a section of the README becomes that section.
- A link to a file of the repository that is no page of the site becomes plain text with the file's path. A file that
  does not exist stays a link, which a strict build refuses.
"""

from __future__ import annotations

import ast
import inspect
import re
from enum import Enum
from importlib import import_module
from itertools import pairwise
from pathlib import Path
from textwrap import dedent
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

ROOT = Path(__file__).resolve().parents[1]
PACKAGES = (
    *("", "frontend", "program", "rewrite", "transforms", "lowering.state", "lowering.compiled_program"),
    *("package", "integrations", "runtime", "insight", "config", "testing"),
)
"""Folders under src/inlay whose `__all__` is for others; the first is Inlay itself."""
_WIDTH = 100
_FENCES = re.compile(r"(^```.*?^```$)", re.DOTALL | re.MULTILINE)
_SECTION = re.compile(r"^\[[^\]]+\]\(\.\./README\.md#([\w-]+)\)$", re.MULTILINE)
_UPWARD = re.compile(r"\[([^\]]+)\]\(((?:\.\./)+[^)\s#]+)(?:#[^)\s]*)?\)")


def on_files(files: Any, config: Any) -> Any:
    """MkDocs asks for the list of files: the generated pages join it."""
    from mkdocs.structure.files import File

    for path, text in pages().items():
        files.append(File.generated(config, path, content=text))
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, **_: Any) -> str:
    """MkDocs is about to render a page."""
    readme = sections((ROOT / "README.md").read_text())
    markdown = _SECTION.sub(lambda found: _from_readme(readme, found[1]), markdown)
    folder = (Path(config["docs_dir"]) / page.file.src_uri).parent
    return _outside_fences(markdown, lambda text: plain_links(text, folder, Path(config["docs_dir"])))


def pages() -> dict[str, str]:
    """Path → text of every generated page."""
    made = {"reference/commands.md": commands(), "reference/transforms.md": transforms()}
    return made | {f"reference/python/{package or 'inlay'}.md": python(package) for package in PACKAGES}


# The README


def sections(readme: str) -> dict[str, str]:
    """Anchor → section of the README, with links as they are from docs/. The first one has no heading."""
    title, first, rest = readme.partition("\n## ")
    found = {"inlay": title.partition("\n")[2].strip()}
    for text in (first + rest).split("\n## ")[1:]:
        heading = text.partition("\n")[0]
        found[heading.lower().replace(" ", "-")] = f"## {text.strip()}"
    return {anchor: _outside_fences(text, _from_docs) for anchor, text in found.items()}


def _from_readme(readme: Mapping[str, str], anchor: str) -> str:
    if anchor not in readme:
        from mkdocs.exceptions import PluginError

        raise PluginError(f"README.md has no section #{anchor}. It has {', '.join(readme)}.")
    return readme[anchor]


def _from_docs(text: str) -> str:
    """Links that are right in the README, made right for a page in docs/."""
    text = re.sub(r"\]\((?!https?:|#|docs/)", "](../", text)
    return text.replace("[docs/", "[").replace("](docs/", "](")


def plain_links(text: str, folder: Path, docs: Path) -> str:
    """Links that lead out of `docs` become text.

    >>> here = ROOT / "docs"
    >>> plain_links("[the rules](../CONTRIBUTING.md), [`src/inlay`](../src/inlay)", here, here)
    'the rules (`CONTRIBUTING.md`), `src/inlay`'
    >>> plain_links("[gone](../no/such/file.py)", here, here)
    '[gone](../no/such/file.py)'
    """

    def plain(found: re.Match[str]) -> str:
        target = (folder / found[2]).resolve()
        if target.is_relative_to(docs) or not target.exists() or not target.is_relative_to(ROOT):
            return found[0]
        path = f"`{target.relative_to(ROOT)}`"
        return path if found[1].strip("`") == path.strip("`") else f"{found[1]} ({path})"

    return _UPWARD.sub(plain, text)


def _outside_fences(markdown: str, change: Callable[[str], str]) -> str:
    parts = _FENCES.split(markdown)
    return "".join(part if part.startswith("```") else change(part) for part in parts)


# The command line


def commands() -> str:
    """Every command, as `--help` has it."""
    import typer

    from inlay.cli.main import app

    top = typer.main.get_command(app)
    found = list(_commands(top, "inlay"))
    lines = [
        "# Every command",
        "This page is what `inlay --help` and `inlay COMMAND --help` print. [Command line](../cli.md) says what MODEL"
        " means, what is printed for machines, and more.",
        _plain(top.help or ""),
        "\n".join(
            ["| command | does |", "|---|---|"]
            + [f"| [`{name}`](#{name.replace(' ', '-')}) | {_first_sentence(each)} |" for name, each in found]
        ),
        "## Before the command",
        *_parameters(top, "inlay"),
        _plain(top.epilog or ""),
    ]
    for name, command in found:
        lines += [f"## {name}", *_command(command, name)]
    return "\n\n".join(lines) + "\n"


def _commands(group: Any, name: str) -> Iterator[tuple[str, Any]]:
    """All commands below a group, those of groups in it too."""
    for key, command in group.commands.items():
        if hasattr(command, "commands"):
            yield from _commands(command, f"{name} {key}")
        elif not command.hidden:
            yield f"{name} {key}", command


def _command(command: Any, name: str) -> list[str]:
    usage = command.get_usage(_context(command, name)).removeprefix("Usage: ")
    lines = [f"```text\n{' '.join(usage.split())}\n```"]
    for paragraph in inspect.cleandoc(command.help or "").split("\n\n"):
        text, example, code = paragraph.partition("Example: ")
        lines.append(f"```bash\n{_plain(code)}\n```" if example and not text else _plain(paragraph))
    return lines + _parameters(command, name)


def _parameters(command: Any, name: str) -> list[str]:
    """Arguments and options, each with what `--help` says of it."""
    context = _context(command, name)
    records = [each.get_help_record(context) for each in command.get_params(context)]
    return [f"`{' '.join(names.split())}`\n:   {_defaults(text)}" for names, text in filter(None, records)]


def _context(command: Any, name: str) -> Any:
    return command.context_class(command, info_name=name)


def _defaults(text: str) -> str:
    """`  [default: 3; x>=1]` at the end of a help text, as a sentence of its own."""
    words, bracket, rest = text.rpartition("  [")
    return f"{words} *{rest.removesuffix(']')}*" if bracket and rest.endswith("]") else text


def _first_sentence(command: Any) -> str:
    return _plain((command.help or "").partition("\n\n")[0])


def _plain(text: str) -> str:
    """Without the terminal's markup."""
    return " ".join(re.sub(r"\[/?(?:bold|dim|italic)?\]", "", text).split())


# Transforms


def transforms() -> str:
    """Every transform of Inlay's own, in the order of a build."""
    from inlay.config import resolve_config
    from inlay.transforms import TransformOptions, configure, registry

    on = {step.transform.name: step.transform.options.enabled for step in configure(resolve_config())}
    known = {name: cls for name, cls in registry().items() if cls.__module__.startswith("inlay.")}
    ordered = [known[name] for name in on] + [cls for name, cls in known.items() if name not in on]
    rows = [
        f"| [`{cls.name}`](#{cls.name}) | {cls.summary()} | {cls.stage.value}"
        f" | {'on' if on.get(cls.name) else 'off'} | {cls.numerics.value} |"
        for cls in ordered
    ]
    lines = [
        "# Every transform",
        "What `inlay passes` lists, in the order a build runs them. [In-place state](../in_place.md) is about those"
        " that keep state, [What matches where](../matches.md) counts them over architectures.",
        "\n".join(["| transform | what it does | stage | | numbers |", "|---|---|---|---|---|", *rows]),
        f"All have these options: {_fields_in_words(TransformOptions)}.",
        markdown(TransformOptions.__doc__ or ""),
    ]
    for cls in ordered:
        lines += [f"## {cls.name}", *_transform(cls, TransformOptions)]
    return "\n\n".join(lines) + "\n"


def _transform(cls: Any, base: Any) -> list[str]:
    lines = [markdown(cls.__doc__ or ""), f"```text\n{inspect.cleandoc(inspect.getmodule(cls).__doc__ or '')}\n```"]
    if cls.Options is not base:
        lines += [f"Options: {_fields_in_words(cls.Options, leave=base)}.", markdown(cls.Options.__doc__ or "")]
    if cls.anchors:
        lines.append(f"There is work for it where one of these stands: {', '.join(f'`{a}`' for a in cls.anchors)}.")
    return lines


def _fields_in_words(model: Any, leave: Any = None) -> str:
    fields = {name: field for name, field in model.model_fields.items() if not leave or name not in leave.model_fields}
    return ", ".join(f"`{name}: {_annotation(field.annotation)} = {field.default!r}`" for name, field in fields.items())


# Python


def python(package: str) -> str:
    """What a package has for others: signatures and docstrings of its `__all__`."""
    name = f"inlay.{package}" if package else "inlay"
    module = import_module(name)
    lines = [f"# {name}", markdown(module.__doc__ or "")]
    for each in module.__all__:
        if not each.startswith("__"):
            lines += [f"## `{each}`", *_entry(each, getattr(module, each))]
    return "\n\n".join(lines) + "\n"


def _entry(name: str, value: Any) -> list[str]:
    if not inspect.isclass(value):
        return [_code(f"def {name}", value), markdown(value.__doc__ or "")]
    if issubclass(value, Enum):
        return [markdown(value.__doc__ or ""), ", ".join(f"`{each.name}`" for each in value) + "."]
    lines = [_code(f"class {name}", value), markdown(_own_docstring(value))]
    notes = attribute_notes(value)
    lines += [f"`{field}`\n:   {' '.join(text.split())}" for field, text in notes.items()]
    for member, method in vars(value).items():
        if member.startswith("_") or not getattr(_function(method), "__doc__", None):
            continue
        lines.append(f"### `{name}.{member}`")
        if not isinstance(method, property):
            lines.append(_code(f"def {member}", _function(method)))
        lines.append(markdown(_function(method).__doc__ or ""))
    return lines


def _function(method: Any) -> Any:
    """What lies below a method of any kind; nothing for a value."""
    for kind, below in ((property, "fget"), (classmethod, "__func__"), (staticmethod, "__func__")):
        if isinstance(method, kind):
            return getattr(method, below)
    return method if inspect.isfunction(method) else None


def _own_docstring(cls: type) -> str:
    """What was written; dataclasses make one up."""
    text = cls.__doc__ or ""
    return "" if text.startswith(f"{cls.__name__}(") else text


def attribute_notes(cls: type) -> dict[str, str]:
    """Field → the string below it in the source.

    >>> from inlay.runtime import Completion
    >>> attribute_notes(Completion)["tokens: tuple[int, ...]"]
    'All generated tokens, including an end token.'
    >>> attribute_notes(type("Made", (), {}))
    {}
    """
    try:
        (definition,) = ast.parse(dedent(inspect.getsource(cls))).body
    except OSError:  # made, not written
        return {}
    assert isinstance(definition, ast.ClassDef)
    notes = {}
    for field, note in pairwise(definition.body):
        if isinstance(field, ast.AnnAssign) and isinstance(note, ast.Expr) and isinstance(note.value, ast.Constant):
            notes[ast.unparse(field)] = str(note.value.value)
    return notes


class _Written:
    """An annotation or a default as it is to be printed."""

    def __init__(self, text: str) -> None:
        self.text = text

    def __repr__(self) -> str:
        return self.text


def _code(start: str, value: Any) -> str:
    """A signature, on one line where it fits."""
    signature = inspect.signature(value)
    parameters = [
        each.replace(
            annotation=_shown(each.annotation),
            default=each.default if isinstance(each.default, str) else _shown(each.default),
        )
        for name, each in signature.parameters.items()
        if name not in ("self", "cls")
    ]
    result = inspect.Signature.empty if inspect.isclass(value) else _shown(signature.return_annotation)
    text = f"{start}{inspect.Signature(parameters, return_annotation=result)}"
    if len(text) > _WIDTH:
        words = [str(each) for each in parameters]
        named = [each.kind is each.KEYWORD_ONLY for each in parameters]
        if any(named) and not any(each.kind is each.VAR_POSITIONAL for each in parameters):
            words.insert(named.index(True), "*")
        end = text[text.rindex(") -> ") :] if result is not inspect.Signature.empty else ")"
        text = f"{start}(\n" + "".join(f"    {each},\n" for each in words) + end
    return f"```python\n{text}\n```"


def _shown(value: Any) -> Any:
    """Annotations without quotes, and no addresses of objects in memory."""
    if value is inspect.Parameter.empty:
        return value
    text = _annotation(value) if isinstance(value, type) else value if isinstance(value, str) else repr(value)
    return _Written("…" if " at 0x" in text else text)


def _annotation(value: Any) -> str:
    return value.__name__ if isinstance(value, type) else str(value).replace("typing.", "")


def markdown(docstring: str) -> str:
    """A docstring as Markdown: its examples are code.

    >>> markdown("Adds.\\n\\n    >>> 1 + 1\\n    2\\n    ").splitlines()
    ['Adds.', '', '```pycon', '>>> 1 + 1', '2', '```']
    """
    paragraphs = inspect.cleandoc(docstring).strip().split("\n\n")
    fenced = [f"```pycon\n{each}\n```" if each.startswith(">>>") else each for each in paragraphs]
    return "\n\n".join(fenced)

"""Record what Inlay prints, writes and serves; compare it after a refactoring, modulo a map of names.

    python tools/replay.py record /tmp/before          # in the tree before the change
    python tools/replay.py compare /tmp/before         # in the tree after it; exit code 1 if anything else differs

Recorded: transformed programs (folded and full) of every small architecture, their locks, help and `--json` of every
command, a built package (manifest and hashes of generated source), HTTP transcripts and metric names. Timings,
addresses, temporary paths and random ids are replaced by placeholders. `rename_map.toml` lists old and new names; both
sides are compared after every old name in them has been replaced by the new one.
"""

from __future__ import annotations

import argparse
import contextlib
import difflib
import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
import tomllib
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

ROOT = Path(__file__).parents[1]
MAP = Path(__file__).with_name("rename_map.toml")
sys.path[:0] = [str(ROOT), str(ROOT / "tests"), str(ROOT / "src")]
LAST = ("insert_kv_cache.enabled=true", "gather_last_logits.output=logits", "insert_kv_cache.max_length=64")
COMMANDS = (
    *("build", "run", "serve", "prove", "refit", "bench", "inspect", "doctor", "show", "report", "explain"),
    *("candidates", "diff", "bisect", "lock", "check", "streams", "verify", "review", "passes", "config", "cache"),
)
VOLATILE = re.compile(
    r"second|_ms$|^ms$|time|saves|speed|created|^made$|^used$|^size$|bytes_per|gb_s|error|drift|noise|tokens_per|hash"
    r"|sha256|^free|measured|overlap|latency|^key$|factors"
)
"""Fields that differ between two runs of the same code; only the kind of value is compared."""


@dataclass
class Recorder:
    """Writes the output of commands to a folder, with volatile parts replaced."""

    folder: Path
    work: Path

    def write(self, name: str, text: str) -> None:
        """Write one record."""
        path = self.folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(self.stable(text))

    def stable(self, text: str) -> str:
        """Return text without temporary paths, ids, addresses and durations."""
        for folder, name in ((self.work, "WORK"), (ROOT, "ROOT"), (Path.home(), "HOME")):
            text = text.replace(str(folder), f"<{name}>")
        text = re.sub(r"\b0x[0-9a-f]{6,}\b", "<address>", text)
        text = re.sub(r"\b(cmpl|chatcmpl|req)-[0-9a-f-]+", r"\1-<id>", text)
        text = re.sub(r"\b[0-9a-f]{32,64}\b", "<hash>", text)
        text = re.sub(r"\b\d+(\.\d+)? ?(s|ms|µs|us|GB/s|MB/s)\b", r"<time> \2", text)
        return re.sub(r"127\.0\.0\.1:\d+", "127.0.0.1:<port>", text)

    def command(self, name: str, *arguments: str | Path) -> str:
        """Run a command in this process and record its output and exit code."""
        from typer.testing import CliRunner

        from inlay.cli.main import app

        print(f"{time.strftime('%X')} inlay {' '.join(map(str, arguments))}", file=sys.stderr, flush=True)
        result = CliRunner().invoke(app, [str(each) for each in arguments])
        if result.exception and not isinstance(result.exception, SystemExit):
            raise result.exception
        text = result.stdout
        with contextlib.suppress(ValueError):
            text = json.dumps(stable_json(json.loads(text)), indent=1, ensure_ascii=False)
        self.write(name, f"exit code {result.exit_code}\n{text}\n---- stderr\n{result.stderr}")
        return result.stdout


def stable_json(value: Any, key: str = "") -> Any:
    """Return a JSON value with volatile fields replaced by their kind."""
    if isinstance(value, dict):
        return {name: stable_json(each, name) for name, each in value.items()}
    if isinstance(value, list):
        return [stable_json(each, key) for each in value]
    if isinstance(value, (int, float)) and not isinstance(value, bool) and VOLATILE.search(key):
        return "<number>"
    return f"<{type(value).__name__}>" if isinstance(value, float) and value != round(value, 4) else value


def record_help(recorder: Recorder) -> None:
    """Record the `--help` output of every command."""
    recorder.command("help/inlay.txt", "--help")
    for command in COMMANDS:
        recorder.command(f"help/{command}.txt", command, "--help")
    recorder.command("json/passes.txt", "passes", "--json")
    recorder.command("json/config.txt", "config", "--json")
    recorder.command("json/doctor.txt", "doctor", "--json")


def record_programs(recorder: Recorder, models: tuple[str, ...]) -> None:
    """Record the programs after the last transform, and the locks, of every small architecture."""
    from tests.architectures import ARCHITECTURES

    folders = []
    for each in (each for each in ARCHITECTURES if not models or each.model_type in models):
        folder = recorder.work / "models" / each.model_type
        folder.mkdir(parents=True)
        (folder / "config.json").write_text(json.dumps({**each.full_config(), "model_type": each.model_type}))
        folders.append(str(folder))
        dumps = recorder.work / "dumps" / each.model_type
        settings = [word for setting in LAST for word in ("--set", setting)]
        shown: tuple[str | Path, ...] = ("show", folder, "--pass", "pack_weights", *settings, "--dump", dumps, "--json")
        recorder.command(f"programs/{each.model_type}/records.txt", *shown)
        for file in sorted(dumps.iterdir()):
            if file.suffix in (".py", ".json"):
                recorder.write(f"programs/{each.model_type}/{file.name}", file.read_text())
        shutil.rmtree(dumps, ignore_errors=True)
    lock = recorder.work / "matches.lock"
    recorder.command("json/lock.txt", "lock", *folders, "-o", lock)
    recorder.write("matches.lock", lock.read_text())
    recorder.command("text/lock.txt", "lock", *folders[:2], "-o", lock)
    recorder.command("json/check.txt", "check", "--lock", lock, "--json")


def record_commands(recorder: Recorder) -> None:
    """Record the JSON and text output of the commands that inspect a model."""
    llama, gemma = (str(recorder.work / "models" / name) for name in ("llama", "gemma2"))
    recorder.command("json/show.txt", "show", llama, "--json")
    recorder.command("text/show.txt", "show", llama)
    recorder.command("text/show_pass.txt", "show", llama, "--pass", "fuse_add_rms_norm")
    recorder.command("json/explain.txt", "explain", gemma, "--json")
    recorder.command("text/explain.txt", "explain", gemma)
    recorder.command("json/candidates.txt", "candidates", llama, "--no-transforms", "--json")
    recorder.command("text/candidates.txt", "candidates", llama, "--no-transforms", "--markdown")
    recorder.command("json/diff.txt", "diff", llama, gemma, "--json")
    recorder.command("text/diff.txt", "diff", llama, gemma)
    recorder.command("json/verify.txt", "verify", gemma, "--json")
    recorder.command("json/bisect.txt", "bisect", llama, "--oracle", "tokens", "--json")
    recorder.command("json/review.txt", "review", "match_swiglu", "--model", llama, "--json")
    for name, arguments in REFUSED.items():
        recorder.command(f"refused/{name}.txt", *(each.format(work=recorder.work) for each in arguments))


REFUSED = {
    "no_model": ("show", "{work}/nothing"),
    "no_factory": ("show", "models:nothing"),
    "raises": ("show", "models:raises"),
    "not_a_model": ("show", "models:not_a_model"),
    "data_dependent": ("show", "models:data_dependent"),
    "no_pass": ("show", "{work}/models/llama", "--pass", "match_swigly"),
    "no_setting": ("config", "--set", "match_swiglu.enabeld=true"),
    "no_package": ("inspect", "{work}"),
    "no_lock": ("check", "--lock", "{work}/nothing.lock"),
    "no_transform": ("review", "nothing", "--model", "{work}/models/llama"),
    "no_format": ("build", "{work}/models/llama", "-o", "{work}/refused", "--weights", "int3"),
    "no_text": ("run", "{work}/package", ""),
    "sampling": ("run", "{work}/package", "The fox", "--max-tokens", "-3"),
}
"""Invalid commands, whose error messages are recorded."""


def make_source(recorder: Recorder) -> Path:
    """A small Llama with random weights and a tokenizer."""
    import torch
    from tests.models import random_model
    from tests.small_packages import FIELDS
    from tests.text_models import byte_tokenizer

    source = recorder.work / "source"
    torch.manual_seed(0)
    random_model({**FIELDS, "max_position_embeddings": 512, "initializer_range": 0.2}).save_pretrained(source)
    byte_tokenizer().save_pretrained(source)
    return source


def record_package(recorder: Recorder) -> Path:
    """Record a package: the output of build, inspect, prove and run, and its files."""
    source, package = make_source(recorder), recorder.work / "package"
    built = ("build", source, "-o", package, "--max-length", "256", "--max-batch", "4", "--json")
    recorder.command("json/build.txt", *built)
    recorder.command("json/build_again.txt", *(recorder.work / "again" if each is package else each for each in built))
    recorder.command("json/inspect.txt", "inspect", package, "--json")
    recorder.command("text/inspect.txt", "inspect", package)
    recorder.command("json/prove.txt", "prove", package, "--json")
    recorder.command("json/run.txt", "run", package, "The fox", "--max-tokens", "8", "--temperature", "0", "--json")
    recorder.command("json/cache.txt", "cache", "ls", "--json")
    recorder.command("text/refit.txt", "refit", package, "--weights", source)
    recorder.command("text/report.txt", "report", package, "-o", recorder.work / "report.html")
    recorder.write("report.html", (recorder.work / "report.html").read_text())
    folder = package.resolve() / "current" if (package / "current").exists() else package.resolve()
    hashes = []
    for file in sorted(each for each in folder.rglob("*") if each.is_file()):
        name = file.relative_to(folder).as_posix()
        if file.suffix in (".json", ".lock", ".yaml", ".jsonl", ".txt"):
            text = file.read_text()
            if file.suffix == ".json":
                text = json.dumps(stable_json(json.loads(text)), indent=1)
            recorder.write(f"package/{name}", text)
        elif file.suffix in (".cpp", ".h", ".py"):
            code = re.sub(r"^// g\+\+ .*$", "", file.read_text(), flags=re.MULTILINE)  # names a temporary folder
            hashes.append(f"{hashlib.md5(recorder.stable(code).encode()).hexdigest()[:16]} {name}")
        else:
            hashes.append(f"binary {name}")
    recorder.write("package/files.txt", "\n".join(hashes))
    return package


REQUESTS: tuple[tuple[str, str, dict[str, Any] | None], ...] = (
    ("GET", "/health", None),
    ("GET", "/v1/models", None),
    ("GET", "/v1/nothing", None),
    ("POST", "/v1/completions", {"prompt": "The fox", "max_tokens": 6, "temperature": 0}),
    ("POST", "/v1/completions", {"prompt": "The fox", "max_tokens": 6, "temperature": 0, "stream": True}),
    ("POST", "/v1/completions", {"prompt": "The fox", "max_tokens": 4, "temperature": 0, "logprobs": 2}),
    ("POST", "/v1/completions", {"prompt": "The fox", "temprature": 0}),
    ("POST", "/v1/completions", {"prompt": "The fox", "max_tokens": 10**6}),
    ("POST", "/v1/completions", {"prompt": [], "max_tokens": 1}),
    ("POST", "/v1/completions", {"prompt": "x", "temperature": -1}),
    ("POST", "/v1/completions", {"prompt": "x", "model": "other"}),
    (
        "POST",
        "/v1/chat/completions",
        {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 4, "temperature": 0},
    ),
    ("POST", "/v1/chat/completions", {"messages": [{"role": "pirate", "content": "Hi"}], "max_tokens": 4}),
    ("POST", "/v1/chat/completions", {"messages": []}),
    ("GET", "/kv_cache_events", None),
    ("GET", "/metrics", None),
)


def record_http(recorder: Recorder, package: Path) -> None:
    """Record the responses of a server to valid and invalid requests, and the names of its metrics."""
    import httpx

    code = "from inlay.cli.main import main; main()"
    command = [sys.executable, "-c", code, "serve", str(package), "--name", "tiny", "--port", "0"]
    with (recorder.work / "serve.log").open("w") as log:
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=log, text=True)
    try:
        assert process.stdout is not None
        welcome = process.stdout.readline()
        found = re.search(r"http://\S+:(\d+)/v1", welcome)
        assert found, welcome
        recorder.write("http/welcome.txt", welcome)
        for number, (method, path, body) in enumerate(REQUESTS):
            sent = {"model": "tiny", **body} if body is not None else None
            answer = httpx.request(method, f"http://127.0.0.1:{found[1]}{path}", json=sent, timeout=120)
            text = answer.text
            if path == "/metrics":
                lines = (line for line in text.splitlines() if not line.startswith(("# HELP python", "# TYPE python")))
                text = "\n".join(re.sub(r" [-+.\de]+$", "", line) for line in lines)
            elif answer.headers["content-type"].startswith("application/json"):
                text = json.dumps(stable_json(answer.json()), indent=1, ensure_ascii=False)
            text = re.sub(r'"created": ?\d+', '"created": <time>', text)
            recorder.write(f"http/{number:02d}.txt", f"{method} {path} {sent}\n{answer.status_code}\n{text}")
    finally:
        process.terminate()
        process.wait(60)
    log_lines = [json.loads(line) for line in (recorder.work / "serve.log").read_text().splitlines() if line[:1] == "{"]
    recorder.write("http/log_keys.txt", "\n".join(sorted({key for line in log_lines for key in line})))


def record(folder: Path, models: tuple[str, ...] = ()) -> None:
    """Record everything into a folder; with `models`, only the programs and locks of these architectures."""
    import torch

    torch.set_num_threads(1)
    os.environ.update(HF_HUB_OFFLINE="1", TOKENIZERS_PARALLELISM="false", COLUMNS="120", OMP_NUM_THREADS="1")
    os.environ["PYTHONPATH"] = f"{ROOT / 'src'}:{ROOT}:{ROOT / 'tests'}"
    with tempfile.TemporaryDirectory() as work:
        os.environ["XDG_CACHE_HOME"] = f"{work}/cache"
        recorder = Recorder(folder, Path(work))
        record_help(recorder)
        record_programs(recorder, models)
        package = record_package(recorder)
        record_commands(recorder)
        record_http(recorder, package)


def renames() -> Callable[[str], str]:
    """Return a function that maps old names to new ones: modules, messages, options, metrics and JSON keys."""
    table = tomllib.loads(MAP.read_text()) if MAP.exists() else {}
    words = {
        old: new for name in ("modules", "messages", "options", "metrics") for old, new in table.get(name, {}).items()
    }
    keys = _key_groups(table.get("json", {}))
    texts = _replacement(words)

    def key(found: re.Match[str]) -> str:
        return found[0].replace(found[1], keys.get(found[1], found[1]))

    def rename(text: str) -> str:
        return re.sub(r'(?<!\w)"?(\w+)"?:', key, texts(text))

    return rename


def _replacement(words: dict[str, str]) -> Callable[[str], str]:
    ordered = sorted(words, key=len, reverse=True)

    def replaced(text: str) -> str:
        there = [rf"(?<![\w.]){re.escape(each)}(?!\w)" for each in ordered if each in text]
        return re.sub("|".join(there), lambda found: words[found[0]], text) if there else text

    return replaced


def _key_groups(pairs: dict[str, str | list[str]]) -> dict[str, str]:
    """Return a mapping from every old and new key to one common name."""
    group: dict[str, set[str]] = {}
    for old, new in pairs.items():
        joined = {old, *([new] if isinstance(new, str) else new)}
        joined |= {other for each in tuple(joined) for other in group.get(each, ())}
        group |= dict.fromkeys(joined, joined)
    return {name: min(names) for name, names in group.items()}


_VOLATILE_TEXT = (
    (r"^ *<time> s  .*\n", ""),  # progress
    (r"<float>", "<number>"),
    (r"fp_[0-9a-f]{12}|(?<=version    )[0-9a-f]{16}", "<hash>"),
    (r"[0-9.]+ (tokens/s|MB)", r"<number> \1"),
    (r'"(capture|cache|transform|lower|pack|saved|code_bytes)": "?[<>\w.]+"?', r'"\1": <number>'),
    (r'"last_used": "?<?[\w.]+>?"?', '"last_used": <number>'),
    (r"[─━]+", "─"),
    (r" {2,}", " "),
    (r" +$", ""),
)
"""Patterns of text that differs between two runs of the same code, and of column widths."""


def comparable(name: Path, text: str) -> list[str]:
    """Return the lines of a record without volatile text; JSON lines are sorted."""
    for pattern, replacement in _VOLATILE_TEXT:
        text = re.sub(pattern, replacement, text, flags=re.MULTILINE)
    lines = text.splitlines()
    is_json = name.parts[0] == "json" or name.name == "manifest.json"
    return sorted(line.strip(" ,") for line in lines) if is_json else lines


def differences(before: Path, after: Path, *, common: bool = False) -> Iterator[str]:
    """Yield lines that differ between two recordings beyond the map of names; with `common`, only in common records."""
    renamed, changed = renames(), tomllib.loads(MAP.read_text()).get("changed", {})
    old, new = ({p.relative_to(each): p for p in each.rglob("*") if p.is_file()} for each in (before, after))
    moved = {Path(renamed(str(name))): path for name, path in old.items()}
    for name in sorted(moved.keys() & new.keys() if common else {*moved, *new}):
        sides = [comparable(name, renamed(each[name].read_text())) if name in each else [] for each in (moved, new)]
        if sides[0] != sides[1]:
            if str(name) in changed:
                print(f"changed on purpose: {name}: {changed[str(name)]}")
            else:
                yield from difflib.unified_diff(sides[0], sides[1], f"before/{name}", f"after/{name}", lineterm="", n=1)


def main() -> int:
    """Record, or record and compare."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("record", "compare", "diff"))
    parser.add_argument("folder", type=Path)
    parser.add_argument("--after", type=Path, help="with compare: keep the new recording here; with diff: read it")
    parser.add_argument(
        "--models", default="", help="only these architectures, comma-separated, including llama and gemma2"
    )
    given = parser.parse_args()
    if "PYTHONHASHSEED" not in os.environ:  # transformers iterates over sets of names
        os.execve(sys.executable, [sys.executable, *sys.argv], {**os.environ, "PYTHONHASHSEED": "0"})
    models = tuple(filter(None, given.models.split(",")))
    if given.what == "record":
        record(given.folder, models)
        return 0
    after = given.after or Path(tempfile.mkdtemp())
    if given.what == "compare":
        shutil.rmtree(after, ignore_errors=True)
        record(after, models)
    found = list(differences(given.folder, after, common=bool(models)))
    print("\n".join(found) if found else "no difference beyond the map of names")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())

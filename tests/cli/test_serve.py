"""`inlay serve`: how it starts, and what it says when it cannot."""

from __future__ import annotations

import socket
import subprocess
import sys
from typing import TYPE_CHECKING

import httpx
import pytest
from typer.testing import CliRunner

from inlay.cli.main import app
from tests.serve.server_process import NAME, SECONDS, Server
from tests.small_packages import in_new_process

if TYPE_CHECKING:
    from pathlib import Path

LOADED = """
import sys
from inlay.serve.http import server
from inlay.serve.http.app import create_app
from inlay.serve.http.server_context import ServerContext
from inlay.serve.http.settings import ServerSettings
from inlay.runtime.engine import Engine
create_app(ServerContext(Engine.open(sys.argv[1]), ServerSettings("tiny"), server.fingerprint(sys.argv[1]))).__class__
print([name for name in sys.modules if name.startswith(("torch._inductor", "torch._dynamo", "transformers"))])
"""


def _refused(*arguments: str, **env: str) -> tuple[int, str]:
    made = CliRunner().invoke(app, ["serve", *arguments], env={"INLAY_API_KEYS": "", **env})
    return made.exit_code, " ".join(made.stderr.split())


@pytest.mark.fast
@pytest.mark.parametrize(
    ("arguments", "code", "sentence"),
    [
        (("./nowhere", "--port", "0"), 3, "There is no file or folder ./nowhere."),
        (("nowhere", "--host", "0.0.0.0"), 2, "0.0.0.0 is reachable from other machines, and there are no API keys."),
        (("nowhere", "--host", "::"), 2, "or pass --insecure"),
        (("./nowhere", "--host", "0.0.0.0", "--port", "0", "--insecure"), 3, "There is no file or folder ./nowhere."),
        (("nowhere", "--kv-replay", "tcp://127.0.0.1:5558"), 2, "Pass both."),
        (("nowhere", "--max-body", "much"), 2, "'much' is not a size."),
        (("nowhere", "--cache-memory", "-1"), 2, "'-1' is not a size."),
        (("nowhere", "--disk-cache", "kv"), 2, "Blocks on disk need --disk-cache and --disk-cache-size. Pass both."),
        (("nowhere", "--disk-cache-size", "1GB"), 2, "Blocks on disk need --disk-cache and --disk-cache-size."),
        (("nowhere", "--disk-cache", "kv", "--disk-cache-size", "much"), 2, "'much' is not a size."),
        (("nowhere", "--api-key-file", "nowhere"), 2, "The API keys in nowhere cannot be read"),
        (("nowhere", "--host", "203.0.113.1", "--insecure", "--port", "0"), 2, "Cannot listen on 203.0.113.1"),
        (("nowhere", "--port", "99999"), 2, "Cannot listen on 127.0.0.1 port 99999"),
    ],
)
def test_refusals(arguments: tuple[str, ...], code: int, sentence: str) -> None:
    found, said = _refused(*arguments)
    assert (found, sentence in said) == (code, True), said


@pytest.mark.fast
def test_keys_in_the_environment_open_other_addresses() -> None:
    found, said = _refused("./nowhere", "--host", "0.0.0.0", "--port", "0", INLAY_API_KEYS="sk-one")
    assert (found, "There is no file or folder ./nowhere." in said) == (3, True), said


@pytest.mark.fast
def test_a_port_that_is_taken() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        found, said = _refused("nowhere", "--port", str(taken.getsockname()[1]))
    assert (found, "Choose another --port." in said) == (9, True), said


@pytest.mark.fast
def test_what_serving_needs_is_named() -> None:
    code = (
        "import sys; sys.modules['fastapi'] = None\n"
        "from inlay.cli.main import main; sys.argv = ['inlay', 'serve', 'nowhere']; main()"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=SECONDS)
    assert run.returncode == 2
    assert "Serving needs fastapi. pip install 'inlay[serve]'" in " ".join(run.stderr.split())


def test_it_says_where_it_is(package: Path, tmp_path: Path) -> None:
    with Server(package, tmp_path) as server:
        assert f"Serving {NAME} at {server.url}/v1: 4 slots of 4096 tokens" in server.welcome
        assert server.process.stdout is not None
        line = server.process.stdout.readline()
        assert line.startswith(f"Try: curl {server.url}/v1/chat/completions")
        said = subprocess.run(line.removeprefix("Try: "), shell=True, capture_output=True, text=True, timeout=SECONDS)
        assert '"object":"chat.completion"' in said.stdout
        assert server.terminate() == 0
        assert server.process.stdout.read() == "", "nothing else is said there"


def test_names_may_have_slashes(package: Path, tmp_path: Path) -> None:
    with Server(package, tmp_path, "--name", "org/name", "--host", "localhost") as server:
        assert httpx.get(f"{server.url}/v1/models").json()["data"][0]["id"] == "org/name"
        assert httpx.get(f"{server.url}/v1/models/org/name").json()["id"] == "org/name"


def test_nothing_heavy_is_imported(package: Path) -> None:
    assert in_new_process(LOADED, package).stdout.strip() == "[]"

"""Clients that hold lines, bodies and places: others are served."""

from __future__ import annotations

import asyncio
import json
import os
import resource
import socket
import threading
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

import httpx
import pytest
import uvicorn
from uvicorn.server import ServerState

from inlay.serve.http import connection
from inlay.serve.http.admission import AdmissionControl
from inlay.serve.http.errors import ApiError
from tests.serve.server_process import NAME, SECONDS, Server, prompt

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

HEAD = "POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nContent-Length: 900\r\n"


@pytest.fixture(scope="module")
def quick(package: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A server that does not wait for long, with twelve places."""
    options = ("--read-seconds", "1", "--max-concurrent", "12")
    with Server(package, tmp_path_factory.mktemp("log"), *options) as running:
        yield running


def _line(server: Server, sent: str = "") -> socket.socket:
    line = socket.create_connection(("127.0.0.1", server.port), SECONDS)
    line.sendall(sent.encode())
    return line


def _answer(server: Server, **more: Any) -> httpx.Response:
    return httpx.post(f"{server.url}/v1/completions", json=prompt(4, **more), timeout=SECONDS)


def _all(line: socket.socket) -> bytes:
    """What comes until the other side closes."""
    parts = []
    while part := line.recv(1 << 16):
        parts.append(part)
    return b"".join(parts)


@pytest.mark.parametrize(("sent", "second"), [("", False), ("GET", False), (HEAD, False), ("GET", True), (HEAD, True)])
def test_a_header_that_does_not_end(quick: Server, sent: str, second: bool) -> None:
    """Where nothing of a second request comes, the connection is kept for a while."""
    with _line(quick, "GET /healthz HTTP/1.1\r\nHost: localhost\r\n\r\n" if second else "") as line:
        if second:
            answer = b""
            while not answer.endswith(b"\r\n\r\nok\n"):
                answer += line.recv(1 << 16)
        line.sendall(sent.encode())
        said = _all(line)
    assert said.startswith(b"HTTP/1.1 408")
    assert json.loads(said.rpartition(b"\r\n\r\n")[2])["error"]["code"] == "timeout"


def test_a_header_byte_by_byte(quick: Server) -> None:
    """Each byte in time, all of them not."""
    with _line(quick) as line:
        sending = threading.Event()

        def drip() -> None:
            for each in HEAD.encode():
                if sending.wait(0.1):
                    return
                try:
                    line.send(bytes([each]))
                except OSError:
                    return

        thread = threading.Thread(target=drip)
        thread.start()
        try:
            assert _all(line).startswith(b"HTTP/1.1 408")
        finally:
            sending.set()
            thread.join()


def test_a_body_that_does_not_end(quick: Server) -> None:
    with _line(quick, f"{HEAD}\r\n{{") as line:
        assert line.recv(1 << 16).startswith(b"HTTP/1.1 408")


@pytest.mark.parametrize(("count", "sent"), [(12, 1), (80, 99_999)], ids=["small", "as large as may be"])
def test_slow_bodies_keep_nobody_out(package: Path, tmp_path: Path, count: int, sent: int) -> None:
    """More of them than there are places, or than there is memory for."""
    head = HEAD.replace("900", "100000")
    with Server(package, tmp_path, "--max-concurrent", "4", "--max-body", "100000") as running, ExitStack() as lines:
        for _ in range(count):
            lines.enter_context(_line(running, f"{head}\r\n{'{' * sent}"))
        assert _answer(running).status_code == 200
        assert running.figures()["active_requests"] == 0


@pytest.mark.fast
def test_connections_that_come_all_at_once() -> None:
    """On the event loop that everybody has: a connection that was cut off is there for a moment longer."""

    async def burst() -> list[int]:
        state = ServerState()
        config = uvicorn.Config(lambda *_: None, lifespan="off", log_config=None)
        loop = asyncio.get_running_loop()
        server = await loop.create_server(lambda: Small(config, state, {}), "127.0.0.1", 0)
        port, lines, counts = server.sockets[0].getsockname()[1], [], []
        for _ in range(5):
            lines += [await asyncio.open_connection("127.0.0.1", port) for _ in range(40)]
            await asyncio.sleep(0.05)
            counts.append(len(state.connections))
        for _, writer in lines:
            writer.close()
        server.close()
        return counts

    class Small(connection.Connection):
        max_connections = 20

    with asyncio.Runner(loop_factory=asyncio.new_event_loop) as runner:
        assert max(runner.run(burst())) <= 20


def _with_files(package: Path, folder: Path, count: int) -> Server:
    """A server whose process may have so many files."""
    code = f"import resource; resource.setrlimit(resource.RLIMIT_NOFILE, ({count}, {count}))"
    (folder / "sitecustomize.py").write_text(code)
    paths = os.pathsep.join(filter(None, (str(folder), os.environ.get("PYTHONPATH"))))
    return Server(package, folder, env={"PYTHONPATH": paths})


@pytest.mark.parametrize("count", [64, pytest.param(1000, marks=pytest.mark.nightly)])
def test_idle_connections_keep_nobody_out(package: Path, tmp_path: Path, count: int) -> None:
    """More connections than the process may have files."""
    with _with_files(package, tmp_path, count + 36) as running, ExitStack() as lines:
        held = [lines.enter_context(_line(running, ("", "POST", f"{HEAD}\r\n{{")[at % 3])) for at in range(count)]
        assert _answer(running).status_code == 200
        with pytest.raises(ConnectionResetError):  # the oldest ones had to go
            held[0].recv(1)


def test_who_is_being_answered_stays(package: Path, tmp_path: Path) -> None:
    with _with_files(package, tmp_path, 80) as running:
        body = prompt(800, stream=True)
        with (
            httpx.stream("POST", f"{running.url}/v1/completions", json=body, timeout=SECONDS) as answer,
            ExitStack() as lines,
        ):
            assert answer.status_code == 200
            for _ in range(60):
                lines.enter_context(_line(running))
            assert answer.read().endswith(b"data: [DONE]\n\n")


def test_many_choices_keep_nobody_out(quick: Server) -> None:
    """Six requests of four choices each, for longer than anybody waits: who asks once is answered first."""
    body = prompt(2000, n=4)
    done: list[int] = []

    def ask() -> None:
        response = httpx.post(f"{quick.url}/v1/completions", json=body, timeout=SECONDS)
        done.append(response.status_code)

    threads = [threading.Thread(target=ask) for _ in range(6)]
    for thread in threads:
        thread.start()
    quick.wait_until(lambda figures: figures["active_requests"] >= 8)
    assert _answer(quick).status_code == 200
    for thread in threads:
        thread.join()
    assert sorted(set(done)) in ([200, 429], [200])


@pytest.mark.fast
def test_a_share_of_the_places() -> None:
    async def shares() -> None:
        places = AdmissionControl(most=8, slots=2)
        one = [places.admit("one") for _ in range(6)]
        with pytest.raises(ApiError, match="This API key has used its share"):
            places.admit("one")
        two = places.admit("two")
        with pytest.raises(ApiError, match="at its request limit"):
            two.acquire(1)
        last = places.admit("two")
        for place in (*one, two, last):
            place.release()
        several = places.admit("")
        several.acquire(5)
        assert places.active == 6
        with pytest.raises(ApiError):
            several.acquire(1)
        single = [places.admit(""), places.admit("")]
        with pytest.raises(ApiError):
            places.admit("")
        assert len(single) == 2

    asyncio.run(shares())


@pytest.mark.parametrize("host", ["example.org", "example.org:8000", "127.0.0.1.example.org", ""])
def test_other_names_of_this_machine(quick: Server, host: str) -> None:
    said = httpx.get(f"{quick.url}/v1/kv_cache/snapshot", headers={"Host": host}, timeout=SECONDS)
    assert (said.status_code, said.json()["error"]["code"]) == (421, "wrong_host")


@pytest.mark.parametrize("host", ["localhost", "LOCALHOST:1", "127.0.0.1", "[::1]:80"])
def test_names_of_this_machine(quick: Server, host: str) -> None:
    assert httpx.get(f"{quick.url}/v1/models", headers={"Host": host}, timeout=SECONDS).json()["data"][0]["id"] == NAME


def test_cache_routes_can_be_off(package: Path, tmp_path: Path) -> None:
    with Server(package, tmp_path, "--no-kv-routes") as running:
        assert httpx.get(f"{running.url}/v1/kv_cache/snapshot", timeout=SECONDS).status_code == 404


@pytest.mark.fast
def test_how_many_connections(monkeypatch: pytest.MonkeyPatch) -> None:
    for allowed, most in ((1 << 20, 1024), (256, 192), (10, 1), (resource.RLIM_INFINITY, 1024)):
        monkeypatch.setattr(resource, "getrlimit", lambda _, allowed=allowed: (allowed, allowed))
        assert connection.max_connections() == most

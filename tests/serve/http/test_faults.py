"""Faults, each on a server in a process of its own: clients that go or do not read, signals, a full cache."""

from __future__ import annotations

import os
import signal
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import httpx
import pytest

from tests.serve.server_process import NAME, SECONDS, Server, prompt, stream

if TYPE_CHECKING:
    from pathlib import Path

MANY = 4000


def _idle(figures: dict[str, float]) -> bool:
    return not (figures["decode_sequences"] or figures["waiting_requests"] or figures["active_requests"])


def _ask(line: socket.socket, body: dict[str, Any]) -> None:
    content = httpx.Request("POST", "http://server/v1/completions", json=body).content
    head = f"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(content)}\r\n"
    line.sendall(f"{head}Content-Type: application/json\r\n\r\n".encode() + content)


@pytest.mark.parametrize("streaming", [True, False])
def test_a_client_that_goes_is_not_answered(server: Server, streaming: bool) -> None:
    before = server.figures()
    with socket.create_connection(("127.0.0.1", server.port), SECONDS) as line:
        _ask(line, prompt(MANY, stream=streaming))
        server.wait_until(lambda now: now["generation_tokens_total"] >= before["generation_tokens_total"] + 20)
        if streaming:
            assert line.recv(1 << 16).startswith(b"HTTP/1.1 200")
    after = server.wait_until(_idle)
    assert after['finished_total{reason="cancelled"}'] == before['finished_total{reason="cancelled"}'] + 1
    made = after["generation_tokens_total"] - before["generation_tokens_total"]
    assert made < MANY / 2, "nobody wants them"


def test_a_client_that_goes_while_it_waits(package: Path, tmp_path: Path) -> None:
    """It never gets a slot."""
    with Server(package, tmp_path) as server, ThreadPoolExecutor(4) as threads:
        busy = [threads.submit(_length, server, 600) for _ in range(4)]
        server.wait_until(lambda now: now["decode_sequences"] == 4)
        with socket.create_connection(("127.0.0.1", server.port), SECONDS) as line:
            _ask(line, prompt(MANY))
            server.wait_until(lambda now: now["waiting_requests"] == 1)
        server.wait_until(lambda now: now["waiting_requests"] == 0 and now['finished_total{reason="cancelled"}'] == 1)
        assert [each.result() for each in busy] == [600] * 4
        assert server.figures()["generation_tokens_total"] == 2400


def _length(server: Server, count: int) -> int:
    """How many tokens of an answer came."""
    response = httpx.post(f"{server.url}/v1/completions", json=prompt(count), timeout=SECONDS)
    return int(response.raise_for_status().json()["usage"]["completion_tokens"])


def test_clients_that_go_while_they_send(server: Server) -> None:
    """Half a request is none."""
    before = server.figures()
    for cut in (0, 10, 60, 130):
        with socket.create_connection(("127.0.0.1", server.port), SECONDS) as line:
            line.sendall(
                b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: 9999\r\n\r\n{" + b" " * 99
            )
            line.sendall(b"x" * cut)
    after = server.wait_until(_idle)
    assert after["accepted_total"] == before["accepted_total"]


@pytest.mark.nightly
def test_a_reader_that_does_not_read(package: Path, tmp_path: Path) -> None:
    """It holds its place, nothing grows without bound, and at last it is cut off; others do not notice."""
    with Server(package, tmp_path, "--max-concurrent", "2", "--write-seconds", "12") as server:
        _length(server, 50)
        with socket.socket() as line:
            line.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            line.connect(("127.0.0.1", server.port))
            _ask(line, prompt(2000, stream=True, logprobs=5))
            server.wait_until(
                lambda now: now["active_requests"] == 1 and not now["decode_sequences"] and now["accepted_total"] == 2
            )
            assert _length(server, 50) == 50
            memory = server.memory()
            after = server.wait_until(_idle)
            assert after['finished_total{reason="length"}'] == 3, "the answer was made, and not sent"
            assert server.memory() < memory + (8 << 20)
            line.settimeout(SECONDS)
            with pytest.raises(ConnectionResetError):
                _read_all(line)
        assert server.terminate() == 0
        assert "slow_reader" in [each.get("error") for each in server.lines()]


def _read_all(line: socket.socket) -> None:
    while line.recv(1 << 16):
        pass


def test_kill_and_restart(package: Path, tmp_path: Path) -> None:
    """Nothing that a dead server leaves behind is in the way of the next one, which answers the same."""
    with Server(package, tmp_path) as first:
        with stream(first, MANY) as response:
            assert response.status_code == 200
            first.process.send_signal(signal.SIGKILL)
            with pytest.raises(httpx.RemoteProtocolError):
                response.read()
        assert first.process.wait(SECONDS) == -signal.SIGKILL
        with Server(package, tmp_path, "--port", str(first.port)) as second:
            assert second.port == first.port
            assert httpx.get(f"{second.url}/readyz").status_code == 200
            assert _length(second, 30) == 30
            assert second.terminate() == 0


@pytest.mark.parametrize("streaming", [True, False])
def test_sigterm_under_load_loses_nothing(package: Path, tmp_path: Path, streaming: bool) -> None:
    """Everything that was accepted is answered to its end; everything else is told to go elsewhere."""
    with Server(package, tmp_path, "--drain-seconds", "100") as server, ThreadPoolExecutor(24) as threads:
        results = [threads.submit(_outcome, server, streaming, 300) for _ in range(24)]
        server.wait_until(lambda now: now["accepted_total"] >= 20)
        server.process.send_signal(signal.SIGTERM)
        late = _outcomes_of_late_ones(server)
        found = [each.result() for each in results]
        assert server.process.wait(SECONDS) == 0
        statuses = [status for status, _ in found]
        assert statuses.count(200) >= 20
        assert {status for status, _ in [*found, *late]} <= {200, 503, None}
        assert all(complete for status, complete in found if status == 200)
        ends = [line for line in server.lines() if line.get("status") == 200 and "tokens" in line]
        assert len(ends) == statuses.count(200), "as many as were accepted"
        assert {line["tokens"] for line in ends} == {300}


def _outcome(server: Server, streaming: bool, count: int) -> tuple[int | None, bool]:
    """The status, None if nobody listens any more; and whether the answer is whole."""
    try:
        response = httpx.post(f"{server.url}/v1/completions", json=prompt(count, stream=streaming), timeout=SECONDS)
    except httpx.ConnectError:
        return None, False
    if response.status_code != 200:
        return response.status_code, False
    if streaming:
        return 200, response.text.endswith("data: [DONE]\n\n") and '"finish_reason":"length"' in response.text
    return 200, response.json()["usage"]["completion_tokens"] == count


def _outcomes_of_late_ones(server: Server) -> list[tuple[int | None, bool]]:
    """Requests that come while the server ends."""
    found, deadline = [], time.monotonic() + SECONDS
    while time.monotonic() < deadline:
        try:
            ready = httpx.get(f"{server.url}/readyz", timeout=SECONDS)
        except httpx.TransportError:
            break
        if ready.status_code == 503:
            found.append(_outcome(server, False, 5))
            refused = httpx.post(f"{server.url}/v1/completions", json=prompt(5), timeout=SECONDS)
            assert refused.status_code == 503
            assert refused.headers["retry-after"] == "1"
            assert refused.json()["error"]["code"] == "shutting_down"
            return found
    pytest.fail("the server never said that it was ending")


def test_a_drain_does_not_last_for_ever(package: Path, tmp_path: Path) -> None:
    with Server(package, tmp_path, "--drain-seconds", "0.5") as server, stream(server, MANY) as response:
        server.process.send_signal(signal.SIGTERM)
        assert '"code":"shutting_down"' in response.read().decode().splitlines()[-2], "the reader is told"
        assert server.process.wait(SECONDS) == 0


@pytest.mark.parametrize("second", [signal.SIGTERM, signal.SIGINT])
def test_a_second_signal_ends_it_now(package: Path, tmp_path: Path, second: int) -> None:
    with Server(package, tmp_path, "--drain-seconds", "100") as server, stream(server, MANY) as response:
        server.process.send_signal(signal.SIGTERM)
        _until_draining(server)
        server.process.send_signal(second)
        assert server.process.wait(SECONDS) == 0
        with pytest.raises(httpx.TransportError):
            response.read()


def _until_draining(server: Server) -> None:
    deadline = time.monotonic() + SECONDS
    while httpx.get(f"{server.url}/readyz", timeout=SECONDS).status_code != 503:
        assert time.monotonic() < deadline


@pytest.mark.parametrize("memory", ["0", "20K", "200K"])
def test_a_full_cache_changes_no_answer(package: Path, tmp_path: Path, server: Server, memory: str) -> None:
    """Not room for a prompt, or for a few of them: what does not fit is computed again."""
    prompts = [f"{word} " * 60 for word in ("fox", "dog", "café", "你好", "fox")]

    def answers(which: Server) -> list[str]:
        with ThreadPoolExecutor(5) as threads:
            return list(threads.map(lambda text: _text(which, text), prompts * 2))

    with Server(package, tmp_path, "--cache-memory", memory) as small:
        assert answers(small) == answers(server)
        figures = small.wait_until(_idle)
        assert figures["blocks_used"] <= figures["blocks"]
        if memory == "20K":
            assert figures['fallback_total{kind="cache_full"}'] > 0, "it was full"
        assert figures['finished_total{reason="failed"}'] == 0


def _text(server: Server, text: str) -> str:
    response = httpx.post(f"{server.url}/v1/completions", json=prompt(20, prompt=text), timeout=SECONDS)
    return str(response.raise_for_status().json()["choices"][0]["text"])


def test_nonsense_instead_of_http(server: Server) -> None:
    for nonsense in (b"\x00" * 1000, b"GET\r\n\r\n", os.urandom(4000), b"GET / HTTP/1.1\r\n" + b"x: y\r\n" * 20_000):
        with socket.create_connection(("127.0.0.1", server.port), SECONDS) as line:
            try:
                line.sendall(nonsense)
                line.shutdown(socket.SHUT_WR)
                assert line.recv(1 << 16)[:12] in (b"", b"HTTP/1.1 400")
            except ConnectionError:
                pass  # cut off while it was still talking
    assert _length(server, 5) == 5


def test_nobody_reads_the_log(package: Path) -> None:
    """A pipe that is full does not stop answers."""
    import subprocess

    from tests.serve.server_process import START

    command = [*START, str(package), "--name", NAME, "--port", "0"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        port = process.stdout.readline().split("/v1")[0].rsplit(":", 1)[1]
        with httpx.Client(timeout=SECONDS) as client:
            for _ in range(600):  # a line has 150 bytes and more, a pipe holds 64 KiB
                assert client.get(f"http://127.0.0.1:{port}/v1/models", headers={"X-Request-Id": "x" * 64}).is_success
    finally:
        process.kill()
        process.communicate()


def test_several_faults_at_once(server: Server) -> None:
    """Clients that go at random, among others that stay: those get what they asked for."""

    def leave(number: int) -> None:
        with socket.create_connection(("127.0.0.1", server.port), SECONDS) as line:
            _ask(line, prompt(MANY, stream=number % 2 == 0, n=1 + number % 3))
            time.sleep(number % 7 / 50)

    expected = _text(server, "The fox and the dog")
    leaving = [threading.Thread(target=leave, args=(number,)) for number in range(20)]
    for thread in leaving:
        thread.start()
    found = [_text(server, "The fox and the dog") for _ in range(5)]
    for thread in leaving:
        thread.join()
    assert found == [expected] * 5
    server.wait_until(_idle)

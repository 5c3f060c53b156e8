"""Keys, limits, ids, figures and log lines: what stands before and around the answers of a server."""

from __future__ import annotations

import asyncio
import io
import json
import re
import socket
import threading
import time
from typing import TYPE_CHECKING, Any

import httpx
import pytest

from inlay.errors import UsageError
from inlay.serve.http.admission import AdmissionControl
from inlay.serve.http.api_keys import Keys, read_keys
from inlay.serve.http.request_log import LogWriter
from inlay.serve.http.server import SEND_BUFFER, bind
from inlay.serve.http.settings import is_loopback
from inlay.sizes import parse_bytes
from tests.serve.server_process import SECONDS, Server, prompt, stream

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

KEYS = {"INLAY_API_KEYS": "sk-one, sk-two"}
WRONG = [None, "", "Bearer", "Bearer sk-on", "Bearer sk-one,", "sk-one", "Basic sk-one"]


@pytest.fixture(scope="module")
def locked(package: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A server with keys and small limits."""
    limits = ("--max-body", "4K", "--max-prompt", "100", "--max-tokens", "500", "--max-concurrent", "2")
    with Server(package, tmp_path_factory.mktemp("log"), *limits, env=KEYS) as running:
        yield running


def post(server: Server, key: str = "sk-one", **more: Any) -> httpx.Response:
    headers = {"Authorization": f"Bearer {key}"}
    return httpx.post(f"{server.url}/v1/completions", json=prompt(4, **more), headers=headers, timeout=SECONDS)


@pytest.mark.parametrize("authorization", WRONG)
def test_wrong_keys(locked: Server, authorization: str | None) -> None:
    headers = {} if authorization is None else {"Authorization": authorization}
    for method, path in (
        ("POST", "/v1/completions"),
        ("GET", "/v1/models"),
        ("GET", "/metrics"),
        ("GET", "/openapi.json"),
    ):
        response = httpx.request(method, locked.url + path, headers=headers, timeout=SECONDS)
        assert response.status_code == 401
        assert response.json()["error"]["code"] == "invalid_api_key"
        assert response.headers["www-authenticate"] == "Bearer"


def test_right_keys(locked: Server) -> None:
    assert post(locked).status_code == post(locked, "sk-two").status_code == 200
    for path in ("/healthz", "/readyz"):
        assert httpx.get(locked.url + path).status_code == 200
    for path in ("/v1/kv_cache/snapshot", "/v1/kv_cache/events"):
        response = httpx.get(locked.url + path, headers={"Authorization": "Bearer sk-one"})
        assert response.status_code == 404, "the tokens of one tenant are nothing for another"


def test_keys_do_not_share_a_cache(locked: Server) -> None:
    long = "A fox that was seen before. " * 3

    def cached(key: str) -> int:
        usage = post(locked, key, prompt=long).raise_for_status().json()["usage"]
        return int(usage["prompt_tokens_details"]["cached_tokens"])

    assert cached("sk-one") == 0
    assert cached("sk-two") == 0
    assert cached("sk-one") > 0


def test_limits_of_a_request(locked: Server) -> None:
    assert post(locked, max_tokens=501).json()["error"]["param"] == "max_tokens"
    assert post(locked, prompt="fox " * 120).json()["error"]["code"] == "context_length_exceeded"
    large = post(locked, prompt="fox " * 2000)
    assert (large.status_code, large.json()["error"]["code"]) == (413, "request_too_large")
    assert post(locked).status_code == 200


def test_a_large_body_is_not_read(locked: Server) -> None:
    """Not when its length is told, and not when it is not: what came is thrown away, and the connection goes on."""

    def endless() -> Iterator[bytes]:
        for _ in range(1000):
            yield b" " * 1024

    with httpx.Client(headers={"Authorization": "Bearer sk-one", "Content-Type": "application/json"}) as client:
        assert client.post(f"{locked.url}/v1/completions", content=endless()).status_code == 413
        assert client.post(f"{locked.url}/v1/completions", content=b" " * 4097).status_code == 413
        for length in ("9" * 30, "-1", "x"):
            raw = _raw(locked, f"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: {length}\r\n"
                               "Authorization: Bearer sk-one\r\n\r\n")  # fmt: skip
            assert raw.startswith((b"HTTP/1.1 413", b"HTTP/1.1 400"))


def _raw(server: Server, request: str) -> bytes:
    with socket.create_connection(("127.0.0.1", server.port), SECONDS) as line:
        line.sendall(request.encode())
        return line.recv(1 << 16)


def test_places_are_held_until_all_is_sent(locked: Server) -> None:
    headers = {"Authorization": "Bearer sk-one"}
    body = prompt(500, stream=True)
    with (
        httpx.stream("POST", f"{locked.url}/v1/completions", json=body, headers=headers, timeout=SECONDS) as one,
        httpx.stream("POST", f"{locked.url}/v1/completions", json=body, headers=headers, timeout=SECONDS) as two,
    ):
        assert one.status_code == two.status_code == 200
        refused = post(locked)
        assert refused.status_code == 429
        assert refused.json()["error"]["type"] == "rate_limit_error"
        assert 1 <= int(refused.headers["retry-after"]) <= 60
        for response in (one, two):
            assert response.read().endswith(b"data: [DONE]\n\n")
    assert post(locked).status_code == 200
    several = post(locked, n=3)
    assert (several.status_code, several.json()["error"]["param"]) == (400, "n"), "never, not later"
    with httpx.stream("POST", f"{locked.url}/v1/completions", json=body, headers=headers, timeout=SECONDS) as one:
        assert one.status_code == 200
        assert post(locked, n=2).status_code == 429, "two choices are two places"
    assert locked.figures("sk-one")['requests_total{route="POST /v1/completions",status="429"}'] == 2


def test_compressed_bodies_are_refused(server: Server) -> None:
    headers = {"Content-Encoding": "gzip", "Content-Type": "application/json"}
    response = httpx.post(f"{server.url}/v1/completions", content=b"\x1f\x8b", headers=headers, timeout=SECONDS)
    assert response.status_code == 415
    assert "Send the body without Content-Encoding" in response.json()["error"]["message"]


@pytest.mark.parametrize("header", ["Content-Length: abc", "Content-Length: 1\r\nContent-Length: 2"])
def test_bad_http_has_an_error_and_a_line(server: Server, header: str) -> None:
    """In the form of all others, and with the address it came from."""
    known = len(server.lines())
    with socket.create_connection(("127.0.0.1", server.port), SECONDS) as line:
        line.sendall(f"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\n{header}\r\n\r\n".encode())
        head, _, body = line.makefile("rb").read().partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 400 Bad Request")
    assert json.loads(body)["error"]["code"] == "bad_http"
    deadline = time.monotonic() + SECONDS
    while not (found := [row for row in server.lines()[known:] if row.get("error") == "bad_http"]):
        assert time.monotonic() < deadline
        time.sleep(0.02)
    assert (found[0]["status"], found[0]["client"]) == (400, "127.0.0.1")


def test_request_ids(server: Server) -> None:
    given = httpx.get(f"{server.url}/v1/models", headers={"X-Request-Id": "mine-1.2_3"})
    assert given.headers["x-request-id"] == "mine-1.2_3"
    made = [httpx.get(f"{server.url}/healthz").headers["x-request-id"] for _ in range(2)]
    assert made[0] != made[1]
    for bad in ("two words", "x" * 65, 'quote"', "a\tb"):
        other = httpx.get(f"{server.url}/v1/models", headers={"X-Request-Id": bad}).headers["x-request-id"]
        assert re.fullmatch("[0-9a-f]{32}", other)
    answer = httpx.post(
        f"{server.url}/v1/completions", json=prompt(2), headers={"X-Request-Id": "abc"}, timeout=SECONDS
    )
    assert (answer.headers["x-request-id"], answer.json()["id"]) == ("abc", "cmpl-abc")
    assert httpx.post(f"{server.url}/v1/completions", content=b"{").headers["x-request-id"], "errors have one too"


def test_log_lines(package: Path, tmp_path: Path) -> None:
    with Server(package, tmp_path) as server:
        secret = "a fox nobody may hear of"
        for request_id, body in (
            ("whole", prompt(5, prompt=secret)),
            ("stream", prompt(6, prompt=secret, stream=True)),
            ("rejected", prompt(5, prompt=secret, echo=secret)),
            ("unknown", prompt(5, prompt=secret) | {"promt": secret}),
        ):
            httpx.post(f"{server.url}/v1/completions", json=body, headers={"X-Request-Id": request_id}, timeout=SECONDS)
        httpx.get(f"{server.url}/healthz")
        assert server.terminate() == 0
        *requests, last = server.lines()
        assert (last["message"], last["active_requests"]) == ("shutting down", 0)
        lines = {line["id"]: line for line in requests}
        assert set(lines) == {"whole", "stream", "rejected", "unknown"}, "health is not worth a line"
        assert "nobody" not in server.log.read_text()
    whole = lines["whole"]
    assert (whole["status"], whole["tokens"], whole["finish_reason"]) == (200, 5, "length")
    assert (whole["route"], whole["client"]) == ("POST /v1/completions", "127.0.0.1")
    assert whole["prompt_tokens"] > whole["cached_tokens"] == 0
    assert 0 < whole["first_token_s"] <= whole["seconds"]
    assert lines["stream"]["tokens"] == 6
    assert (lines["rejected"]["status"], lines["rejected"]["error"]) == (400, "invalid_request_error echo")
    assert lines["unknown"]["error"] == "unknown_parameter promt"


def test_figures(server: Server) -> None:
    before = server.figures()
    text = "A fox that is counted. " * 12
    with stream(server, 50, prompt=text) as response:
        response.read()
    httpx.post(f"{server.url}/v1/completions", json=prompt(50, prompt=text), timeout=SECONDS)
    after = server.figures()

    def grown(name: str) -> float:
        return after[name] - before.get(name, 0)

    assert grown("generation_tokens_total") == 100
    assert grown("time_to_first_token_seconds_count") == grown("queue_seconds_count") == 2
    assert grown("inter_token_latency_seconds_count") == 98
    assert grown("batch_size_count") >= 49
    assert grown("prefix_cache_hits_total") == grown("prefix_cache_misses_total") == 1
    assert grown("cached_tokens_total") > 0
    assert grown('requests_total{route="POST /v1/completions",status="200"}') == 2
    assert grown('finished_total{reason="length"}') == 2
    assert 0 < after["blocks_used"] <= after["blocks"]
    assert {
        "active_requests",
        "waiting_requests",
        "decode_sequences",
        "padding_rows_total",
        "rows_total",
        "kv_memory_bytes",
    } <= set(after)


@pytest.mark.fast
def test_reading_keys(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "keys"
    file.write_text("# ours\nsk-one  # of a friend\n\n  sk#two\n")
    assert read_keys(file) == ["sk-one", "sk#two"]
    file.write_text("# none\n")
    with pytest.raises(UsageError, match="no API keys"):
        read_keys(file)
    with pytest.raises(UsageError, match="cannot be read"):
        read_keys(tmp_path / "missing")
    monkeypatch.setenv("INLAY_API_KEYS", " a,b ,,")
    assert read_keys(None) == ["a", "b"]
    monkeypatch.delenv("INLAY_API_KEYS")
    assert read_keys(None) == []


@pytest.mark.fast
def test_all_keys_are_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    """However early one fits: otherwise a refusal would take a time that tells something."""
    import hmac

    seen: list[int] = []
    real = hmac.compare_digest

    def counted(one: bytes, other: bytes) -> bool:
        seen.append(len(one) - len(other))
        return real(one, other)

    monkeypatch.setattr(hmac, "compare_digest", counted)
    keys = Keys(["a", "b" * 100, "c"])
    for given in (b"Bearer a", b"Bearer c", b"Bearer x", b""):
        seen.clear()
        keys.authenticate(given)
        assert seen == [0, 0, 0], "all of them, and of one length"
    assert keys.authenticate(b"Bearer a") != keys.authenticate(b"Bearer c")


@pytest.mark.fast
def test_places_wait_until_nobody_is_there() -> None:
    async def drained() -> list[str]:
        places, order = AdmissionControl(most=3, slots=1), []
        place = places.admit()
        place.acquire(2)
        waiting = asyncio.create_task(places.wait_empty())
        await asyncio.sleep(0)
        order.append("held" if not waiting.done() else "empty")
        place.release()
        place.release()
        await waiting
        assert places.active == 0
        return [*order, "empty"]

    assert asyncio.run(drained()) == ["held", "empty"]


@pytest.mark.fast
def test_how_long_to_wait_follows_how_long_answers_take() -> None:
    places = AdmissionControl(most=40, slots=2)
    held = [places.admit() for _ in range(40)]
    first = places.retry_after()
    for place in held[:20]:
        place._since = time.monotonic() - 20
        place.release()
    for _ in range(20):
        places.admit()
    assert first < places.retry_after() <= 60


@pytest.mark.fast
def test_nobody_waits_for_who_reads_the_log() -> None:
    class Stuck(io.StringIO):
        let_go = threading.Event()

        def write(self, text: str) -> int:
            self.let_go.wait(SECONDS)
            return super().write(text)

    stream = Stuck()
    lines = LogWriter(stream, most=10)
    for number in range(100):
        lines.write({"number": number})
    stream.let_go.set()
    deadline = time.monotonic() + SECONDS
    while not lines._waiting.empty() and time.monotonic() < deadline:
        time.sleep(0.01)
    lines.write({"number": 100})
    lines.close(SECONDS)
    written = [json.loads(line) for line in stream.getvalue().splitlines()]
    assert len(written) + written[-1]["lost_lines"] == 101
    assert [line["number"] for line in written[:-1]] == list(range(len(written) - 1))


@pytest.mark.fast
def test_small_answers_are_sent_at_once() -> None:
    """Without this option of a socket, two small packets after each other take 40 ms."""

    async def accepted() -> Any:
        found: asyncio.Queue[Any] = asyncio.Queue()
        async with await asyncio.start_server(
            lambda _, writer: found.put_nowait(writer), sock=bind("127.0.0.1", 0)
        ) as at:
            _, writer = await asyncio.open_connection(*at.sockets[0].getsockname())
            accepted = await found.get()
            line = accepted.get_extra_info("socket")
            options = (
                line.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY),
                line.getsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF),
            )
            writer.close()
            accepted.close()
            return options

    nodelay, buffer = asyncio.run(accepted())
    assert nodelay
    assert buffer <= 2 * SEND_BUFFER, "and what the system keeps for a slow reader is bounded"


@pytest.mark.fast
def test_sizes_and_addresses() -> None:
    assert (parse_bytes("1.5K"), parse_bytes("8GB"), parse_bytes("8G")) == (1536, 8 * 10**9, 8 << 30)
    with pytest.raises(UsageError, match="not a size"):
        parse_bytes("much")
    assert not is_loopback("example.org")
    assert is_loopback("127.8.8.8")

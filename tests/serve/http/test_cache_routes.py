"""The cache over HTTP and on ZeroMQ, of a real server: what is told is what the cache holds."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import httpx
import pytest

from tests.serve.server_process import SECONDS, Server, prompt

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path


def _ask(server: Server, text: str) -> None:
    httpx.post(f"{server.url}/v1/completions", json=prompt(4, prompt=text), timeout=SECONDS).raise_for_status()


def _until(lines: Iterator[str], number: int) -> list[dict[str, Any]]:
    """Events up to one of a number."""
    found: list[dict[str, Any]] = []
    for line in lines:
        told = json.loads(line)
        if "event_id" in told:
            found.append(told)
            if told["event_id"] >= number:
                break
    return found


def test_events_rebuild_what_the_cache_holds(package: Path, tmp_path: Path) -> None:
    """A cache that is small, so blocks come and go."""
    with Server(package, tmp_path, "--cache-memory", "40K") as server:
        for number in range(12):
            _ask(server, f"{number} foxes and a dog. " * 12)
        snapshot = httpx.get(f"{server.url}/v1/kv_cache/snapshot", timeout=SECONDS).json()
        last = snapshot["next_event_id"] - 1
        with httpx.stream("GET", f"{server.url}/v1/kv_cache/events?start=0", timeout=SECONDS) as response:
            assert response.headers["content-type"] == "application/jsonl"
            events = _until(response.iter_lines(), last)
        assert [event["event_id"] for event in events] == list(range(last + 1))
        held: set[int] = set()
        for event in (event["data"] for event in events):
            if event["type"] == "stored":
                held |= {block["block_hash"] for block in event["blocks"]}
            elif event["type"] == "removed":
                held -= set(event["block_hashes"])
        assert held == {block["block_hash"] for block in snapshot["blocks"]}
        assert "removed" in {event["data"]["type"] for event in events}
        assert len(held) == server.figures()["blocks_used"]


def test_a_watcher_sees_what_happens_and_does_not_keep_the_server_up(package: Path, tmp_path: Path) -> None:
    with (
        Server(package, tmp_path) as server,
        httpx.stream("GET", f"{server.url}/v1/kv_cache/events", timeout=SECONDS) as response,
    ):
        lines = response.iter_lines()
        assert json.loads(next(lines))["type"] == "snapshot"
        _ask(server, "A fox that is watched. " * 12)
        told = (json.loads(line) for line in lines)
        assert next(each for each in told if "event_id" in each)["data"]["type"] == "stored"
        assert server.terminate() == 0
        assert all(each.get("type") == "heartbeat" or "event_id" in each for each in told), "and then it ends"


@pytest.mark.parametrize(("start", "status"), [("-1", 400), ("x", 400), (str(2**63), 400)])
def test_numbers_that_are_none(server: Server, start: str, status: int) -> None:
    response = httpx.get(f"{server.url}/v1/kv_cache/events?start={start}", timeout=SECONDS)
    assert (response.status_code, response.json()["error"]["param"]) == (status, "start")


def test_routers_hear_of_it(package: Path, tmp_path: Path) -> None:
    """Over the wire that vLLM's routers read."""
    zmq = pytest.importorskip("zmq")
    msgspec = pytest.importorskip("msgspec")
    at = f"ipc://{tmp_path}/events"
    with zmq.Context() as context, context.socket(zmq.SUB) as heard:
        heard.setsockopt(zmq.SUBSCRIBE, b"")
        heard.setsockopt(zmq.RCVTIMEO, int(SECONDS * 1000))
        with Server(package, tmp_path, "--kv-events", at, "--kv-replay", f"ipc://{tmp_path}/again") as server:
            heard.connect(at)
            heard.recv_multipart()  # it is connected: batches come, if empty ones
            _ask(server, "A fox on the wire. " * 12)
            stored: list[Any] = []
            while not stored:
                _, events, *_ = msgspec.msgpack.decode(heard.recv_multipart()[-1])
                stored = [event for event in events if event["type"] == "BlockStored"]
            assert len(stored[0]["token_ids"]) == stored[0]["block_size"] * len(stored[0]["block_hashes"])
            assert server.terminate() == 0

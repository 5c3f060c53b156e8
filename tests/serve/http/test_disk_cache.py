"""A server that is killed leaves its prefixes to the next one, and to nobody but the same API key."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import httpx

from tests.serve.server_process import SECONDS, Server, prompt

if TYPE_CHECKING:
    from pathlib import Path

TEXT = "The quick brown fox jumps over the lazy dog. " * 8


def _ask(server: Server, key: str = "", **more: Any) -> tuple[str, int]:
    """The text of an answer, and how much of the prompt was cached."""
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    body = prompt(12, prompt=TEXT, **more)
    found = httpx.post(f"{server.url}/v1/completions", json=body, headers=headers, timeout=SECONDS)
    told = found.raise_for_status().json()
    return told["choices"][0]["text"], told["usage"]["prompt_tokens_details"]["cached_tokens"]


def test_prefixes_survive_kill_9_for_their_keys(package: Path, tmp_path: Path) -> None:
    """Two keys, then the same two, then only one of them, whose requests have no salt."""
    options = ("--disk-cache", str(tmp_path / "kv"), "--disk-cache-size", "100MB", "--public-metrics")
    both = {"INLAY_API_KEYS": "sk-one,sk-two"}
    with Server(package, tmp_path, *options, env=both) as server:
        wanted, cached = _ask(server, "sk-one")
        assert cached == 0
        assert _ask(server, "sk-two", cache_salt="mine") == (wanted, 0)
        blocks = server.wait_until(lambda now: now["blocks_used"] == now["disk_writes_total"] > 4)["disk_writes_total"]
        server.process.kill()
    files = {each.name: each.stat().st_size for each in (tmp_path / "kv").iterdir()}
    assert len(files) == blocks
    assert blocks % 2 == 0
    with Server(package, tmp_path, *options, env=both) as server:
        again, cached = _ask(server, "sk-one")
        assert again == wanted
        assert cached == blocks / 2 * 32
        assert _ask(server, "sk-two") == (wanted, 0)
        assert _ask(server, "sk-two", cache_salt="mine") == (wanted, cached)
        now = server.figures()
        assert now["disk_tokens_total"] == 2 * cached
        assert now["disk_bytes"] >= sum(files.values())
        assert server.terminate() == 0
    with Server(package, tmp_path, *options, env={"INLAY_API_KEYS": "sk-one"}) as server:
        assert _ask(server, "sk-one") == (wanted, 0)
        assert _ask(server, "sk-one") == (wanted, cached)

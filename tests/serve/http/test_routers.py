"""sglang-router and vllm-router in front of two servers: `pip install sglang-router==0.3.2 vllm-router==0.1.16`."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
from contextlib import ExitStack, closing
from typing import TYPE_CHECKING, Any

import httpx
import openai
import pytest

from tests.serve.server_process import NAME, SECONDS, Server, prompt

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

pytestmark = pytest.mark.nightly
PYTHON = os.environ.get("INLAY_ROUTERS", sys.executable)
"""The Python of an environment with the routers."""


def _free_port() -> int:
    with closing(socket.socket()) as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])


@pytest.fixture(scope="module", params=["sglang_router", "vllm_router"])
def routed(request: pytest.FixtureRequest, package: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The address of a router with two servers."""
    name = str(request.param)
    if subprocess.run([PYTHON, "-c", f"import {name}"], check=False, capture_output=True).returncode:
        pytest.skip(f"{name} is not installed; INLAY_ROUTERS names the Python of an environment that has it")
    with ExitStack() as stack:
        folder = tmp_path_factory.mktemp(name)
        servers = [stack.enter_context(Server(package, folder)) for _ in range(2)]
        port, metrics = _free_port(), _free_port()
        command = [PYTHON, "-m", f"{name}.launch_router", "--host", "127.0.0.1", "--port", str(port)]
        command += ["--policy", "cache_aware", "--prometheus-host", "127.0.0.1", "--prometheus-port", str(metrics)]
        log = stack.enter_context((folder / "router.log").open("w"))
        router = subprocess.Popen([*command, "--worker-urls", *(each.url for each in servers)], stdout=log, stderr=log)
        stack.callback(router.wait, SECONDS)
        stack.callback(router.kill)
        url, deadline = f"http://127.0.0.1:{port}", time.monotonic() + SECONDS
        while True:
            try:
                if httpx.get(f"{url}/readiness", timeout=SECONDS).status_code == 200:
                    break
            except httpx.TransportError:
                pass
            assert time.monotonic() < deadline, (folder / "router.log").read_text()
            time.sleep(0.2)
        yield url


def test_chat_completions_streams_and_usage(routed: str) -> None:
    client: Any = openai.OpenAI(base_url=f"{routed}/v1", api_key="none", timeout=SECONDS, max_retries=0)
    asked: dict[str, Any] = {
        "model": NAME,
        "messages": [{"role": "user", "content": "Hello"}],
        "temperature": 0,
        "max_tokens": 5,
    }
    whole = client.chat.completions.create(**asked)
    assert whole.usage is not None
    assert whole.usage.completion_tokens == 5
    parts = list(client.chat.completions.create(**asked, stream=True, stream_options={"include_usage": True}))
    said = "".join(part.choices[0].delta.content or "" for part in parts if part.choices)
    assert said == whole.choices[0].message.content
    assert parts[-1].usage is not None
    text: dict[str, Any] = {"model": NAME, "prompt": "The fox", "temperature": 0, "max_tokens": 5}
    completed = client.completions.create(**text)
    streamed = client.completions.create(**text, stream=True)
    assert "".join(part.choices[0].text for part in streamed) == completed.choices[0].text


def test_a_prefix_goes_where_it_is_cached(routed: str) -> None:
    """The second request with a long prefix finds it cached, whichever server had the first."""
    text = "A long text that both requests have in common. " * 20
    for last in ("one", "two"):
        made = httpx.post(f"{routed}/v1/completions", json=prompt(2, prompt=text + last), timeout=SECONDS)
        usage = made.raise_for_status().json()["usage"]
    assert usage["prompt_tokens_details"]["cached_tokens"] > 500

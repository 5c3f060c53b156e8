"""Servers behind a router of another project, as a cluster to compare with."""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from pathlib import Path
from typing import TYPE_CHECKING

from tools.benchmarks.serving import serving

if TYPE_CHECKING:
    from collections.abc import Iterator

ROUTERS = {"sglang": "sglang_router", "vllm": "vllm_router"}
PYTHON = os.environ.get("INLAY_ROUTERS", sys.executable)
"""The Python of an environment with the routers."""
START_SECONDS = 120.0


@contextlib.contextmanager
def routed(name: str, package: Path, replicas: int, *options: str) -> Iterator[int]:
    """Start servers with one thread each and a router that knows prefixes; yield the router's port."""
    with contextlib.ExitStack() as stack:
        one_thread = {**os.environ, "OMP_NUM_THREADS": "1"}
        ports = [stack.enter_context(serving(package, *options, env=one_thread))[0] for _ in range(replicas)]
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="inlay-router-")))
        port, metrics = _free_port(), _free_port()
        command = [PYTHON, "-m", f"{ROUTERS[name]}.launch_router", "--host", "127.0.0.1", "--port", str(port)]
        command += ["--policy", "cache_aware", "--prometheus-host", "127.0.0.1", "--prometheus-port", str(metrics)]
        log = stack.enter_context((folder / "router.log").open("w"))
        urls = [f"http://127.0.0.1:{each}" for each in ports]
        process = subprocess.Popen([*command, "--worker-urls", *urls], stdout=log, stderr=log)
        stack.callback(process.wait)
        stack.callback(process.kill)
        deadline = time.monotonic() + START_SECONDS
        while not _is_ready(port):
            if process.poll() is not None or time.monotonic() > deadline:
                raise SystemExit(f"The router does not start:\n{(folder / 'router.log').read_text()[-2_000:]}")
            time.sleep(0.2)
        yield port


def _is_ready(port: int) -> bool:
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/readiness", timeout=5) as answer:
            return bool(answer.status == 200)
    except (OSError, urllib.error.URLError):
        return False


def _free_port() -> int:
    with socket.socket() as made:
        made.bind(("127.0.0.1", 0))
        return int(made.getsockname()[1])

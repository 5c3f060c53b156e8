"""A cluster for one run, in a network namespace that has only a loopback interface."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import tempfile
import time
import urllib.request
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml

from inlay.cluster.lifecycle import RayClient, authenticate

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

INLAY = str(Path(sys.executable).with_name("inlay"))
PORT = 8765
NAME = "model"
APPLICATION = "cluster"
ISOLATED = "INLAY_ISOLATED"


def isolate() -> None:
    """Run this process again where nothing but loopback exists. Needs root, or user namespaces."""
    if ISOLATED in os.environ:
        return
    os.environ[ISOLATED] = "1"
    flags = ["--net"] if os.getuid() == 0 else ["--net", "--map-root-user"]
    module = [sys.executable, "-m", "tools.benchmarks.cluster", *sys.argv[1:]]
    os.execvp("unshare", ["unshare", *flags, "sh", "-c", 'ip link set lo up && exec "$@"', "sh", *module])


class Deployment:
    """A running cluster."""

    def __init__(self, folder: Path, env: Mapping[str, str]) -> None:
        self.folder, self._env = folder, dict(env)
        self.port = PORT

    def up(self, package: Path, *, tracing: bool = False, **args: Any) -> float:
        """Start or update it; return the seconds until it ran."""
        config = self.folder / "cluster.yaml"
        has_haproxy = os.environ.get("RAY_SERVE_ENABLE_HA_PROXY") == "1"  # it hides who asks
        options = {"package": str(package), "name": NAME, "cpus": 0.1, "insecure": has_haproxy, **args}
        app = {"name": APPLICATION, "route_prefix": "/", "import_path": "inlay.cluster.app:build", "args": options}
        made: dict[str, Any] = {"http_options": {"host": "127.0.0.1", "port": PORT}, "applications": [app]}
        made |= {"tracing_config": {"enabled": True, "sampling_ratio": 1.0}} if tracing else {}
        config.write_text(yaml.safe_dump(made))
        start = time.perf_counter()
        done = self._inlay("up", str(config), "--timeout", "300")
        if done.returncode:
            raise SystemExit(done.stderr)
        return time.perf_counter() - start

    def down(self) -> None:
        """Remove it."""
        self._inlay("down")

    def pids(self, deployment: str = "Engine") -> dict[str, int]:
        """Return the process of each running replica."""
        found = self._client.status()[APPLICATION]["deployments"][deployment]["replicas"]
        return {each["replica_id"]: each["pid"] for each in found if each["state"] == "RUNNING"}

    @cached_property
    def _client(self) -> RayClient:
        """The client of `inlay cluster status`. A command of its own for each question would take most of a core."""
        authenticate(create=False)
        return RayClient()

    def metrics(self) -> dict[str, float]:
        """Return the metrics, summed over replicas; names are prefixed with the deployment."""
        return metrics(self.port)

    def _inlay(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        command = [INLAY, "cluster", *arguments]
        return subprocess.run(command, env=self._env, capture_output=True, text=True, check=False)


def metrics(port: int) -> dict[str, float]:
    """Return the metrics of a server, summed over the label `replica`."""
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=10) as page:
        lines = [line for line in page.read().decode().splitlines() if not line.startswith("#")]
    found: dict[str, float] = {}
    for line in lines:
        name, _, value = line.rpartition(" ")
        head, _, labels = name.partition("{")
        kept = sorted(each for each in labels.rstrip("}").split(",") if each and not each.startswith("replica="))
        key = f"{head}{{{','.join(kept)}}}" if kept else head
        found[key] = found.get(key, 0.0) + float(value)
    return found


@contextlib.contextmanager
def deployment() -> Iterator[Deployment]:
    """Yield a cluster that is not up yet; remove it at the end, with Ray."""
    with tempfile.TemporaryDirectory(prefix="inlay-cluster-") as folder:
        made = Deployment(Path(folder), {**os.environ, "XDG_CACHE_HOME": folder})
        try:
            yield made
        finally:
            made.down()


def selector_pid() -> int:
    """Return the process of the selector."""
    found = subprocess.run(["pgrep", "-f", "^ray::SelectorActor"], capture_output=True, text=True, check=False)
    return int(found.stdout.split()[-1])

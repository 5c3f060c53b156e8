"""A cluster on Ray, in a network namespace that has only loopback: failures, updates, keys, scale and traces.

The scenarios of `tools.benchmarks.cluster` run with small numbers.
"""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.nightly
ROOT = Path(__file__).parents[2]
if importlib.util.find_spec("ray") is None:
    pytest.skip("pip install 'inlay[cluster]'", allow_module_level=True)
if os.getuid() != 0:
    pytest.skip("a network namespace needs root", allow_module_level=True)


def scenario(name: str, package: Path, *options: str) -> Any:
    command = [sys.executable, "-m", "tools.benchmarks.cluster", name, str(package), *options]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=1_500, check=False)
    assert done.returncode == 0, done.stderr[-3_000:]
    return json.loads(done.stdout)


@pytest.mark.parametrize("what", ["replica", "selector", "stop", "cut", "events"])
def test_nothing_is_lost_when_something_fails(what: str, package: Path) -> None:
    every = "12" if what in ("stop", "cut") else "5"  # a replica may be silent for 8 s
    small = ("--requests", "150", "--clients", "8", "--replicas", "2", "--every", every, "--tokens", "400")
    found = scenario("kill", package, "--what", what, *small)
    assert found["ends"] == {"exact": 150}
    verb = {"replica": "killed", "selector": "killed", "stop": "stopped", "cut": "cut off", "events": "lost"}[what]
    assert any(f"done: {verb} " in each for each in found["disturbances"]), found["disturbances"]
    failed = {name.split('kind="')[1][:-2] for name in found if "attempts_failed" in name}
    assert failed >= {"replica": {"failed"}, "stop": {"silent"}, "cut": {"silent"}}.get(what, set())


def test_two_keys_share_nothing(package: Path) -> None:
    rows = scenario("keys", package, "--replicas", "2", "--words", "120")["rows"]
    assert [row["ends"] for row in rows] == [{"whole": 12}] * 4
    assert [row["cached_tokens"] > 0 for row in rows] == [False, False, True, True]


def test_nothing_listens_on_other_addresses(package: Path) -> None:
    """Serve's replicas would: `inlay.cluster.replica_port` binds them."""
    found = scenario("addresses", package, "--replicas", "2")
    assert set(found) <= {"127.0.0.1", "[::ffff:127.0.0.1]", "[::1]"}


def test_all_choices_of_a_request_are_answered(package: Path) -> None:
    found = scenario("choices", package, "--replicas", "2", "--requests", "40", "--clients", "8")
    assert found["ends"] == {"whole": 40}
    assert found["tokens_of_a_request"] == [2 * 3 * 5]


def test_replicas_come_and_go_with_the_load(package: Path) -> None:
    found = scenario("scale", package, "--replicas", "2", "--requests", "300", "--clients", "60")
    assert (list(found["ends"]), list(found["light_load"])) == (["whole"], ["whole"])
    assert (found["most"], found["last"][1]) == (2, 1)


def test_one_request_id_in_all_spans(package: Path) -> None:
    """The ingress and the replica record spans of one trace, with the id that the client got."""
    found = scenario("trace", package)
    assert {"inlay.attempt", "inlay.generate"} <= set(found["names"])
    assert found["request_ids"] == [found["header"]]
    assert (found["traces"], found["errors"]) == (1, [])
    assert found["files"]["inlay.attempt"] != found["files"]["inlay.generate"]

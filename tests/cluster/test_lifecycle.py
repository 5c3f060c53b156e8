"""Configs of clusters, and the commands without Ray. Those with Ray are in test_ray_serve.py."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import pytest
import yaml
from typer.testing import CliRunner

from inlay.cli.main import app
from inlay.cluster.config import ClusterConfig, engine_settings

pytestmark = pytest.mark.fast
HAS_RAY = importlib.util.find_spec("ray") is not None
needs_ray = pytest.mark.skipif(not HAS_RAY, reason="pip install 'inlay[cluster]'")


def config(folder: Path, http: dict[str, Any] | None = None, **args: Any) -> Path:
    file = folder / "cluster.yaml"
    application = {"name": "a", "route_prefix": "/", "import_path": "inlay.cluster.app:build", "args": args}
    file.write_text(yaml.safe_dump({"http_options": http or {}, "applications": [application]}))
    return file


@pytest.mark.skipif(HAS_RAY, reason="Ray is installed")
def test_without_ray_the_remedy_is_an_extra(tmp_path: Path) -> None:
    done = CliRunner().invoke(app, ["cluster", "up", str(config(tmp_path, package="p"))])
    assert done.exit_code == 2
    assert "pip install 'inlay[cluster]'" in done.output


def test_help_has_an_example() -> None:
    for command in ("up", "status", "down"):
        assert f"inlay cluster {command}" in CliRunner().invoke(app, ["cluster", command, "--help"]).output


@pytest.mark.parametrize(
    "args",
    [
        {},
        {"package": "p", "replica": 2},
        {"package": "p", "replicas": 0},
        {"package": "p", "cache_memory": "much"},
        {"package": "p", "routing": "kv-aware"},
        {"package": "p", "replicas": {"min": 1}},
    ],
)
def test_a_wrong_argument_is_an_error(args: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="validation error"):
        ClusterConfig.model_validate(args)


def test_blocks_on_disk_belong_to_the_keys_of_the_config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("INLAY_API_KEYS", raising=False)
    assert engine_settings(ClusterConfig(package="p")).disk_folder is None
    owners = []
    for keys in ("", "one", "two", "one\ntwo"):
        (tmp_path / "keys").write_text(keys)
        file = str(tmp_path / "keys") if keys else None
        args = {"package": "p", "disk_cache": "/kv", "disk_cache_size": "2GB", "api_key_file": file}
        made = engine_settings(ClusterConfig.model_validate(args))
        assert (made.disk_folder, made.disk_bytes) == (Path("/kv"), 2 * 10**9)
        owners.append(made.disk_owner)
    assert owners[0] == ""
    assert len(set(owners)) == 4


@needs_ray
def test_errors_of_a_config_name_the_field(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from inlay.cluster.lifecycle import read_config
    from inlay.errors import UsageError

    monkeypatch.delenv("INLAY_API_KEYS", raising=False)
    with pytest.raises(UsageError, match="replicas"):
        read_config(config(tmp_path, package="p", replicas=0))
    with pytest.raises(UsageError, match="reachable from other machines"):
        read_config(config(tmp_path, {"host": "0.0.0.0"}, package="p"))
    assert read_config(config(tmp_path, {"host": "0.0.0.0", "port": 81}, package="p", insecure=True)).url.endswith(
        ":81"
    )
    monkeypatch.setenv("INLAY_API_KEYS", "secret")
    assert read_config(config(tmp_path, {"host": "0.0.0.0"}, package="p")).clusters["a"].package == "p"
    (tmp_path / "other.yaml").write_text("applications: [{name: b, import_path: 'x:y'}]")
    with pytest.raises(UsageError, match="no application with import_path"):
        read_config(tmp_path / "other.yaml")
    (tmp_path / "not.yaml").write_text("applications: 3")
    with pytest.raises(UsageError, match="not a Serve config"):
        read_config(tmp_path / "not.yaml")
    with pytest.raises(UsageError, match="cannot be read"):
        read_config(tmp_path / "missing.yaml")

"""Starts Ray on this machine, and deploys, lists and removes clusters through the REST API that `serve deploy` uses."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml
from pydantic import ValidationError

from inlay import machine
from inlay.cluster.config import ClusterConfig
from inlay.errors import MachineError, UsageError, one_line
from inlay.package.loader import read_manifest
from inlay.serve.http.api_keys import VARIABLE, read_keys
from inlay.serve.http.settings import is_loopback

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

IMPORT_PATH = "inlay.cluster.app:build"
LOCAL = "http://127.0.0.1:8265"
"""Address of the Ray dashboard that `inlay cluster up` starts."""
OBJECT_STORE = 100_000_000
"""Bytes of Ray's shared memory. Nothing large passes through it."""
TOKEN = Path.home() / ".ray" / "auth_token"
"""Where Ray keeps the token that its clients send."""
PREPARE = "Install the extra on this machine: pip install 'inlay[cluster]'"


@dataclass(frozen=True)
class ServeConfig:
    """A Serve config file, and the clusters in it by application name."""

    content: dict[str, Any]
    clusters: Mapping[str, ClusterConfig]

    @property
    def url(self) -> str:
        """The address of the HTTP proxy on this machine."""
        options = self.content.get("http_options") or {}
        host = options.get("host", "127.0.0.1")
        return f"http://{'127.0.0.1' if host == '0.0.0.0' else host}:{options.get('port', 8000)}"


def read_config(file: Path, *, has_environment: bool = True) -> ServeConfig:
    """Read and check a Serve config. `has_environment`: Ray has the environment variables of this process."""
    from ray.serve.schema import ServeDeploySchema

    try:
        content = yaml.safe_load(file.read_text("utf-8"))
        ServeDeploySchema.model_validate(content)
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise UsageError(
            f"{file} cannot be read: {one_line(error)}.", "Write a Serve config: docs/cluster.md."
        ) from error
    except ValidationError as error:
        raise UsageError(f"{file} is not a Serve config: {_first(error)}", "See docs/cluster.md.") from error
    apps = [each for each in content["applications"] if each["import_path"] == IMPORT_PATH]
    if not apps:
        raise UsageError(f"{file} has no application with import_path {IMPORT_PATH}.", "See docs/cluster.md.")
    try:
        found = ServeConfig(content, {each["name"]: ClusterConfig.model_validate(each.get("args")) for each in apps})
    except ValidationError as error:
        raise UsageError(f"args of the application in {file}: {_first(error)}", "See docs/cluster.md.") from error
    host = (content.get("http_options") or {}).get("host", "0.0.0.0")  # Serve's default
    for each in found.clusters.values():
        key_file = None if each.api_key_file is None else Path(each.api_key_file)
        keys = read_keys(key_file) if key_file is not None or has_environment else []
        if not keys and not each.insecure and not is_loopback(host):
            problem = f"{host} is reachable from other machines, and there are no API keys."
            remedy = "Set http_options.host: 127.0.0.1, api_key_file, insecure, or INLAY_API_KEYS before Ray starts."
            raise UsageError(problem, remedy)
    return found


def _first(error: ValidationError) -> str:
    first = error.errors()[0]
    return f"{'.'.join(map(str, first['loc']))}: {first['msg']}."


def add_versions(content: dict[str, Any]) -> dict[str, Any]:
    """Return a Serve config with the version of each package: Serve replaces replicas only if the config changes.

    A package that is not on this machine keeps its args.
    """
    apps = []
    for each in content["applications"]:
        args = dict(each.get("args") or {})
        if each["import_path"] == IMPORT_PATH and "version" not in args and Path(args["package"]).exists():
            args["version"] = read_manifest(args["package"])[1].name
        apps.append({**each, "args": args})
    return {**content, "applications": apps}


class RayClient:
    """A Ray cluster, by the address of its dashboard."""

    def __init__(self, address: str = LOCAL) -> None:
        from ray.dashboard.modules.serve.sdk import ServeSubmissionClient

        try:
            self._client: Any = ServeSubmissionClient(address)
        except ConnectionError as error:
            remedy = "Start one with `inlay cluster up CONFIG`, or check --address."
            raise MachineError(f"No Ray cluster answers at {address}.", remedy) from error

    def deploy(self, config: ServeConfig) -> None:
        """Deploy the applications of a config. Other applications stay as they are."""
        names = {each["name"] for each in config.content["applications"]}
        others = [each for each in self._deployed() if each["name"] not in names]
        content = add_versions(config.content)
        self._client.deploy_applications({**content, "applications": [*content["applications"], *others]})

    def remove(self) -> bool:
        """Remove the applications of Inlay; return whether others remain."""
        others = [each for each in self._deployed() if each["import_path"] != IMPORT_PATH]
        if others:
            self._client.deploy_applications({"applications": others})
        else:
            self._client.delete_applications()
        return bool(others)

    def status(self) -> dict[str, Any]:
        """Return the details of Inlay's applications, by name, as Serve reports them."""
        found = self._client.get_serve_details().get("applications", {})
        return {name: each for name, each in found.items() if _import_path(each) == IMPORT_PATH}

    def missing(self, names: Iterable[str]) -> str:
        """Return what is missing until these applications run; raise an error if one failed."""
        found, missing = self.status(), []
        for name in names:
            details = found.get(name, {})
            if details.get("status") in ("DEPLOY_FAILED", "UNHEALTHY"):
                raise MachineError(f"Application {name} failed: {_reason(details)}", "See `ray logs` for the rest.")
            if details.get("status") != "RUNNING":
                missing.append(describe(name, details))
        return "; ".join(missing)

    def _deployed(self) -> list[dict[str, Any]]:
        found = self._client.get_serve_details().get("applications", {}).values()
        return [each["deployed_app_config"] for each in found if each.get("deployed_app_config")]


def _import_path(details: Mapping[str, Any]) -> str:
    return str((details.get("deployed_app_config") or {}).get("import_path", ""))


def describe(name: str, details: Mapping[str, Any]) -> str:
    """Return the state of an application in one line.

    >>> replicas = [{"state": "RUNNING"}, {"state": "STARTING"}]
    >>> about = {"target_num_replicas": 2, "replicas": replicas, "message": ""}
    >>> describe("inlay", {"status": "DEPLOYING", "deployments": {"Engine": about}})
    'inlay: Engine 1 of 2'
    """
    parts = []
    for deployment, about in details.get("deployments", {}).items():
        running = sum(each["state"] == "RUNNING" for each in about["replicas"])
        said = f" ({one_line(about['message'])})" if about["message"] else ""
        parts.append(f"{deployment} {running} of {about['target_num_replicas']}{said}")
    return f"{name}: {', '.join(parts) or 'reading the package'}"


def _reason(details: Mapping[str, Any]) -> str:
    """Return the last line of the error of a failed application: the lines before are a traceback."""
    said = [details.get("message", ""), *(each["message"] for each in details.get("deployments", {}).values())]
    lines = [line.strip() for text in said for line in text.splitlines() if line.strip()]
    return lines[-1] if lines else "no reason was given"


def authenticate(*, create: bool) -> None:
    """Use Ray's token, as its own commands do. It must be called before Ray is imported. `create` makes a new token."""
    if "RAY_AUTH_MODE" in os.environ:
        return
    has_token = TOKEN.exists() or {"RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH"} & os.environ.keys()
    if create and not has_token:
        _ray({**os.environ, "RAY_AUTH_MODE": "token"}, "get-auth-token", "--generate")
    if create or has_token:
        os.environ["RAY_AUTH_MODE"] = "token"


def start_ray(cpus: int | None = None) -> None:
    """Start Ray on this machine, reachable on loopback only."""
    environment = {"RAY_SERVE_PROXY_USE_GRPC": "1", **os.environ}
    arguments = ["--head", "--node-ip-address", "127.0.0.1", "--dashboard-host", "127.0.0.1", "--disable-usage-stats"]
    arguments += ["--object-store-memory", str(OBJECT_STORE), *(["--num-cpus", str(cpus)] if cpus else [])]
    _ray(environment, "start", *arguments)
    _marker().parent.mkdir(parents=True, exist_ok=True)
    _marker().write_text(json.dumps({"address": LOCAL, "has_keys": VARIABLE in os.environ}))


def has_keys() -> bool:
    """Whether Ray was started by `start_ray` with API keys in the environment."""
    return _marker().exists() and bool(json.loads(_marker().read_text()).get("has_keys"))


def stop_ray() -> bool:
    """Stop Ray if `start_ray` started it; return whether it did."""
    if not _marker().exists():
        return False
    _ray(dict(os.environ), "stop", "--grace-period", "10")
    _marker().unlink()
    return True


def _ray(environment: dict[str, str], *arguments: str) -> None:
    ray = Path(sys.executable).with_name("ray")
    done = subprocess.run([ray, *arguments], env=environment, capture_output=True, text=True, umask=0o077, check=False)
    if done.returncode:
        said = (done.stderr or done.stdout).strip().splitlines()
        raise MachineError(f"`ray {arguments[0]}` failed: {said[-1] if said else done.returncode}.", PREPARE)


def _marker() -> Path:
    return machine.cache_folder() / "ray-was-started-by-inlay.json"

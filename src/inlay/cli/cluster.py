"""`inlay cluster`"""

from __future__ import annotations

import time
from importlib.util import find_spec
from pathlib import Path  # noqa: TC003 - typer reads the annotation
from typing import TYPE_CHECKING, Annotated

import typer
from rich.markup import escape

from inlay.cli.console import Command, err, make_table, out, print_json
from inlay.errors import MachineError, UsageError

if TYPE_CHECKING:
    from types import ModuleType

    from inlay.cluster.lifecycle import RayClient, ServeConfig

app = typer.Typer(
    help="Run replicas of a package on Ray Serve, with requests sent to where their prefix is cached.",
    no_args_is_help=True,
    rich_markup_mode="rich",
)
AddressOption = Annotated[
    str | None, typer.Option("--address", help="Ray's dashboard, such as http://head:8265; by default on this machine.")
]
POLL = 0.5
"""Seconds between two questions about a deployment."""
LINES = 10.0
"""Seconds between two lines of progress without a terminal."""


@app.command("up", cls=Command)
def up(
    config: Annotated[Path, typer.Argument(help="Serve config (YAML) whose application is inlay.cluster.app:build.")],
    address: AddressOption = None,
    cpus: Annotated[
        int | None, typer.Option("--cpus", min=1, help="CPUs that Ray may assign, if it is started; by default all.")
    ] = None,
    timeout: Annotated[float, typer.Option("--timeout", help="Seconds to wait until all replicas run.")] = 600.0,
) -> None:
    """Start or update a cluster, and wait until it runs.

    Starts Ray on this machine, on loopback, if it does not run and no --address is given. A changed config or package
    is rolled out replica by replica, without failed requests. The file also works with `serve deploy`.

    Example: [bold]inlay cluster up cluster.yaml[/]
    """
    lifecycle = _lifecycle(create_token=address is None)
    try:
        client = lifecycle.RayClient(address or lifecycle.LOCAL)
    except MachineError:
        if address is not None:
            raise
        client = None
    has_environment = address is None and (client is None or lifecycle.has_keys())
    wanted = lifecycle.read_config(config, has_environment=has_environment)
    if client is None:
        err.print("starting Ray …")
        lifecycle.start_ray(cpus)
        client = lifecycle.RayClient()
    client.deploy(wanted)
    _wait(client, wanted, timeout)
    for name, each in wanted.clusters.items():
        out.print(f"Cluster [bold]{escape(name)}[/] serves {escape(each.package)} at [bold]{wanted.url}/v1[/]")


@app.command("status", cls=Command)
def status(
    address: AddressOption = None, as_json: Annotated[bool, typer.Option("--json", help="Output JSON.")] = False
) -> None:
    """Show the state of each replica.

    Example: [bold]inlay cluster status[/]
    """
    lifecycle = _lifecycle()
    found = lifecycle.RayClient(address or lifecycle.LOCAL).status()
    if as_json:
        print_json(found)
        return
    if not found:
        out.print("No cluster is deployed. Start one with `inlay cluster up CONFIG`.")
        return
    table = make_table("application", "deployment", "replica", "state", "node", "since")
    for name, details in found.items():
        for deployment, about in details.get("deployments", {}).items():
            for replica in about["replicas"]:
                since = time.time() - (replica.get("start_time_s") or time.time())
                state, node = replica["state"], str(replica.get("node_ip"))
                table.add_row(name, deployment, replica["replica_id"], state, node, f"{since:.0f} s")
    out.print(table, markup=False)
    for name, details in found.items():
        out.print(": ".join(filter(None, (name, details["status"], details["message"]))), markup=False)


@app.command("down", cls=Command)
def down(address: AddressOption = None) -> None:
    """Remove the cluster, and stop Ray if `inlay cluster up` started it and nothing else runs on it.

    Example: [bold]inlay cluster down[/]
    """
    lifecycle = _lifecycle()
    client = lifecycle.RayClient(address or lifecycle.LOCAL)
    others = client.remove()
    stopped = address is None and not others and lifecycle.stop_ray()
    kept = "Ray was stopped." if stopped else "Ray keeps running."
    out.print(f"The cluster was removed. {kept}")


def _lifecycle(create_token: bool = False) -> ModuleType:
    """Return the module `inlay.cluster.lifecycle`, or raise an error with the install command."""
    if find_spec("ray") is None:
        raise UsageError("Clusters need Ray Serve.", "pip install 'inlay[cluster]'")
    from inlay.cluster import lifecycle

    lifecycle.authenticate(create=create_token)
    return lifecycle


def _wait(client: RayClient, wanted: ServeConfig, seconds: float) -> None:
    """Wait until the cluster runs; show what is missing."""
    start, told = time.monotonic(), ""
    shown = start
    with err.status("deploying …") as spinner:
        while missing := client.missing(wanted.clusters):
            now = time.monotonic()
            if now - start > seconds:
                raise UsageError(
                    f"After {seconds:.0f} s the cluster does not run yet: {missing}.", "Ask again: inlay cluster status"
                )
            spinner.update(f"{now - start:4.0f} s  {escape(missing)}")
            if not err.is_terminal and now - shown > LINES:
                news = missing if missing != told else "no change"
                err.print(f"{now - start:4.0f} s  {news}", markup=False, soft_wrap=True)
                shown, told = now, missing
            time.sleep(POLL)

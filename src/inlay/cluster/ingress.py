"""The HTTP server of a cluster as a Ray Serve deployment: validates, tokenizes and sends requests to replicas.

It is the server of `inlay serve`, on a `RemoteEngine`.
"""

from __future__ import annotations

import asyncio
import os
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from ray import serve
from ray.serve.context import _set_request_context

from inlay.cluster.metrics import ReplicaMetrics, merge
from inlay.cluster.placement import Fleet
from inlay.cluster.remote_engine import RemoteEngine, call_error
from inlay.cluster.replica_port import bind_to_node
from inlay.cluster.selector import Selector
from inlay.errors import UsageError
from inlay.package_cache import model_name
from inlay.serve.http.api_keys import Keys, read_keys
from inlay.serve.http.app import create_app
from inlay.serve.http.server import fingerprint
from inlay.serve.http.server_context import ServerContext
from inlay.serve.http.settings import ServerSettings, resolve_allowed_hosts
from inlay.sizes import parse_bytes

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator

    from ray.serve.handle import DeploymentHandle

    from inlay.cluster.config import ClusterConfig
    from inlay.cluster.placement import Message, Placement
    from inlay.runtime.request import Request
    from inlay.serve.http.middleware import App

SELECTOR = "selector"
"""Name of the selector's actor in the deployment of the ingress."""
SCRAPE_SECONDS = 2.0
"""Time limit for the metrics of all replicas."""


class LocalSelector:
    """A selector in this process, called as an actor is. An actor takes 2 ms more, and is needed to share one."""

    def __init__(self) -> None:
        self._selector = Selector()

    def __getattr__(self, name: str) -> Any:
        method = getattr(self._selector, name)
        return SimpleNamespace(remote=lambda *arguments: asyncio.shield(method(*arguments)))


class Ingress:
    """One process of the HTTP server."""

    def __init__(self, config: ClusterConfig, engines: DeploymentHandle) -> None:
        bind_to_node()
        self._config, self._engines = config, engines
        self._ingresses = serve.get_deployment_handle("Ingress", _check_exists=False)
        # by gRPC, not through Ray objects: tokens pass four times faster
        self._generate = engines.options(method_name="generate", stream=True, _by_reference=False)
        local = LocalSelector() if config.routing == "kv" and config.ingress_replicas == 1 else None
        fleet = Fleet(config.routing, lambda: local or serve.get_deployment_actor(SELECTOR))
        engine, version = RemoteEngine(self._call, fleet, config), fingerprint(config.package)
        self._context = ServerContext(engine, server_settings(config), version, scrape=self._scrape)
        self._name = serve.get_replica_context().replica_id.unique_id

    def __serve_build_asgi_app__(self) -> App:
        """Return the ASGI application. Serve calls it once."""
        return create_app(self._context)

    def check_health(self) -> None:
        """Take over changed API keys. Serve calls it every ten seconds. A file that cannot be read changes nothing."""
        with suppress(UsageError):
            self._context.keys = Keys(server_settings(self._config).keys)

    def metrics(self) -> ReplicaMetrics:
        """Return the metrics of this process."""
        return ReplicaMetrics("ingress", self._name, self._context.metrics.text())

    async def _call(self, request: Request, placement: Placement) -> AsyncGenerator[Message, None]:
        """Yield the messages of a replica. Serve's errors become those of `call_error`."""
        # Serve's router finds a pending request by this id, and the calls of one HTTP request would share it
        _set_request_context(_internal_request_id=placement.request_id)
        call, is_over = self._generate.remote(request, placement), False
        try:
            async for message in call:
                yield message
            is_over = True
        except Exception as error:
            raise call_error(getattr(error, "cause", error)) from error  # the cause is what the replica raised
        finally:
            if not is_over:
                call.cancel()
                made = call._replica_result_future  # Serve forgets a result that came in this very moment
                if made.done() and not made.cancelled() and made.exception() is None:
                    made.result().cancel()

    async def _scrape(self) -> bytes:
        """Return the metrics of all replicas of both deployments."""
        handles = self._ingresses, self._engines
        found: list[Any] = []
        for made in await asyncio.gather(*map(_broadcast_metrics, handles), return_exceptions=True):
            found += made if isinstance(made, list) else [made]
        pages = [each for each in found if isinstance(each, ReplicaMetrics)]
        return merge(pages, unreachable=len(found) - len(pages))


async def _broadcast_metrics(handle: DeploymentHandle) -> list[Any]:
    """Return the metrics of each replica, or the error instead: one that is busy must not hide the others."""

    async def one(result: Any) -> Any:
        try:
            async with asyncio.timeout(SCRAPE_SECONDS):
                return await result.get_async()
        except TimeoutError:
            result.cancel()
            raise

    results = await handle.broadcast("metrics")._fetch_replica_results_async()
    return list(await asyncio.gather(*map(one, results), return_exceptions=True))


def server_settings(config: ClusterConfig) -> ServerSettings:
    """Return the settings of the HTTP server.

    KV events are not served over HTTP: each replica publishes its own. Without API keys, only requests to this machine
    are answered (their Host header says so), unless the config says `insecure`.
    """
    keys = read_keys(None if config.api_key_file is None else Path(config.api_key_file))
    if not keys and not config.insecure and os.environ.get("RAY_SERVE_ENABLE_HA_PROXY") == "1":
        raise UsageError("HAProxy hides which machine a request comes from.", "Configure API keys, or set insecure.")
    return ServerSettings(
        name=config.name or model_name(config.package),
        keys=tuple(keys),
        max_prompt=config.max_prompt,
        max_tokens=config.max_tokens,
        max_body=parse_bytes(config.max_body),
        public_metrics=config.public_metrics,
        kv_routes=False,
        sends_request_id=False,
        allowed_hosts=() if config.insecure else resolve_allowed_hosts("127.0.0.1", bool(keys)),
    )

"""The Ray Serve application of a cluster: `import_path: inlay.cluster.app:build` in a Serve config."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import ray
from ray import serve
from ray.serve.config import AutoscalingConfig, AutoscalingPolicy, DeploymentActorConfig, RequestRouterConfig

from inlay.cluster.config import ClusterConfig
from inlay.cluster.engine_replica import EngineReplica
from inlay.cluster.ingress import SELECTOR, Ingress
from inlay.cluster.request_router import EngineRouter
from inlay.cluster.selector import EngineAddress, Selection, Selector
from inlay.errors import UsageError
from inlay.package.loader import read_manifest

if TYPE_CHECKING:
    from collections.abc import Collection, Sequence

    from ray.serve import Application

MORE_CONNECTIONS = 1_000
"""Requests that an ingress holds beyond those that its admission control admits: it must answer the others with 429."""


class SelectorActor:
    """The selector, in a process of its own that all ingresses share. Serve starts it again if it dies."""

    async def _service(self) -> Selector:
        if not hasattr(self, "_selector"):  # it belongs to the event loop of the actor, which __init__ has not
            self._selector = Selector()
        return self._selector

    async def update(self, new: Sequence[EngineAddress], gone: Sequence[str]) -> None:
        """Add and remove workers."""
        selector = await self._service()
        await selector.add(new)
        await selector.remove(gone)

    async def select(
        self, request: str, tokens: Sequence[int], salt: str, excluded: Collection[str], max_tokens: int
    ) -> Selection | None:
        """Choose a worker (`Selector.select`)."""
        return await (await self._service()).select(request, tokens, salt, excluded, max_tokens)

    async def start_decode(self, request: str) -> None:
        """State that a request has its first token."""
        await (await self._service()).start_decode(request)

    async def release(self, request: str) -> None:
        """Release a request that ended."""
        await (await self._service()).release(request)


class EngineDeployment(EngineReplica):
    """The engine as Serve creates it."""

    def __init__(self, config: dict[str, Any], version: str) -> None:
        """`version`, the hash of the package, is here so that replicas are replaced when the folder has another one."""
        made = ClusterConfig.model_validate(config)
        super().__init__(made, serve.get_replica_context().replica_id.unique_id, ray.util.get_node_ip_address())

    def __del__(self) -> None:
        """Serve calls it when the replica has finished its requests."""
        if hasattr(self, "_publisher"):
            self.close()


def build(options: dict[str, Any]) -> Application:
    """Return the application for the `args` of a Serve config."""
    args = ClusterConfig.model_validate(options)
    manifest, folder = read_manifest(args.package)
    config, version = args.model_dump(), folder.name
    if args.version not in (None, version):
        problem = f"{args.package} contains version {version}, and version {args.version} is wanted."
        raise UsageError(problem, "Copy the package to this node, or deploy again with `inlay cluster up`.")
    slots = min(args.slots or manifest.states[0].shape[0], manifest.states[0].shape[0])
    threads = {"OMP_NUM_THREADS": str(args.threads)}
    engines = serve.deployment(
        EngineDeployment,
        name="Engine",
        ray_actor_options={"num_cpus": args.cpus or args.threads, "runtime_env": {"env_vars": threads}},
        max_ongoing_requests=int(slots) + args.queue,
        max_queued_requests=args.queue * args.most_replicas,
        request_router_config=RequestRouterConfig(request_router_class=EngineRouter),
        health_check_period_s=5.0,
        health_check_timeout_s=15.0,
        graceful_shutdown_timeout_s=args.drain_seconds,
        graceful_shutdown_wait_loop_s=0.5,
        **_scaling(args),
    )
    ingress = serve.deployment(
        serve.ingress()(Ingress),
        name="Ingress",
        num_replicas=args.ingress_replicas,
        ray_actor_options={"num_cpus": 0, "runtime_env": {"env_vars": {"OMP_NUM_THREADS": "1"}}},
        max_ongoing_requests=(int(slots) + args.queue) * args.most_replicas + MORE_CONNECTIONS,
        graceful_shutdown_timeout_s=args.drain_seconds,
        graceful_shutdown_wait_loop_s=0.5,
        deployment_actors=[
            DeploymentActorConfig(name=SELECTOR, actor_class=ray.remote(SelectorActor), actor_options={"num_cpus": 0})
        ],
    )
    return ingress.bind(config, f"fp_{version[:12]}", engines.bind(config, version))


def _scaling(args: ClusterConfig) -> dict[str, Any]:
    if isinstance(args.replicas, int):
        return {"num_replicas": args.replicas}
    policy = AutoscalingPolicy(
        policy_function="inlay.cluster.autoscaling:queued_tokens_policy",
        policy_kwargs={"queued_tokens": args.replicas.queued_tokens},
    )
    interval = max(1.0, args.replicas.max / 100)  # the controller gets 100 reports a second at most
    scaling = AutoscalingConfig(
        min_replicas=args.replicas.min,
        max_replicas=args.replicas.max,
        upscale_delay_s=args.replicas.up_seconds,
        downscale_delay_s=args.replicas.down_seconds,
        metrics_interval_s=interval,
        look_back_period_s=3.0 * interval,
        policy=policy,
    )
    return {"autoscaling_config": scaling}

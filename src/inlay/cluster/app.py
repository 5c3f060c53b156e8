"""The Ray Serve application of a cluster: `import_path: inlay.cluster.app:build` in a Serve config."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import ray
from ray import serve
from ray.serve.config import AutoscalingConfig, AutoscalingPolicy, DeploymentActorConfig, RequestRouterConfig

from inlay.cluster.config import ClusterConfig, read_package
from inlay.cluster.engine_replica import EngineReplica
from inlay.cluster.ingress import SELECTOR, Ingress
from inlay.cluster.replica_port import bind_to_node
from inlay.cluster.request_router import EngineRouter
from inlay.cluster.selector import Selector

if TYPE_CHECKING:
    from ray.serve import Application

MORE_CONNECTIONS = 1_000
"""Requests that an ingress holds beyond those that its admission control admits: it must answer the others with 429."""


class SelectorActor(Selector):
    """The selector, in a process of its own that all ingresses share. Serve starts it again if it dies."""


class EngineDeployment(EngineReplica):
    """The engine as Serve creates it."""

    def __init__(self, config: ClusterConfig) -> None:
        bind_to_node()
        super().__init__(config, serve.get_replica_context().replica_id.unique_id, ray.util.get_node_ip_address())

    def __del__(self) -> None:
        """Serve calls it when the replica has finished its requests."""
        if hasattr(self, "_publisher"):
            self.close()


def build(options: dict[str, Any]) -> Application:
    """Return the application for the `args` of a Serve config."""
    args = ClusterConfig.model_validate(options)
    manifest, _ = read_package(args)
    slots = min(args.slots or manifest.states[0].shape[0], manifest.states[0].shape[0])
    # what waits in a replica stays there, so with replicas to come more must wait in the ingress
    waiting = args.queue if isinstance(args.replicas, int) else min(args.queue, int(slots))
    engines = serve.deployment(
        EngineDeployment,
        name="Engine",
        ray_actor_options={"num_cpus": args.cpus or args.threads, "runtime_env": _environment(args.threads)},
        max_ongoing_requests=int(slots) + waiting,
        max_queued_requests=-1,  # the admission control of the ingress bounds them, and all may come back at once
        request_router_config=RequestRouterConfig(request_router_class=EngineRouter),
        health_check_period_s=5.0,
        health_check_timeout_s=15.0,
        graceful_shutdown_timeout_s=args.drain_seconds,
        graceful_shutdown_wait_loop_s=0.5,
        **_scaling(args),
    )
    selector = DeploymentActorConfig(
        name=SELECTOR, actor_class=ray.remote(SelectorActor), actor_options={"num_cpus": 0}
    )
    ingress = serve.deployment(
        serve.ingress()(Ingress),
        name="Ingress",
        num_replicas=args.ingress_replicas,
        ray_actor_options={"num_cpus": 0, "runtime_env": _environment(1)},
        max_ongoing_requests=(int(slots) + args.queue) * args.most_replicas + MORE_CONNECTIONS,
        graceful_shutdown_timeout_s=2 * args.drain_seconds + 60,  # it runs again what replicas did not finish
        graceful_shutdown_wait_loop_s=0.5,
        deployment_actors=[selector] if args.ingress_replicas > 1 else [],
    )
    return ingress.bind(args, engines.bind(args))


def _environment(threads: int) -> dict[str, Any]:
    """Return the runtime environment of a replica. It has one event loop: others cost a millisecond for a request."""
    loops = {"RAY_SERVE_RUN_ROUTER_IN_SEPARATE_LOOP": "0", "RAY_SERVE_RUN_USER_CODE_IN_SEPARATE_THREAD": "0"}
    return {"env_vars": {"OMP_NUM_THREADS": str(threads), **loops}}


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

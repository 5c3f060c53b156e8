"""The request router of the engine replicas: Serve calls it for every request, in the process of the ingress.

It returns one replica. If that has no room, Serve asks again. An error here would leave the request unanswered, because
Serve only logs it. So every error leads to a random order.
"""

from __future__ import annotations

import logging
import random
from typing import TYPE_CHECKING, Any

from ray.serve.request_router import RequestRouter

from inlay.runtime.request import EngineUnavailableError

if TYPE_CHECKING:
    from ray.serve.request_router import PendingRequest, ReplicaID, RunningReplica

    from inlay.cluster.placement import Placement

LOGGER = logging.getLogger("ray.serve")


class EngineRouter(RequestRouter):  # type: ignore[misc]
    """Chooses a replica by cached prefix and load (`Fleet.choose`)."""

    _seen: list[RunningReplica] | None = None

    async def choose_replicas(
        self, candidate_replicas: list[RunningReplica], pending_request: PendingRequest | None = None
    ) -> list[list[RunningReplica]]:
        """Return the replica to try, or none while no replica fits the request."""
        try:
            return await self._choose(candidate_replicas, pending_request)
        except Exception:
            LOGGER.exception("Routing failed; a random replica is used.")
            return [[replica] for replica in random.sample(candidate_replicas, len(candidate_replicas))]

    def on_request_routed(self, pending_request: PendingRequest, replica_id: ReplicaID, result: object) -> None:
        """Record that a replica accepted a request."""
        _, placement = pending_request.args
        placement.fleet.accept(placement)

    async def _choose(self, replicas: list[RunningReplica], pending: Any) -> list[list[RunningReplica]]:
        request, placement = pending.args  # those of `EngineReplica.generate`: nothing else is routed
        pending.routing_context.should_backoff = True  # wait before Serve asks again
        if replicas is not self._seen:
            self._by_name = {each.replica_id.unique_id: each for each in replicas}
            self._about = {name: each.replica_metadata for name, each in self._by_name.items()}
            self._workers = {name: about["worker"] for name, about in self._about.items() if about}
            self._fitting: dict[tuple[str, str | None], list[str]] = {}
            self._seen = replicas
        key = placement.text, placement.package
        if key not in self._fitting:
            self._fitting[key] = [name for name in self._workers if _fits(self._about[name], placement)]
        if not self._fitting[key]:
            if placement.package is None or not replicas:
                return []
            if not pending.future.done():  # waiting would occupy one of Serve's few routing tasks
                problem = "No replica has the package that began this answer any more."
                pending.future.set_exception(EngineUnavailableError(problem, "Send the request again."))
                self._remove_pending_request_from_indices(pending)
            return [[replicas[0]]]  # Serve drops it, because the future is done, and routes the next request
        name = await placement.fleet.choose(placement, request, self._workers, self._fitting[key])
        return [[self._by_name[name]]] if name in self._by_name else []


def _fits(about: dict[str, Any], placement: Placement) -> bool:
    """Whether a replica has the tokenizer of the request, and the package that an earlier attempt used."""
    return about["text"] == placement.text and placement.package in (None, about["package"])

"""The request router of the engine replicas: Serve calls it for every request, in the process of the ingress.

An error here would leave the request unanswered, because Serve only logs it. So every error leads to a random order.
"""

from __future__ import annotations

import logging
import random
from typing import TYPE_CHECKING, Any

from ray.serve.request_router import RequestRouter

from inlay.cluster.placement import Placement

if TYPE_CHECKING:
    from ray.serve.request_router import PendingRequest, ReplicaID, RunningReplica

LOGGER = logging.getLogger("ray.serve")


class EngineRouter(RequestRouter):  # type: ignore[misc]
    """Ranks replicas by cached prefix and load (`Fleet.rank`)."""

    _seen: list[RunningReplica] | None = None

    async def choose_replicas(
        self, candidate_replicas: list[RunningReplica], pending_request: PendingRequest | None = None
    ) -> list[list[RunningReplica]]:
        """Return the replicas to try, in order. Serve sends the request to the first that has room."""
        try:
            return await self._rank(candidate_replicas, pending_request)
        except Exception:
            LOGGER.exception("Routing failed; a random replica is used.")
            return [[replica] for replica in random.sample(candidate_replicas, len(candidate_replicas))]

    def on_request_routed(self, pending_request: PendingRequest, replica_id: ReplicaID, result: object) -> None:
        """Record the replica that accepted a request: the first one may have been full."""
        placement = _placement(pending_request)
        if placement is not None and placement.fleet is not None:
            placement.fleet.accept(placement, replica_id.unique_id)

    async def _rank(self, replicas: list[RunningReplica], pending: PendingRequest | None) -> list[list[RunningReplica]]:
        placement = _placement(pending)
        if pending is None or placement is None or placement.fleet is None:
            return [list(replicas)]
        pending.routing_context.should_backoff = True  # wait before they are ranked again
        if replicas is not self._seen:
            self._by_name = {each.replica_id.unique_id: each for each in replicas}
            self._about = {name: each.replica_metadata for name, each in self._by_name.items()}
            self._seen = replicas
        workers = {name: about["worker"] for name, about in self._about.items() if _fits(about, placement)}
        if not workers:
            return []
        ranked = await placement.fleet.rank(placement, pending.args[0], workers)
        placement.fleet.charge(placement, ranked[0])
        return [[self._by_name[name]] for name in ranked]


def _placement(pending: PendingRequest | None) -> Placement | None:
    given: Any = () if pending is None else pending.args
    return given[1] if len(given) == 2 and isinstance(given[1], Placement) else None


def _fits(about: dict[str, Any], placement: Placement) -> bool:
    """Whether a replica has the tokenizer of the request, and the package that an earlier attempt used."""
    return about["text"] == placement.text and placement.package in (None, about["package"])

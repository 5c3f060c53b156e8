"""Ray Serve's request router and the ingress, without a cluster. Needs Ray: nightly."""

from __future__ import annotations

import asyncio
from collections import Counter
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest

from inlay.cluster.placement import Fleet, Placement
from inlay.cluster.selector import EngineAddress
from inlay.runtime.request import EngineUnavailableError, Request

pytestmark = pytest.mark.nightly
pytest.importorskip("ray", reason="pip install 'inlay[cluster]'")

from inlay.cluster.ingress import LocalSelector  # noqa: E402
from inlay.cluster.request_router import EngineRouter  # noqa: E402

if TYPE_CHECKING:
    from collections.abc import Sequence


class Router(EngineRouter):
    """Without Serve."""

    def __init__(self) -> None:
        self.forgotten: list[Any] = []

    def _remove_pending_request_from_indices(self, pending_request: Any) -> None:
        self.forgotten.append(pending_request)


def _replica(name: str, package: str, text: str = "text") -> Any:
    about = {"worker": EngineAddress(name, "", "", 32), "text": text, "package": package}
    return SimpleNamespace(replica_id=SimpleNamespace(unique_id=name), replica_metadata=about)


async def _choose(replicas: Sequence[Any], package: str | None, text: str = "text") -> tuple[Any, Any, Router]:
    router = Router()
    placement = Placement("r", text, package, fleet=Fleet("least_loaded", lambda: None))
    future = asyncio.get_running_loop().create_future()
    pending: Any = SimpleNamespace(args=(Request((1, 2)), placement), future=future, routing_context=SimpleNamespace())
    found = await router.choose_replicas(list(replicas), pending)
    return found, pending, router


def test_only_replicas_that_fit_are_chosen() -> None:
    replicas = [_replica("old", "a"), _replica("new", "b"), _replica("other", "c", "other text")]
    seen: Counter[str] = Counter()
    for _ in range(30):
        found, *_ = asyncio.run(_choose(replicas, None))
        seen[found[0][0].replica_id.unique_id] += 1
    assert set(seen) == {"old", "new"}
    found, *_ = asyncio.run(_choose(replicas, "b"))
    assert found == [[replicas[1]]]


def test_an_answer_whose_package_is_gone_ends_at_once() -> None:
    """Waiting would occupy one of the few tasks that route the requests of all clients."""
    replicas = [_replica("new", "b")]
    found, pending, router = asyncio.run(_choose(replicas, "a"))
    assert isinstance(pending.future.exception(), EngineUnavailableError)
    assert (found, router.forgotten) == ([replicas], [pending])


@pytest.mark.parametrize(("replicas", "package", "text"), [((), "a", "text"), ((_replica("new", "b"),), None, "older")])
def test_a_request_waits_for_a_replica_that_may_still_come(replicas: Any, package: str | None, text: str) -> None:
    found, pending, _ = asyncio.run(_choose(replicas, package, text))
    assert (found, pending.future.done()) == ([], False)


def test_a_cancelled_selection_releases_what_it_reserved() -> None:
    """The caller's time limit must not reach into the selection, whose reservation nobody would release."""
    pytest.importorskip("dynamo.llm")

    async def main() -> None:
        selector = LocalSelector()
        await selector.update.remote([EngineAddress("one", "tcp://127.0.0.1:1", "", 32)], [])
        for number in range(20):
            call = asyncio.ensure_future(selector.select.remote(f"r{number}", range(640), "", (), 50))
            await asyncio.sleep(0.0002 * number)
            call.cancel()
            await selector.release.remote(f"r{number}")
        await asyncio.sleep(0.5)
        for _ in range(600):
            if not selector._selector._reservations:
                break
            await asyncio.sleep(0.1)
        assert not selector._selector._reservations
        loads = await selector._selector._service.potential_loads({"token_ids": [1] * 64})
        assert all(each["potential_decode_blocks"] <= 2 for each in loads["loads"]), loads

    asyncio.run(main())

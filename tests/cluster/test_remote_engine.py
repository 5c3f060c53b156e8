"""Requests on engines that fail: two real engines in this process, and a network that loses, delays and refuses."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import httpx
import pytest

from inlay.cluster import engine_replica, remote_engine
from inlay.cluster.config import ClusterConfig
from inlay.cluster.engine_replica import EngineReplica
from inlay.cluster.placement import Fleet
from inlay.cluster.remote_engine import RemoteEngine, call_error
from inlay.cluster.selector import EngineAddress
from inlay.errors import InlayError, ProgramError, UsageError
from inlay.runtime.outputs import collect
from inlay.runtime.request import EngineClosedError, EngineUnavailableError, QueueFullError, Request
from inlay.runtime.sampling import Sampling
from inlay.serve.http.app import create_app
from inlay.serve.http.server_context import ServerContext
from inlay.serve.http.settings import ServerSettings
from tests.serve.server_process import NAME, SECONDS

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Callable, Coroutine, Iterator
    from pathlib import Path

    from inlay.cluster.placement import Message, Placement
    from inlay.runtime.engine import Engine
    from inlay.runtime.outputs import Completion, TokenOutput


@pytest.fixture(scope="module")
def config(package: Path) -> ClusterConfig:
    return ClusterConfig(package=str(package), replicas=2, routing="least_loaded", queue=40)


@pytest.fixture(scope="module")
def replicas(config: ClusterConfig) -> Iterator[dict[str, EngineReplica]]:
    made = {name: EngineReplica(config, name, "127.0.0.1") for name in ("one", "two")}
    yield made
    for each in made.values():
        each.close()


RAISED: dict[str | None, Exception] = {
    "lost": ConnectionResetError("The connection was closed."),
    "refused": QueueFullError(9, 3.0),
    "closed": EngineClosedError(),
    "broken": ProgramError("A call of the package failed."),
    "full": QueueFullError(9, 3.0),  # by the ingress itself, because too many wait for a replica
    "crash": ZeroDivisionError(),  # a defect of the ingress
}


@dataclass
class Network:
    """Calls replicas as Ray Serve does, and fails where `fault` says so."""

    replicas: dict[str, EngineReplica]
    fault: Callable[[Placement, int], str | None] = lambda placement, message: None
    """Called before each message, with its number: a key of `RAISED`, `silent`, `other`, `end`, or None."""
    counts: Counter[str] = field(default_factory=Counter)
    delay: float = 0.0
    """Seconds that a request waits because all replicas are full."""

    async def call(self, request: Request, placement: Placement) -> AsyncGenerator[Message, None]:
        assert placement.fleet is not None
        candidates = {name: EngineAddress(name, "", "", 32) for name in self.replicas}
        if self.delay:
            self.counts["waits"] += 1
            await asyncio.sleep(self.delay)
        name = await placement.fleet.choose(placement, request, candidates, candidates)
        placement.fleet.accept(placement)
        messages = self.replicas[name].generate(request, placement)
        self.counts["calls"] += 1
        number = 0
        try:
            async for message in messages:
                kind = self.fault(placement, number)
                if kind in RAISED:
                    raise RAISED[kind]
                if kind == "end":
                    return
                if kind == "cancelled":
                    raise asyncio.CancelledError
                if kind == "silent":
                    self.counts["silent"] += 1
                    await asyncio.sleep(SECONDS)
                number += 1
                others = [_another(each) for each in message.outputs]
                yield message._replace(outputs=others) if kind == "other" else message
        except Exception as error:
            raise error if error in (RAISED["full"], RAISED["crash"]) else call_error(error) from error
        finally:
            await messages.aclose()


def _another(output: TokenOutput) -> TokenOutput:
    return replace(output, token=output.token + 1, text="?")


def remote(network: Network, config: ClusterConfig) -> RemoteEngine:
    return RemoteEngine(network.call, Fleet("least_loaded", lambda: None), config)


def requests(count: int, seed: int) -> list[Request]:
    """Greedy, sampled and penalized requests, with and without stop strings."""
    rng = random.Random(seed)
    penalized = Sampling(1.0, top_p=0.9, repetition_penalty=1.2, seed=1)
    made = []
    for number in range(count):
        prompt = tuple(rng.randrange(3, 256) for _ in range(rng.choice([3, 40, 200])))
        sampling = rng.choice([Sampling(), Sampling(0.8, seed=number), penalized])
        stop = ("e",) if number % 3 == 0 else ()
        made.append(Request(prompt, sampling, rng.choice([1, 7, 30]), stop, ignore_eos=True, id=f"r{number}"))
    return made


def is_first(placement: Placement) -> bool:
    """Whether it is the first attempt."""
    return placement.request_id.endswith("-0")


def run(main: Coroutine[Any, Any, Any]) -> Any:
    return asyncio.run(asyncio.wait_for(main, 10 * SECONDS))


async def answers(engine: RemoteEngine, asked: list[Request]) -> list[Completion | InlayError]:
    """Run requests at once."""

    async def one(request: Request) -> Completion | InlayError:
        try:
            return collect([output async for output in engine.submit(request)])
        except InlayError as error:
            return error

    return list(await asyncio.gather(*map(one, asked)))


def test_answers_are_those_of_one_engine_whatever_fails(
    replicas: dict[str, EngineReplica], config: ClusterConfig, engine: Engine
) -> None:
    """One attempt in two fails, before its first message, between tokens or at its last one; each kind of request."""
    asked = requests(24, seed=7)
    expected = [collect(engine.submit(each, wait=True)) for each in asked]
    rng = random.Random(8)
    doomed: dict[str, tuple[int, str]] = {}

    def fault(placement: Placement, message: int) -> str | None:
        if placement.request_id not in doomed:
            kind = rng.choice(["lost", "refused", "closed", "end"]) if rng.random() < 0.5 else ""
            doomed[placement.request_id] = (rng.choice([0, 0, 1, 3, 10]), kind)
        at, kind = doomed[placement.request_id]
        return kind if message == at and not placement.request_id.endswith("-4") else None

    network = Network(replicas, fault)
    remote_one = remote(network, config)
    found = run(answers(remote_one, asked))
    assert [(each.text, each.tokens, each.finish_reason) for each in found] == [
        (each.text, each.tokens, each.finish_reason) for each in expected
    ]
    counts = remote_one.counts()
    assert counts["retries"] > 5
    assert counts["resumed"] > 0
    assert counts["attempts_failed.failed"] > 0
    assert counts["waiting_requests"] == counts["decode_sequences"] == 0
    assert not +remote_one.fleet._tokens, "no load is left"


def test_a_sampled_request_without_a_seed_is_resumed(replicas: dict[str, EngineReplica], config: ClusterConfig) -> None:
    network = Network(replicas, lambda placement, message: "lost" if message == 3 and is_first(placement) else None)
    request = Request((5, 6, 7), Sampling(1.0), 20, ignore_eos=True)
    (found,) = run(answers(remote(network, config), [request]))
    assert len(found.tokens) == 20
    assert network.counts["calls"] == 2


def test_another_continuation_ends_the_answer(replicas: dict[str, EngineReplica], config: ClusterConfig) -> None:
    """The second replica makes other tokens: the client gets an error, and none of them."""

    def fault(placement: Placement, message: int) -> str | None:
        return ("lost" if message == 3 else None) if is_first(placement) else "other"

    async def main() -> tuple[list[int], str]:
        found: list[int] = []
        handle = remote(Network(replicas, fault), config).submit(Request((5, 6, 7), max_tokens=20, ignore_eos=True))
        try:
            async for output in handle:
                found.append(output.token)  # noqa: PERF401 - it ends with an error
        except ProgramError as error:
            return found, str(error)
        raise AssertionError(f"it ended with {found}")

    found, said = run(main())
    expected = run(answers(remote(Network(replicas), config), [Request((5, 6, 7), max_tokens=20, ignore_eos=True)]))
    assert 0 < len(found) < 20
    assert tuple(found) == expected[0].tokens[: len(found)]
    assert "continued differently" in said


def test_a_silent_replica_is_left(
    replicas: dict[str, EngineReplica], config: ClusterConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(remote_engine, "SILENCE", 2.0)
    network = Network(replicas)
    network.fault = lambda placement, message: "silent" if message == 2 and not network.counts["silent"] else None
    engine = remote(network, config)
    (found,) = run(answers(engine, [Request((5, 6, 7), max_tokens=8, ignore_eos=True)]))
    assert len(found.tokens) == 8
    assert engine.counts()["attempts_failed.silent"] == 1
    assert sum(engine.fleet.is_suspect(name) for name in replicas) == 1


def test_a_request_may_wait_longer_than_a_replica_may_be_silent(
    replicas: dict[str, EngineReplica], config: ClusterConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(remote_engine, "SILENCE", 0.4)
    network = Network(replicas, delay=1.5)
    (found,) = run(answers(remote(network, config), [Request((5, 6, 7), max_tokens=8, ignore_eos=True)]))
    assert len(found.tokens) == 8
    assert network.counts["waits"] == 1
    monkeypatch.setattr(remote_engine, "WAITING", 0.5)
    (found,) = run(answers(remote(network, config), [Request((5, 6, 7), max_tokens=8)]))
    assert isinstance(found, EngineUnavailableError)
    assert "No replica took the request" in str(found)


def test_a_call_that_serve_cancels_is_tried_again(
    replicas: dict[str, EngineReplica], config: ClusterConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(remote_engine, "RETRY_PAUSE", 0.001)
    network = Network(replicas, lambda placement, message: "cancelled" if is_first(placement) else None)
    (found,) = run(answers(remote(network, config), [Request((5, 6, 7), max_tokens=8, ignore_eos=True)]))
    assert len(found.tokens) == 8
    assert network.counts["calls"] == 2


@pytest.mark.parametrize(
    ("kind", "error", "calls"),
    [
        ("lost", EngineUnavailableError, remote_engine.ATTEMPTS),
        ("broken", ProgramError, 1),
        ("full", QueueFullError, 1),
        ("crash", ProgramError, 1),
    ],
)
def test_what_cannot_succeed_ends_with_an_error(
    kind: str,
    error: type[InlayError],
    calls: int,
    replicas: dict[str, EngineReplica],
    config: ClusterConfig,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(remote_engine, "RETRY_PAUSE", 0.001)
    network = Network(replicas, lambda placement, message: kind)
    (found,) = run(answers(remote(network, config), [Request((5, 6, 7), max_tokens=8)]))
    assert isinstance(found, error)
    assert network.counts["calls"] == calls


def test_a_cancelled_request_ends_in_its_replica(replicas: dict[str, EngineReplica], config: ClusterConfig) -> None:
    async def main() -> None:
        engine = remote(Network(replicas), config)
        handle = engine.submit(Request((5, 6, 7), max_tokens=3_000, ignore_eos=True))
        async for _ in handle:
            break
        handle.cancel()
        while engine.counts()["decode_sequences"] or any(
            each.record_autoscaling_stats()["running"] for each in replicas.values()
        ):
            await asyncio.sleep(0.01)

    run(main())


def test_a_request_for_another_tokenizer_is_refused(replicas: dict[str, EngineReplica], config: ClusterConfig) -> None:
    engine = remote(Network(replicas), config)
    engine._fingerprint = "another"
    (found,) = run(answers(engine, [Request((5, 6, 7), max_tokens=8)]))
    assert isinstance(found, ProgramError)


def test_a_prompt_that_is_too_long_is_refused_at_once(config: ClusterConfig) -> None:
    engine = remote(Network({}), config)
    with pytest.raises(InlayError, match="limited to 4096"):
        engine.submit(Request((5,) * 5_000))


def test_health(replicas: dict[str, EngineReplica], package: Path) -> None:
    for each in replicas.values():
        each.check_health()
    stuck = EngineReplica(ClusterConfig(package=str(package)), "stuck", "127.0.0.1")
    stuck._engine.close()
    with pytest.raises(ProgramError, match="no progress"):
        stuck.check_health()
    stuck.close()


def test_over_http(replicas: dict[str, EngineReplica], config: ClusterConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    """The server of `inlay serve` on a cluster: resumed streams, 429 if it is full, 503 without a replica."""
    monkeypatch.setattr(remote_engine, "RETRY_PAUSE", 0.001)
    network = Network(replicas)
    context = ServerContext(remote(network, config), ServerSettings(NAME, kv_routes=False), "fp")
    body = {"model": NAME, "prompt": "The fox", "max_tokens": 12, "temperature": 0, "ignore_eos": True}

    async def main() -> None:
        transport = httpx.ASGITransport(app=create_app(context))
        async with httpx.AsyncClient(transport=transport, base_url="http://cluster", timeout=SECONDS) as client:
            whole = await client.post("/v1/completions", json=body)
            network.fault = lambda placement, message: "lost" if message == 3 and is_first(placement) else None
            streamed = await client.post("/v1/completions", json={**body, "stream": True})
            parts = [line[6:] for line in streamed.text.splitlines() if line.startswith("data: {")]
            text = "".join(httpx.Response(200, text=part).json()["choices"][0]["text"] for part in parts)
            assert text == whole.json()["choices"][0]["text"]
            for kind, status, code in (("full", 429, "overloaded"), ("lost", 503, "unavailable")):
                network.fault = lambda placement, message, kind=kind: kind  # type: ignore[misc]
                answer = await client.post("/v1/completions", json={**body, "stream": True})
                assert (answer.status_code, answer.json()["error"]["code"]) == (status, code)
                assert "retry-after" in answer.headers
            page = (await client.get("/metrics")).text
            assert 'inlay_attempts_failed_total{kind="failed"} 6.0' in page
            assert 'inlay_placements_total{policy="least_loaded"}' in page

    run(main())


def test_a_reader_of_a_cancelled_request_does_not_wait(
    replicas: dict[str, EngineReplica], config: ClusterConfig
) -> None:
    """A client may be gone while the server still waits for outputs."""

    async def main() -> None:
        handle = remote(Network(replicas), config).submit(Request((5, 6, 7), max_tokens=200, ignore_eos=True))
        async for _ in handle:
            handle.cancel()

    with pytest.raises(EngineClosedError):
        run(main())


def test_attempts_of_two_processes_have_different_names(
    replicas: dict[str, EngineReplica], config: ClusterConfig
) -> None:
    """They name reservations of a selector that several processes share. The client chooses the id of the request."""
    names = []

    def record(placement: Placement, message: int) -> None:
        names.append(placement.request_id)

    for _ in range(2):
        run(answers(remote(Network(replicas, record), config), [Request((5, 6, 7), max_tokens=1, id="1")]))
    assert len(set(names)) == 2


def test_a_package_of_another_version_is_refused(config: ClusterConfig) -> None:
    """A replica that starts again must not take what was built into the folder meanwhile."""
    other = config.model_copy(update={"version": "0" * 64})
    for start in (lambda: EngineReplica(other, "three", "127.0.0.1"), lambda: remote(Network({}), other)):
        with pytest.raises(UsageError, match="on this node"):
            start()


def test_a_long_step_is_progress(replicas: dict[str, EngineReplica], monkeypatch: pytest.MonkeyPatch) -> None:
    """A large model may take longer for a chunk of a prompt than Serve's health checks are apart."""
    replica, now = replicas["one"], [1000.0]
    counts = {"steps": 7.0, "prefill_sequences": 1.0, "decode_sequences": 0.0}
    monkeypatch.setattr(engine_replica, "monotonic", lambda: now[0])
    monkeypatch.setattr(replica._engine, "counts", lambda: counts)
    for _ in range(5):
        replica.check_health()
        now[0] += 15.0
    now[0] += engine_replica.STUCK
    with pytest.raises(ProgramError, match="no progress"):
        replica.check_health()
    counts["steps"] = 8.0
    replica.check_health()

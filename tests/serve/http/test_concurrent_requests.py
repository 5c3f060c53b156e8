"""The real model, served to many at once: everybody gets what they would get alone, and nothing of anybody else's.

In float32, where the order in which sums are taken hardly matters: a token may differ only where the two best are
closer than 1e-4, and such answers are counted.
"""

from __future__ import annotations

import asyncio
import random
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from tools.benchmarks.http_client import ClientResult, send_request

from inlay.flow import BuildOptions, build
from inlay.package.loader import load_package
from inlay.runtime import Sampling
from inlay.runtime.request import Request
from inlay.runtime.text_codec import TextCodec
from tests.runtime.single_request import CLOSE, alone
from tests.serve.server_process import Server

if TYPE_CHECKING:
    from collections.abc import Sequence

    from inlay.package.loader import LoadedPackage

pytestmark = pytest.mark.nightly
REQUESTS, CLIENTS = 500, 16
WORDS = Path(__file__).read_text().split()


@dataclass(frozen=True)
class Case:
    """A request, how it is put to a server, and when its client goes away."""

    request: Request
    body: dict[str, Any]
    gone: float | None = None
    canary: str = ""


@pytest.fixture(scope="module")
def package(smollm2: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("smollm2") / "float32"
    build(str(smollm2), path, BuildOptions(weights="float32", max_length=512, max_batch=8))
    return path


def _canary(number: int) -> str:
    return "".join(random.Random(number).choices("BCDFGHJKLMNPQRSTVWXZ", k=7))


def _cases(text: TextCodec) -> list[Case]:
    rng = random.Random(0)
    shared = " ".join(rng.choices(WORDS, k=120))
    cases = []
    for number in range(REQUESTS):
        canary = _canary(number) if number % 5 == 0 else ""
        if canary:
            prompt = f"The secret word is {canary}. The secret word is {canary}. The secret word is"
        else:
            own = " ".join(rng.choices(WORDS, k=rng.choice([1, 5, 20, 60])))
            prompt = f"{shared} {own}" if rng.random() < 0.3 else own
        greedy = bool(canary) or rng.random() < 0.6
        sampling = Sampling() if greedy else Sampling(temperature=0.8, top_p=rng.choice([1.0, 0.9]), seed=number)
        made = 12 if canary else rng.choice([1, 5, 20, 48])
        request = Request(tuple(text.encode(prompt)), sampling, max_tokens=made)
        body = {"prompt": prompt, "temperature": sampling.temperature, "top_p": sampling.top_p, "max_tokens": made}
        body |= {} if greedy else {"seed": number}
        cases.append(Case(request, {"model": "tiny", **body}, rng.random() if rng.random() < 0.1 else None, canary))
    return cases


async def _put(server: Server, cases: Sequence[Case]) -> list[ClientResult | None]:
    """All of them, so many at a time; None for those whose client went away."""
    doors = asyncio.Semaphore(CLIENTS)

    async def one(case: Case) -> ClientResult | None:
        async with doors:
            asking = asyncio.create_task(send_request(server.port, case.body))
            await asyncio.wait([asking], timeout=case.gone)
            if not asking.done():
                asking.cancel()
                await asyncio.gather(asking, return_exceptions=True)
                return None
            return asking.result()

    return list(await asyncio.gather(*map(one, cases)))


def _parts(package: LoadedPackage, text: TextCodec, case: Case, found: str) -> tuple[bool, float]:
    """Whether an answer differs from the one given alone, and how close the two best were where it does."""
    tokens, ahead = alone(package, text, case.request)
    kept = [token for token in tokens if token not in text.eos]
    wanted = text.decode(kept)
    if found == wanted:
        return False, 0.0
    same = next(
        at for at in range(len(kept) + 1) if at == len(kept) or not found.startswith(text.decode(kept[: at + 1]))
    )
    return True, min(ahead[: same + 2])


def test_500_requests_get_what_each_gets_alone(package: Path, tmp_path: Path) -> None:
    loaded = load_package(package)
    text = TextCodec.load(loaded.folder / "tokenizer")
    cases = _cases(text)
    with Server(package, tmp_path) as server:
        told = asyncio.run(_put(server, cases))
        figures = server.figures()
    completed = [(case, each) for case, each in zip(cases, told, strict=True) if each is not None]
    assert {each.status for _, each in completed} == {200}
    differing = 0
    for case, each in completed:
        differs, close = _parts(loaded, text, case, each.text)
        assert not differs or close < CLOSE, (case.body, each.text)
        differing += differs
    told_own = sum(bool(case.canary) and case.canary in each.text for case, each in completed)
    for case, each in completed:
        others = [other.canary for other in cases if other.canary and other is not case and other.canary in each.text]
        assert not others, "a word of another request"
    print(
        f"{len(completed)} of {len(cases)} completed, {differing} differ where two scores are closer than {CLOSE},"
        f" {told_own} canaries said their own word; {figures}"
    )
    assert len(completed) > 0.8 * REQUESTS
    assert differing <= REQUESTS // 50
    assert told_own > REQUESTS // 5 // 2, "words that are repeated would be seen elsewhere"

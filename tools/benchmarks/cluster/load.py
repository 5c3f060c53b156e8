"""Bounded load on a cluster, and what came of each request."""

from __future__ import annotations

import asyncio
import random
import time
from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from tools.benchmarks.http_client import ClientResult, percentile, send_request
from tools.benchmarks.serving import prompt

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Sequence

HANGS = 120.0
"""Seconds after which a request counts as hanging."""


@dataclass
class Outcome:
    """A request, and how it ended."""

    body: dict[str, Any]
    end: str
    """`exact` (the expected text), `whole` (all tokens; nothing is known to compare with), `wrong`, `cut` (some of the
    expected text, then an error), `refused` (an error before any), `short`, `hangs`."""
    result: ClientResult = field(default_factory=ClientResult)


def judge(body: dict[str, Any], done: ClientResult | BaseException, expected: str | None) -> Outcome:
    """Compare an answer with the expected text; without one, only its number of tokens."""
    if isinstance(done, BaseException):
        return Outcome(body, "hangs" if isinstance(done, TimeoutError) else f"broken: {type(done).__name__}")
    if done.status != 200:
        return Outcome(body, f"refused {done.status}", done)
    if done.error or done.finish is None:
        right = expected is None or expected.startswith(done.text)
        return Outcome(body, ("cut" if done.error else "ends without a reason") if right else "wrong", done)
    if expected is not None:
        return Outcome(body, "exact" if expected == done.text else "wrong", done)
    prompts = len(body["prompt"]) if isinstance(body["prompt"], list) else 1
    least = prompts * body.get("n", 1) * (body["max_tokens"] if body.get("ignore_eos") else 1)
    return Outcome(body, "whole" if done.tokens >= least else "short", done)


async def run(
    port: int,
    bodies: Sequence[dict[str, Any]],
    clients: int,
    expected: Callable[[dict[str, Any]], str | None] = lambda body: None,
    meanwhile: Callable[[Callable[[], int]], Awaitable[None]] | None = None,
) -> list[Outcome]:
    """Send all requests from so many clients, each one after the other. `meanwhile` gets the number of those done."""
    left, outcomes = iter(bodies), list[Outcome]()

    async def client() -> None:
        for body in left:
            outcomes.append(await _one(port, body, expected(body)))

    disturbing = asyncio.ensure_future(meanwhile(lambda: len(outcomes))) if meanwhile is not None else None
    await asyncio.gather(*(client() for _ in range(clients)))
    if disturbing is not None:
        if disturbing.done():
            disturbing.result()  # an error, because a disturbance does not end by itself
        disturbing.cancel()
        await asyncio.gather(disturbing, return_exceptions=True)
    return outcomes


async def _one(port: int, body: dict[str, Any], expected: str | None) -> Outcome:
    key = body.get("key")
    sent = {name: value for name, value in body.items() if name != "key"}
    try:
        async with asyncio.timeout(HANGS):
            return judge(body, await send_request(port, sent, key=key), expected)
    except (OSError, TimeoutError, ValueError, IndexError) as error:
        return judge(body, error, expected)


def shared_prefixes(count: int, prefixes: int, words: int, made: int, seed: int) -> list[dict[str, Any]]:
    """Return requests that begin with one of several long texts and end differently."""
    rng = random.Random(seed)
    begin = [prompt(words, 10_000 + number) for number in range(prefixes)]
    return [
        {
            "prompt": f"{rng.choice(begin)} {prompt(8, seed * count + number)}",
            "max_tokens": made,
            "temperature": 0,
            "ignore_eos": True,
        }
        for number in range(count)
    ]


def summary(outcomes: Sequence[Outcome], seconds: float) -> dict[str, Any]:
    """Return counts, cached tokens, latencies and throughput."""
    whole = [each.result for each in outcomes if each.end in ("exact", "whole")]
    if len(whole) < len(outcomes):  # times without the requests that failed would flatter
        return {"ends": dict(Counter(each.end for each in outcomes)), "seconds": round(seconds, 1)}
    firsts = [each.time_to_first_token for each in whole if each.chunk_times]
    return {
        "ends": dict(Counter(each.end for each in outcomes)),
        "prompt_tokens": sum(each.prompt_tokens for each in whole),
        "cached_tokens": sum(each.cached for each in whole),
        "first_token_p50_s": round(percentile(firsts, 0.5), 3),
        "first_token_p99_s": round(percentile(firsts, 0.99), 3),
        "longest_s": round(max(each.end_time - each.start_time for each in whole), 1),
        "requests_per_second": round(len(whole) / seconds, 2),
        "seconds": round(seconds, 1),
    }


def now() -> float:
    """Return the time for durations."""
    return time.perf_counter()

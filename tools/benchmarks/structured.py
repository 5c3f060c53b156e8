"""Measure structured output on a served package: how many answers finish and validate, and what a step costs.

    python -m tools.benchmarks.structured PACKAGE [--schemas 1000] [--seed 0] [--suite FOLDER]

Each of the random schemas is asked for alone and among 16 requests, every second time as a stream. The suite is the
folder `tests/draft2020-12` of the JSON Schema test suite; its schemas are not bounded, so fewer answers finish. The
costs are ratios of the time of a step, and of a first token, with and without a schema, in interleaved rounds.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import statistics
import sys
import urllib.request
from collections import Counter
from pathlib import Path
from time import perf_counter
from typing import TYPE_CHECKING, Any

import jsonschema_rs

from inlay.bench.metrics import ratio
from inlay.runtime import Sampling
from inlay.runtime.engine import Engine
from inlay.runtime.grammar import Grammar
from inlay.runtime.outputs import collect
from inlay.runtime.request import Request
from inlay.runtime.settings import EngineSettings
from tools.benchmarks.http_client import send_request
from tools.benchmarks.random_schemas import random_schema, suite
from tools.benchmarks.serving import serving

if TYPE_CHECKING:
    from collections.abc import Sequence

BATCH = 16
LONG = {"type": "object", "properties": {"text": {"type": "string", "minLength": 4000}}, "required": ["text"]}
"""A schema of which most tokens are allowed in most steps."""


def _body(schema: Any, number: int, tokens: int) -> dict[str, Any]:
    task = f"Write an example of JSON with this schema: {json.dumps(schema, ensure_ascii=False)[:600]}"
    form = {"type": "json_schema", "json_schema": {"name": "any", "schema": schema}}
    return {
        "model": "model",
        "messages": [{"role": "user", "content": task}],
        "response_format": form,
        "max_tokens": tokens,
        "temperature": 0.7,
        "seed": number,
    }


def _ask_whole(port: int, body: dict[str, Any]) -> tuple[str, str | None, str]:
    url = f"http://127.0.0.1:{port}/v1/chat/completions"
    request = urllib.request.Request(url, json.dumps(body).encode(), {"Content-Type": "application/json"})
    try:
        with urllib.request.urlopen(request) as response:
            choice = json.load(response)["choices"][0]
    except urllib.error.HTTPError as error:
        return "", None, json.load(error)["error"]["message"]
    return choice["message"]["content"], choice["finish_reason"], ""


async def _ask(port: int, body: dict[str, Any], stream: bool) -> tuple[str, str | None, str]:
    if not stream:
        return await asyncio.to_thread(_ask_whole, port, body)
    made = await send_request(port, body, path="/v1/chat/completions")
    return made.text, made.finish, made.error or ("" if made.status == 200 else f"status {made.status}")


async def answers(port: int, schemas: Sequence[Any], clients: int, tokens: int) -> dict[str, Any]:
    """Ask for each schema, `clients` at a time; return how many answers finished and validated."""
    counts: Counter[str] = Counter()
    wrong: list[str] = []
    refused: Counter[str] = Counter()
    left = list(enumerate(schemas))[::-1]

    async def work() -> None:
        while left:
            number, schema = left.pop()
            text, finish, error = await _ask(port, _body(schema, number, tokens), bool(number % 2))
            if finish is None:
                counts["refused"] += 1
                refused[error[:90]] += 1
            elif finish == "length":
                counts["cut off"] += 1
            else:
                counts["finished"] += 1
                try:
                    valid = jsonschema_rs.is_valid(schema, json.loads(text))
                except ValueError:
                    valid = False
                counts["valid"] += valid
                if not valid:
                    wrong.append(f"{json.dumps(schema)}: {text}")
            done = f"{clients} at a time: {len(schemas) - len(left)} of {len(schemas)}, {dict(counts)}"
            print(f"\r{done}", end="", flush=True, file=sys.stderr)

    await asyncio.gather(*(work() for _ in range(clients)))
    print(file=sys.stderr)
    return {**counts, "wrong": wrong[:10], "reasons": dict(refused.most_common(12))}


def costs(engine: Engine, batch: int, tokens: int, rounds: int) -> dict[str, Any]:
    """Return the time of a step with a grammar, relative to the time of a step without."""
    times: dict[str, list[float]] = {"free": [], "schema": [], "any text": []}
    grammars = {"free": None, "schema": Grammar.json_schema(LONG), "any text": Grammar("regex", "(.|\n)*")}
    for round_ in range(rounds + 1):
        for name, grammar in grammars.items():
            prompts = [tuple(range(100 + place, 120 + place)) for place in range(batch)]
            sampling = [Sampling(0.7, seed=place) for place in range(batch)]
            requests = [
                Request(prompt, each, tokens, ignore_eos=grammar is None, grammar=grammar)
                for prompt, each in zip(prompts, sampling, strict=True)
            ]
            done = [collect(each) for each in [engine.submit(each) for each in requests]]
            seconds = [1 / each.tokens_per_second for each in done if each.tokens_per_second and len(each.tokens) > 8]
            if round_:  # the first allocates
                times[name].append(statistics.median(seconds))
    found = {name: ratio(times[name], times["free"]) for name in ("schema", "any text")}
    return {name: each.to_json() for name, each in found.items() if each}


def first_tokens(engine: Engine, rounds: int) -> dict[str, float]:
    """Return the milliseconds until the first token of a short prompt: free, with a known schema and with a new one."""
    rng = random.Random(7)
    times: dict[str, list[float]] = {"free": [], "known": [], "new": []}
    known = Grammar.json_schema(random_schema(rng))
    for number in range(rounds + 1):
        grammars = {"free": None, "known": known, "new": Grammar.json_schema(random_schema(rng))}
        for name, grammar in grammars.items():
            prompt = tuple(rng.randrange(100, 40_000) for _ in range(20))
            begin = perf_counter()
            collect(engine.submit(Request(prompt, max_tokens=1, grammar=grammar)))
            if number:
                times[name].append((perf_counter() - begin) * 1000)
    return {name: round(statistics.median(each), 2) for name, each in times.items()}


def main() -> None:
    """Print all figures as JSON."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("package", type=Path)
    parser.add_argument("--schemas", type=int, default=1000)
    parser.add_argument("--tokens", type=int, default=400)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--suite", type=Path, help="folder tests/draft2020-12 of the JSON Schema test suite")
    given = parser.parse_args()
    schemas = [random_schema(random.Random(given.seed + number)) for number in range(given.schemas)]
    found: dict[str, Any] = {}
    with serving(given.package) as (port, *_):
        for clients in (1, BATCH):
            if schemas:
                found[f"{clients} at a time"] = asyncio.run(answers(port, schemas, clients, given.tokens))
        if given.suite:
            found["suite"] = asyncio.run(answers(port, list(suite(given.suite)), BATCH, given.tokens))
    if given.rounds:
        # without drafts, whose number depends on the text
        engine = Engine.open(given.package, EngineSettings(cache_bytes=0, speculation=0))
        engine.start(warm=True)
        found["step"] = {batch: costs(engine, batch, 100, given.rounds) for batch in (1, BATCH)}
        found["first_token_ms"] = first_tokens(engine, 4 * given.rounds)
        engine.close()
    print(json.dumps(found, indent=2, ensure_ascii=False))


if __name__ == "__main__":
    main()

"""Compare `generate([...])` with the server: `python -m tools.benchmarks.offline PACKAGE [--prompts 500 --rounds 5]`.

In each round both answer the same new prompts, the server with 16 clients. Afterwards all prompts are answered one by
one, and the tokens must be equal. Run it on an idle machine.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

import inlay
from tools.benchmarks.http_client import send_request
from tools.benchmarks.serving import prompt, serving, spread

if TYPE_CHECKING:
    from inlay.runtime import Completion, LanguageModel


async def ask(port: int, prompts: list[str], clients: int, made: int) -> tuple[float, list[str]]:
    """Return tokens per second of clients that share a list of prompts, and the texts."""
    texts, total, left = [""] * len(prompts), 0, iter(range(len(prompts)))
    start = time.perf_counter()

    async def client() -> int:
        count = 0
        for place in left:
            told = await send_request(port, {"prompt": prompts[place], "max_tokens": made, "temperature": 0})
            texts[place], count = told.text, count + told.tokens
        return count

    total = sum(await asyncio.gather(*(client() for _ in range(clients))))
    return total / (time.perf_counter() - start), texts


def generate(model: LanguageModel, prompts: list[str], made: int) -> tuple[float, list[Completion]]:
    """Return tokens per second of one call with all prompts, and the completions."""
    start = time.perf_counter()
    found = model.generate(prompts, max_tokens=made, raw=True)
    return sum(len(each.tokens) for each in found) / (time.perf_counter() - start), found


def main() -> None:
    """Run the rounds and print JSON. Exit code 1 if an answer differs."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("package", type=Path)
    parser.add_argument("--prompts", type=int, default=500)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--clients", type=int, default=16)
    parser.add_argument("--tokens", type=int, default=32)
    asked = parser.parse_args()
    each = asked.prompts // asked.rounds
    lists = [[prompt(20, 10_000 + n * each + i) for i in range(each)] for n in range(asked.rounds)]
    offline, served, wrong = [], [], 0
    with inlay.load(asked.package) as model, serving(asked.package) as (port, _, _):
        generate(model, [prompt(20, n) for n in range(16)], 4)
        asyncio.run(ask(port, [prompt(20, n) for n in range(16)], asked.clients, 4))
        made = []
        for number, prompts in enumerate(lists):
            for turn in ("offline", "served") if number % 2 else ("served", "offline"):
                if turn == "served":
                    speed, texts = asyncio.run(ask(port, prompts, asked.clients, asked.tokens))
                    served.append(speed)
                else:
                    speed, found = generate(model, prompts, asked.tokens)
                    offline.append(speed)
                    made += found
            wrong += sum(one.text != text for one, text in zip(found, texts, strict=True))
            print(f"round {number}: {offline[-1]:.0f} and {served[-1]:.0f} tokens/s", file=sys.stderr)
    alone = (model.generate(text, max_tokens=asked.tokens, raw=True) for prompts in lists for text in prompts)
    differing = sum(one.tokens != two.tokens for one, two in zip(made, alone, strict=True))
    ratio = spread([one / two for one, two in zip(offline, served, strict=True)])
    result = {"prompts": len(made), "differ_from_server": wrong, "differ_from_one_by_one": differing}
    print(
        json.dumps(
            result | {"offline": spread(offline), "served": spread(served), "offline_over_served": ratio}, indent=1
        )
    )
    raise SystemExit(1 if wrong or differing else 0)


if __name__ == "__main__":
    main()

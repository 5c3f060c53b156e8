"""Decode with and without prompt lookup: `python -m tools.benchmarks.speculation PACKAGE [--rounds 5 --together 1]`.

Two engines on one package answer the same prompts in turn, `--together` of them at once: rewriting, code editing and
free chat. All tokens must be equal. The ratio of a round is that of the tokens per second after the first token. Run it
on an idle machine.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from inlay.package.loader import load_package
from inlay.runtime.engine import Engine
from inlay.runtime.request import Request
from inlay.runtime.settings import EngineSettings
from inlay.runtime.text_codec import TextCodec
from tools.benchmarks.serving import spread

if TYPE_CHECKING:
    from collections.abc import Sequence

_LETTER = """Dear Ms. Alvarez,
thank you for visiting our workshop in Lindau on Tuesday. As we discussed, the two wooden boats will be ready by the end
of May. The hull of the smaller boat is finished, and the larger one only needs its second coat of varnish. We ordered
the brass fittings from our supplier in Bregenz, and they should arrive within two weeks. Please let us know by Friday
whether you prefer white or red sails. The final price is 18,400 euros, of which you have already paid 6,000 euros.
Kind regards,
Jonas Weber"""
_REPORT = """The library opened at nine and closed at six on every working day of the year. In spring, 412 visitors came
each week; in summer, 298 visitors came each week. The reading room was painted in March, and the lamps on the first
floor were replaced in April. Three new shelves hold the books on local history. The children's corner received a carpet
and eighty picture books. In autumn, the roof leaked twice, and eleven books were damaged. They were dried and bound
again. The library thanks all volunteers, who worked 1,240 hours in total."""
_STACK = '''class Stack:
    """A stack of numbers."""

    def __init__(self):
        self.items = []

    def push(self, item):
        self.items.append(item)

    def pop(self):
        return self.items.pop()

    def peek(self):
        return self.items[-1]

    def is_empty(self):
        return len(self.items) == 0

    def size(self):
        return len(self.items)
'''
_CONFIG = """def read_config(path):
    result = {}
    file = open(path)
    for line in file.readlines():
        line = line.strip()
        if line.startswith("#") or line == "":
            continue
        name, value = line.split("=", 1)
        name = name.strip()
        value = value.strip()
        if value.isdigit():
            value = int(value)
        elif value in ("true", "false"):
            value = value == "true"
        result[name] = value
    file.close()
    return result
"""
PROMPTS = {
    "rewriting": (
        f"Repeat this letter word by word, but write 'June' instead of 'May':\n\n{_LETTER}",
        f"Correct the spelling of this text and return the whole text. Change nothing else:\n\n{_LETTER}",
        f"Return this report again, with the word 'library' replaced by 'archive':\n\n{_REPORT}",
        f"Put every sentence of this text on a line of its own. Keep the words:\n\n{_REPORT}",
    ),
    "code editing": (
        f"Rename the class to NumberStack and return the complete code:\n\n```python\n{_STACK}```",
        f"Add a method `clear` that removes all items. Return the complete code:\n\n```python\n{_STACK}```",
        f"Rename the variable `result` to `config`. Return the complete function:\n\n```python\n{_CONFIG}```",
        f"Use `with open(path) as file:`. Return the complete function:\n\n```python\n{_CONFIG}```",
    ),
    "free chat": (
        "Tell me a short story about a lighthouse keeper who finds a letter.",
        "What should I consider when I buy a used bicycle?",
        "Explain to a child why the sky is blue.",
        "Plan a weekend in a small town by the sea for two people who like to read.",
        "Why do cats purr?",
        "Write a poem about the first snow of the year.",
    ),
}


def answer(engine: Engine, prompts: Sequence[Sequence[int]], count: int) -> tuple[float, list[list[int]]]:
    """Return decoded tokens per second of prompts that are answered at once, and the tokens of each."""
    handles = [engine.submit(Request(tuple(each), max_tokens=count)) for each in prompts]
    made = [list(each) for each in handles]
    seconds = max(each[-1].seconds for each in made) - min(each[0].seconds for each in made)
    decoded = sum(len(each) - 1 for each in made)
    return decoded / max(seconds, 1e-9), [[piece.token for piece in each] for each in made]


def main() -> None:
    """Run the rounds and print JSON. Exit code 1 if tokens differ."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("package", type=Path)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--together", type=int, default=1, help="prompts that are answered at once")
    parser.add_argument("--tokens", type=int, default=200, help="maximum tokens of an answer")
    parser.add_argument("--speculation", type=int, default=7, help="maximum tokens of a draft")
    asked = parser.parse_args()
    package = load_package(asked.package)
    text = TextCodec.load(Path(package.folder, "tokenizer"))
    engines = [Engine(package, text, EngineSettings(speculation=each)) for each in (0, asked.speculation)]
    result, differing = {}, 0
    for engine in engines:
        engine.start(warm=True)
    try:
        for kind, texts in PROMPTS.items():
            ratios: list[float] = []
            if text.chat is None:
                prompts = [text.encode(each) for each in texts]
            else:
                prompts = [text.encode_chat([{"role": "user", "content": each}]) for each in texts]
            groups = [prompts[at : at + asked.together] for at in range(0, len(prompts), asked.together)]
            before = engines[1].counts()
            for turn in range(asked.rounds):
                speeds: list[list[float]] = [[], []]
                for group in groups:
                    found = {}
                    for place in (0, 1) if turn % 2 else (1, 0):
                        speed, found[place] = answer(engines[place], group, asked.tokens)
                        speeds[place].append(speed)
                    differing += found[0] != found[1]
                plain, drafted = (len(groups) / sum(1 / each for each in speeds[place]) for place in (0, 1))
                ratios.append(drafted / plain)
                print(f"{kind}, round {turn}: {plain:.1f} and {drafted:.1f} tokens/s", file=sys.stderr)
            after = engines[1].counts()
            counted = {name: after[name] - before[name] for name in ("drafted_tokens", "accepted_tokens")}
            result[kind] = {"ratio": spread(ratios), **counted}
    finally:
        for engine in engines:
            engine.close()
    off = engines[1].speculation.problem
    print(json.dumps({"answers": result, "differing": differing, "speculation_problem": off}, indent=1))
    sys.exit(1 if differing else 0)


if __name__ == "__main__":
    main()

"""The life of a few cache blocks, as the cache tells it: stored, found again, moved, removed, cleared.

    python examples/kv_cache_events_demo.py
    python examples/kv_cache_events_demo.py --json
    python examples/kv_cache_events_demo.py --source tensorrt_llm --model MODEL

A cache of five blocks on two levels serves a few requests. Three read what it tells: one from the start, one that comes
late, and one that is too slow. With `--source tensorrt_llm` the events are those of TensorRT-LLM's own cache, if it is
installed; that part was never run on a GPU by us.
"""

from __future__ import annotations

import argparse
import json
import sys
from typing import TYPE_CHECKING, Any

from inlay.errors import InlayError, UsageError
from inlay.runtime.kv.events import Gap, Log, Replica
from inlay.runtime.kv.manager import Manager
from inlay.serve.kv_json import event_json

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from inlay.runtime.kv.blocks import Block
    from inlay.runtime.kv.events import Subscriber

SIZE = 4
SYSTEM = tuple(range(1, 9))
"""What two requests begin with: two blocks of it."""
KEPT = 9
"""Events that the log keeps, so few that a slow reader is too slow."""
LINE = "{:>3}  {:<8} {:<7} {:<8} {:<12} {}"


def rows(event: dict[str, Any]) -> Iterator[tuple[Any, ...]]:
    """An event in TensorRT-LLM's form, which is Inlay's too, as lines of the table."""
    number, data = event["event_id"], event["data"]
    kind = data["type"]
    if kind == "created":
        yield number, kind, "", "", "", " + ".join(map(str, data["num_blocks_per_cache_level"])) + " places"
    elif kind == "stored":
        parent = data["parent_hash"]
        for block in data["blocks"]:
            tokens = " ".join(str(token["token_id"]) for token in block["tokens"])
            place = f"level {block['cache_level']}, priority {block['priority']}"
            yield number, kind, short(block["block_hash"]), short(parent), tokens, place
            parent = block["block_hash"]
    elif kind == "removed":
        for hash_ in data["block_hashes"]:
            level = f"from level {data['cache_level']}" if "cache_level" in data else ""
            yield number, kind, short(hash_), "", "", level
    elif kind == "updated":
        changes = {"level": data["cache_level"], "priority": data["priority"]}
        told = [f"{name} {each['old_value']} → {each['new_value']}" for name, each in changes.items() if each]
        yield number, kind, short(data["block_hash"]), "", "", ", ".join(told)
    else:
        yield number, kind, "", "", "", ""


def short(hash_: int | None) -> str:
    """Enough of a hash to tell a few blocks apart."""
    return "" if hash_ is None else f"{hash_ & 0xFFFFFFFF:08x}"[:6]


class Printer:
    """Prints events, in a table or as JSON, and what is said between them."""

    def __init__(self, as_json: bool) -> None:
        self.as_json = as_json

    def say(self, text: str) -> None:
        if not self.as_json:
            print(f"\n{text}")

    def head(self) -> None:
        self.say(LINE.format("id", "event", "block", "follows", "tokens", "where, or old → new"))

    def events(self, events: Iterable[dict[str, Any]]) -> None:
        for event in events:
            if self.as_json:
                print(json.dumps(event))
            else:
                for row in rows(event):
                    print(LINE.format(*row).rstrip())

    def check(self, claim: str, holds: bool) -> bool:
        if not self.as_json or not holds:
            print(f"{'yes' if holds else 'NO '}  {claim}", file=sys.stderr if self.as_json else sys.stdout)
        return holds


class Story:
    """A small cache, somebody who reads what it tells, and requests."""

    def __init__(self, printer: Printer) -> None:
        self.log = Log(most=KEPT)
        self.slow, self.reader = self.log.subscribe(), self.log.subscribe()
        self.cache = Manager([3, 2], SIZE, self.log.add)
        self.printer = printer

    def scene(self, text: str) -> None:
        """What was just done, and what the reader heard of it."""
        self.printer.say(text)
        self.printer.events(event_json(*each) for each in self.reader.read())

    def request(self, tokens: Sequence[int]) -> tuple[int, list[Block]]:
        """What an engine does: use what is there, bring it near, store the rest. How many blocks were there?"""
        line = self.cache.lookup(tokens)
        found = len(line)
        self.cache.hold(line)
        for block in line:
            self.cache.raise_up(block)  # an engine copies as told
        for start in range(found * SIZE, len(tokens), SIZE):
            placed = self.cache.store(line[-1] if line else None, tuple(tokens[start : start + SIZE]))
            assert placed is not None
            self.cache.hold([placed.block])
            line.append(placed.block)
        self.cache.drop(line)
        return found, line


def content(cache: Manager) -> dict[int, int]:
    return {block.hash: block.level for block in cache}


def heard(replica: Replica) -> dict[int, int]:
    return {hash_: block.level for hash_, block in replica.blocks.items()}


def tell(printer: Printer) -> bool:
    story = Story(printer)
    cache = story.cache
    printer.head()
    story.scene("A cache is created.")
    story.request(SYSTEM)
    story.scene("A first request: nothing of it is there, so both of its blocks are stored.")
    found, line = story.request((*SYSTEM, 21, 22, 23, 24))
    story.scene(f"A second one begins alike: {found} blocks are found, and only the rest is stored.")
    fine = [printer.check("what two requests have in common is computed once", found == 2)]
    for block in line[:2]:
        cache.set_priority(block, 50)
    story.scene("What they have in common shall stay: it gets a higher priority.")
    story.request((31, 32, 33, 34))
    story.scene("A third request needs a place: what matters least and was used longest ago moves down a level.")
    story.request((41, 42, 43, 44))
    story.request((51, 52, 53, 54))
    story.scene("Two more: the second level is full as well, and the block that is oldest there is removed.")
    fine.append(printer.check("the common beginning is still near", [block.level for block in line] == [0, 0, 1]))
    late = story.log.subscribe()
    replica = Replica(late.catch_up().blocks)
    printer.say(f"Somebody comes late and takes a snapshot: {len(replica.blocks)} blocks, before event {late.cursor}.")
    found, (block,) = story.request((31, 32, 33, 34))
    story.scene("The third request comes again: its block is raised from the second level.")
    fine.append(printer.check("it is found, and near again", (found, block.level) == (1, 0)))
    fine.append(late_reader(printer, late, replica, cache))
    fine.append(slow_reader(printer, story.slow, cache))
    cache.clear()
    story.scene("The cache is cleared.")
    return all(fine)


def late_reader(printer: Printer, late: Subscriber, replica: Replica, cache: Manager) -> bool:
    news = late.read()
    for _, event in news:
        replica.apply(event)
    printer.say(f"The late reader applies the {len(news)} events since its snapshot.")
    return printer.check("it knows what the cache holds", heard(replica) == content(cache))


def slow_reader(printer: Printer, slow: Subscriber, cache: Manager) -> bool:
    try:
        slow.read()
        gap = ""
    except Gap as told:
        gap = str(told)
    printer.say(f"Somebody has read nothing so far, and the log keeps {KEPT} events: {gap}.")
    replica = Replica(slow.catch_up().blocks)
    told, same = "is gone" in gap, heard(replica) == content(cache)
    return printer.check("the slow reader is told, and knows from a snapshot what the cache holds", told and same)


def tell_tensorrt_llm(printer: Printer, model: str) -> bool:
    """The same from TensorRT-LLM: two prompts with a common beginning, and the events of its cache."""
    try:
        from tensorrt_llm import LLM, SamplingParams
        from tensorrt_llm.llmapi import KvCacheConfig
    except ImportError as error:
        raise UsageError(
            "TensorRT-LLM cannot be imported here.",
            "Install tensorrt_llm where there is a GPU, or leave out --source to see Inlay's own cache.",
        ) from error
    llm = LLM(model=model, kv_cache_config=KvCacheConfig(enable_block_reuse=True, event_buffer_max_size=1024))
    prompt = (
        "The cache keeps what was computed for a prompt, so that another one which begins alike need not wait. " * 4
    )
    printer.head()
    for text in (prompt, prompt + "What does the cache keep?"):
        printer.say(f"A prompt of {len(text)} characters.")
        llm.generate([text], sampling_params=SamplingParams(max_tokens=5))
        found = llm.get_kv_cache_events(timeout=10)
        flat = [each for some in found for each in (some if isinstance(some, list) else [some])]
        printer.events(each for each in flat if each)
    return True


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--source", choices=["inlay", "tensorrt_llm"], default="inlay", help="whose cache")
    parser.add_argument("--model", default="TinyLlama/TinyLlama-1.1B-Chat-v1.0", help="what TensorRT-LLM loads")
    parser.add_argument("--json", action="store_true", help="print the events as JSON lines, and nothing else")
    options = parser.parse_args(arguments)
    printer = Printer(options.json)
    try:
        fine = tell(printer) if options.source == "inlay" else tell_tensorrt_llm(printer, options.model)
    except InlayError as error:
        print(f"error: {error}", file=sys.stderr)
        return int(error.exit_code)
    return 0 if fine else 1


if __name__ == "__main__":
    sys.exit(main())

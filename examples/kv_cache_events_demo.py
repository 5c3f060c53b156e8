"""KV events of a few cache blocks: stored, reused, moved, removed, cleared.

    python examples/kv_cache_events_demo.py
    python examples/kv_cache_events_demo.py --json
    python examples/kv_cache_events_demo.py --source inlay

The events come from TensorRT-LLM's cache if it is installed and there is a GPU, and from Inlay's cache otherwise. The
first line says which. TensorRT-LLM's part was not run: it needs a GPU.

Inlay's cache of five blocks on two levels serves a few requests. It has three subscribers: one from the start, one that
joins late, and one that is too slow.
"""

from __future__ import annotations

import argparse
import json
import sys
from typing import TYPE_CHECKING, Any

import torch

from inlay.errors import InlayError, UsageError
from inlay.runtime.kv.block_manager import BlockManager
from inlay.runtime.kv.events import CacheMirror, EventLog, Gap
from inlay.serve.kv_events.json_feed import event_json

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from inlay.runtime.kv.block import Block
    from inlay.runtime.kv.events import Subscriber

BLOCK_SIZE = 4
SYSTEM_PROMPT = tuple(range(1, 9))
"""The shared prefix of two requests: two blocks."""
LOG_SIZE = 9
"""Number of events that the log keeps; small enough that a slow subscriber misses some."""
ROW_FORMAT = "{:>3}  {:<8} {:<7} {:<8} {:<12} {}"


def event_rows(event: dict[str, Any]) -> Iterator[tuple[Any, ...]]:
    """Return an event, in the format of TensorRT-LLM and Inlay, as rows of the table."""
    number, data = event["event_id"], event["data"]
    kind = data["type"]
    if kind == "created":
        yield number, kind, "", "", "", " + ".join(map(str, data["num_blocks_per_cache_level"])) + " blocks"
    elif kind == "stored":
        parent = data["parent_hash"]
        for block in data["blocks"]:
            tokens = " ".join(str(token["token_id"]) for token in block["tokens"])
            place = f"level {block['cache_level']}, priority {block['priority']}"
            yield number, kind, short_hash(block["block_hash"]), short_hash(parent), tokens, place
            parent = block["block_hash"]
    elif kind == "removed":
        for hash_ in data["block_hashes"]:
            level = f"from level {data['cache_level']}" if "cache_level" in data else ""
            yield number, kind, short_hash(hash_), "", "", level
    elif kind == "updated":
        changes = {"level": data["cache_level"], "priority": data["priority"]}
        told = [f"{name} {each['old_value']} → {each['new_value']}" for name, each in changes.items() if each]
        yield number, kind, short_hash(data["block_hash"]), "", "", ", ".join(told)
    else:
        yield number, kind, "", "", "", ""


def short_hash(hash_: int | None) -> str:
    """Return enough digits of a hash to distinguish a few blocks."""
    return "" if hash_ is None else f"{hash_ & 0xFFFFFFFF:08x}"[:6]


class Printer:
    """Prints events, in a table or as JSON, and the texts between them."""

    def __init__(self, as_json: bool) -> None:
        self.as_json = as_json

    def print_text(self, text: str) -> None:
        if not self.as_json:
            print(f"\n{text}")

    def print_header(self) -> None:
        self.print_text(ROW_FORMAT.format("id", "event", "block", "parent", "tokens", "level, or old → new"))

    def print_events(self, events: Iterable[dict[str, Any]]) -> None:
        for event in events:
            if self.as_json:
                print(json.dumps(event))
            else:
                for row in event_rows(event):
                    print(ROW_FORMAT.format(*row).rstrip())

    def check(self, claim: str, holds: bool) -> bool:
        if not self.as_json or not holds:
            print(f"{'yes' if holds else 'NO '}  {claim}", file=sys.stderr if self.as_json else sys.stdout)
        return holds


class EventDemo:
    """A small cache with subscribers and requests."""

    def __init__(self, printer: Printer) -> None:
        self.log = EventLog(most=LOG_SIZE)
        self.slow_reader, self.reader = self.log.subscribe(), self.log.subscribe()
        self.cache = BlockManager([3, 2], BLOCK_SIZE, self.log.add)
        self.printer = printer

    def print_step(self, text: str) -> None:
        """Print the step and the events that the subscriber received."""
        self.printer.print_text(text)
        self.printer.print_events(event_json(*each) for each in self.reader.read())

    def request(self, tokens: Sequence[int]) -> tuple[int, list[Block]]:
        """Serve a request as an engine does: reuse cached blocks, promote them, store the rest; return the hits."""
        line = self.cache.lookup(tokens)
        found = len(line)
        self.cache.acquire(line)
        for block in line:
            self.cache.promote(block)  # an engine would copy the data here
        for start in range(found * BLOCK_SIZE, len(tokens), BLOCK_SIZE):
            placed = self.cache.store(line[-1] if line else None, tuple(tokens[start : start + BLOCK_SIZE]))
            assert placed is not None
            self.cache.acquire([placed.block])
            line.append(placed.block)
        self.cache.release(line)
        return found, line


def cache_levels(cache: BlockManager) -> dict[int, int]:
    return {block.hash: block.level for block in cache}


def replica_levels(replica: CacheMirror) -> dict[int, int]:
    return {hash_: block.level for hash_, block in replica.blocks.items()}


def run_demo(printer: Printer) -> bool:
    story = EventDemo(printer)
    cache = story.cache
    printer.print_header()
    story.print_step("A cache is created.")
    story.request(SYSTEM_PROMPT)
    story.print_step("The first request misses the cache, so both of its blocks are stored.")
    found, line = story.request((*SYSTEM_PROMPT, 21, 22, 23, 24))
    story.print_step(f"The second request shares the prefix: {found} blocks are found, and only the rest is stored.")
    fine = [printer.check("the shared prefix of two requests is computed once", found == 2)]
    for block in line[:2]:
        cache.set_priority(block, 50)
    story.print_step("The shared prefix gets a higher priority.")
    story.request((31, 32, 33, 34))
    story.print_step(
        "The third request needs a block: the least recently used block of the lowest priority moves down."
    )
    story.request((41, 42, 43, 44))
    story.request((51, 52, 53, 54))
    story.print_step("After two more requests the second level is full too, and its oldest block is removed.")
    fine.append(printer.check("the shared prefix is still on level 0", [block.level for block in line] == [0, 0, 1]))
    late = story.log.subscribe()
    replica = CacheMirror(late.catch_up().blocks)
    printer.print_text(f"A late subscriber takes a snapshot: {len(replica.blocks)} blocks, before event {late.cursor}.")
    found, (block,) = story.request((31, 32, 33, 34))
    story.print_step("The third request is repeated: its block is promoted from the second level.")
    fine.append(printer.check("it is found, and on level 0 again", (found, block.level) == (1, 0)))
    fine.append(check_late_reader(printer, late, replica, cache))
    fine.append(check_slow_reader(printer, story.slow_reader, cache))
    cache.clear()
    story.print_step("The cache is cleared.")
    return all(fine)


def check_late_reader(printer: Printer, late: Subscriber, replica: CacheMirror, cache: BlockManager) -> bool:
    news = late.read()
    for _, event in news:
        replica.apply(event)
    printer.print_text(f"The late subscriber applies the {len(news)} events since its snapshot.")
    return printer.check("its copy equals the cache", replica_levels(replica) == cache_levels(cache))


def check_slow_reader(printer: Printer, slow: Subscriber, cache: BlockManager) -> bool:
    try:
        slow.read()
        gap = ""
    except Gap as error:
        gap = str(error)
    printer.print_text(f"The slow subscriber has read nothing so far, and the log keeps {LOG_SIZE} events: {gap}.")
    replica = CacheMirror(slow.catch_up().blocks)
    told, same = "was dropped" in gap, replica_levels(replica) == cache_levels(cache)
    return printer.check("the slow subscriber gets a gap error, and its snapshot equals the cache", told and same)


def tensorrt_llm_problem() -> str:
    """Return why TensorRT-LLM's cache cannot run here; empty if it can."""
    try:
        import tensorrt_llm.llmapi  # noqa: F401
    except Exception as error:  # a package for GPUs fails in many ways where there is none
        return f"tensorrt_llm cannot be imported ({type(error).__name__}: {str(error).partition(chr(10))[0]})"
    return "" if torch.cuda.is_available() else "there is no GPU"


def run_tensorrt_llm(printer: Printer, model: str) -> bool:
    """Print the cache events of TensorRT-LLM for two prompts with a shared prefix."""
    problem = tensorrt_llm_problem()
    if problem:
        raise UsageError(f"TensorRT-LLM's cache cannot run: {problem}.", "Omit --source to use Inlay's cache.")
    from tensorrt_llm import LLM, SamplingParams
    from tensorrt_llm.llmapi import KvCacheConfig

    llm = LLM(model=model, kv_cache_config=KvCacheConfig(enable_block_reuse=True, event_buffer_max_size=1024))
    prompt = (
        "The cache keeps what was computed for a prompt, so that another one which begins alike need not wait. " * 4
    )
    printer.print_header()
    for text in (prompt, prompt + "What does the cache keep?"):
        printer.print_text(f"A prompt of {len(text)} characters.")
        llm.generate([text], sampling_params=SamplingParams(max_tokens=5))
        found = llm.get_kv_cache_events(timeout=10)
        flat = [each for some in found for each in (some if isinstance(some, list) else [some])]
        printer.print_events(each for each in flat if each)
    return True


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--source", choices=["auto", "inlay", "tensorrt_llm"], default="auto", help="the cache to use")
    parser.add_argument("--model", default="TinyLlama/TinyLlama-1.1B-Chat-v1.0", help="the model for TensorRT-LLM")
    parser.add_argument("--json", action="store_true", help="print only the events, as JSON lines")
    options = parser.parse_args(arguments)
    printer = Printer(options.json)
    try:
        source = options.source
        if source == "auto":
            problem = tensorrt_llm_problem()
            source = "inlay" if problem else "tensorrt_llm"
            why = f" TensorRT-LLM's was not used: {problem}." if problem else ""
        else:
            why = ""
        printer.print_text(f"The events come from {'Inlay' if source == 'inlay' else 'TensorRT-LLM'}'s cache.{why}")
        fine = run_demo(printer) if source == "inlay" else run_tensorrt_llm(printer, options.model)
    except InlayError as error:
        print(f"error: {error}", file=sys.stderr)
        return int(error.exit_code)
    return 0 if fine else 1


if __name__ == "__main__":
    sys.exit(main())

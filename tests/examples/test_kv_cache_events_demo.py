"""The demonstration of KV-cache events says what happens."""

from __future__ import annotations

import importlib
import json
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from inlay.runtime.kv.events import CacheMirror, RemovedEvent

EXAMPLES = Path(__file__).parents[2] / "examples"
pytestmark = pytest.mark.fast
STORY = """
  0  created                                3 + 2 blocks
  1  stored   9b162a           1 2 3 4      level 0, priority 0
  2  stored   ecd927  9b162a   5 6 7 8      level 0, priority 0
  3  stored   257207  ecd927   21 22 23 24  level 0, priority 0
yes  the shared prefix of two requests is computed once
  4  updated  9b162a                        priority 0 → 50
  5  updated  ecd927                        priority 0 → 50
  6  updated  257207                        level 0 → 1
  7  stored   9b10a7           31 32 33 34  level 0, priority 0
  8  updated  9b10a7                        level 0 → 1
  9  stored   30bfec           41 42 43 44  level 0, priority 0
 10  removed  257207                        from level 1
 11  updated  30bfec                        level 0 → 1
 12  stored   068ce5           51 52 53 54  level 0, priority 0
yes  the shared prefix is still on level 0
 13  removed  30bfec                        from level 1
 14  updated  068ce5                        level 0 → 1
 15  updated  9b10a7                        level 1 → 0
yes  it is found, and on level 0 again
yes  its copy equals the cache
yes  the slow subscriber gets a gap error, and its snapshot equals the cache
 16  cleared
"""


@pytest.fixture
def demo() -> Any:
    sys.path.insert(0, str(EXAMPLES))
    try:
        return importlib.import_module("kv_cache_events_demo")
    finally:
        sys.path.remove(str(EXAMPLES))


def test_the_story(demo: Any, capsys: pytest.CaptureFixture[str]) -> None:
    assert demo.main([]) == 0
    text = capsys.readouterr().out
    assert [line for line in text.splitlines() if line[:3].strip().isdigit() or line[:3] in ("yes", "NO ")] == (
        STORY.strip("\n").splitlines()
    )
    assert "2 blocks are found" in text
    assert "event 0 was dropped; the oldest event in the log is 7" in text


def test_json(demo: Any, capsys: pytest.CaptureFixture[str]) -> None:
    assert demo.main(["--json"]) == 0
    events = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [event["event_id"] for event in events] == list(range(17))
    assert {event["data"]["type"] for event in events} == {"created", "stored", "updated", "removed", "cleared"}


def test_a_claim_that_does_not_hold(
    demo: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    whole = CacheMirror.apply
    monkeypatch.setattr(CacheMirror, "apply", lambda self, event: isinstance(event, RemovedEvent) or whole(self, event))
    assert demo.main([]) == 1
    assert "NO   its copy equals the cache" in capsys.readouterr().out


def test_without_tensorrt_llm(demo: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setitem(sys.modules, "tensorrt_llm", None)
    assert demo.main(["--source", "tensorrt_llm"]) == 2
    told = capsys.readouterr()
    assert told.err.startswith(
        "error: TensorRT-LLM's cache cannot run: tensorrt_llm cannot be imported (ModuleNotFound"
    )
    assert demo.main([]) == 0
    said = capsys.readouterr().out.splitlines()[1]
    assert said.startswith("The events come from Inlay's cache. TensorRT-LLM's was not used: tensorrt_llm cannot be")


def test_what_tensorrt_llm_gives_is_printed_alike(
    demo: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A stand-in with the names that its documents give: the real one needs a GPU and was not run."""
    block = {"type": "stored_block", "block_hash": 0x1234567, "cache_level": 0, "priority": 35, "mm_keys": []}
    block["tokens"] = [{"type": "unique_token", "token_id": each, "token_extra_id": 0} for each in (1, 450)]
    events = [
        [{"event_id": 0, "data": {"type": "created", "num_blocks_per_cache_level": [101230, 0]}, "window_size": 32}],
        {"event_id": 1, "data": {"type": "stored", "parent_hash": None, "blocks": [block]}, "window_size": 32},
        {"event_id": 2, "data": {"type": "removed", "block_hashes": [0x1234567]}},
        None,
    ]

    class LLM:
        def __init__(self, model: str, kv_cache_config: Any) -> None:
            assert kv_cache_config == {"enable_block_reuse": True, "event_buffer_max_size": 1024}

        def generate(self, prompts: list[str], sampling_params: Any) -> None:
            assert sampling_params == {"max_tokens": 5}

        def get_kv_cache_events(self, timeout: float) -> list[Any]:
            found, events[:] = list(events), []
            return found

    there, api = ModuleType("tensorrt_llm"), ModuleType("tensorrt_llm.llmapi")
    there.LLM, there.SamplingParams, api.KvCacheConfig = LLM, dict, dict  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "tensorrt_llm", there)
    monkeypatch.setitem(sys.modules, "tensorrt_llm.llmapi", api)
    monkeypatch.setattr(there, "llmapi", api, raising=False)
    monkeypatch.setattr(demo.torch.cuda, "is_available", lambda: False)
    assert demo.main([]) == 0
    assert "TensorRT-LLM's was not used: there is no GPU." in capsys.readouterr().out
    monkeypatch.setattr(demo.torch.cuda, "is_available", lambda: True)
    assert demo.main([]) == 0
    text = capsys.readouterr().out
    assert "The events come from TensorRT-LLM's cache." in text
    assert "  0  created                                101230 + 0 blocks" in text
    assert "  1  stored   012345           1 450        level 0, priority 35" in text
    assert "  2  removed  012345" in text


def test_help(demo: Any, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="0"):
        demo.main(["--help"])
    text = capsys.readouterr().out
    assert "--source {auto,inlay,tensorrt_llm}" in text
    assert "python examples/kv_cache_events_demo.py" in text

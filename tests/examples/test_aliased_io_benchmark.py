"""The picture of state in place: the bytes it shows, and how it is drawn."""

from __future__ import annotations

import itertools
import json
import re
from typing import TYPE_CHECKING, Any
from xml.etree import ElementTree

import pytest

from tests.examples.test_examples import load

if TYPE_CHECKING:
    from pathlib import Path

SVG = "{http://www.w3.org/2000/svg}"
SHORT = ["--lengths", "256,512", "--rounds", "1", "--backend", "eager"]


@pytest.fixture(scope="module")
def example() -> Any:
    return load("aliased_io_picture")


def _bytes(points: list[Any]) -> dict[tuple[str, str], dict[int, int]]:
    found: dict[tuple[str, str], dict[int, int]] = {}
    for point in points:
        found.setdefault((point.shape, point.kind), {})[point.length] = point.bytes
    return found


def _assert_flat_against_growing(found: dict[tuple[str, str], dict[int, int]], shape: Any) -> None:
    aliased, copied = found[shape.name, "aliased"], found[shape.name, "copied"]
    assert aliased[256] == aliased[512]
    assert 0 < aliased[256] <= 2 * shape.layers * shape.kv_heads * 4096, "a page a head and cache at most"
    assert copied[256] >= 2 * shape.layers * shape.kv_heads * 256 * 64 * 2, "every cache is copied"
    assert copied[512] >= 2 * copied[256]


def test_bytes_of_both_shapes(example: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    numbers, picture = tmp_path / "numbers.json", tmp_path / "picture.svg"
    assert example.main([*SHORT, "-o", str(picture), "--json", str(numbers)]) == 0
    points = [example.Measurement(**each) for each in json.loads(numbers.read_text())["points"]]
    for shape in example.SHAPES:
        _assert_flat_against_growing(_bytes(points), shape)
    assert all(point.milliseconds > 0 for point in points)
    rows = capsys.readouterr().out.splitlines()
    assert rows[0] == "|  | cache length | time, aliased | time, copied | bytes, aliased | bytes, copied |"
    assert [row.split(" | ")[:2] for row in rows[2:]] == [
        ["| one layer", "256"],
        ["| one layer", "512"],
        ["| SmolLM2's shape", "256"],
        ["| SmolLM2's shape", "512"],
    ]
    assert "32.8 KB | 262 KB |" in rows[2]
    assert picture.read_text() == example.draw_chart(points)


def test_bytes_compiled(example: Any) -> None:
    shape = example.SHAPES[0]
    points = [point for length in (256, 512) for point in example.measure(shape, length, "inductor", 1)]
    _assert_flat_against_growing(_bytes(points), shape)


@pytest.mark.fast
def test_a_step_that_is_not_aliased_is_noticed(example: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = example.compile_program
    monkeypatch.setattr(example, "compile_program", lambda program, backend, alias=None: whole(program, backend))
    with pytest.raises(SystemExit, match="The aliased step returned other caches"):
        example.measure(example.SHAPES[0], 256, "eager", 1)


@pytest.mark.fast
def test_too_short(example: Any, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        example.main(["--lengths", "64,256"])
    assert "at least the 128 rows" in capsys.readouterr().err


@pytest.fixture
def drawn(example: Any) -> ElementTree.Element:
    points = []
    for times, shape in zip((1, 3), example.SHAPES, strict=True):
        for length in example.LENGTHS:
            points.append(example.Measurement(shape.name, "aliased", length, 0.2 * times, 32768))
            points.append(example.Measurement(shape.name, "copied", length, 0.2 * times * length / 256, 1000 * length))
    return ElementTree.fromstring(example.draw_chart(points))


def _places(drawn: ElementTree.Element, panel: int) -> dict[str, list[list[tuple[float, float]]]]:
    """Colour → the points of each line of that colour."""
    found: dict[str, list[list[tuple[float, float]]]] = {}
    for path in drawn.findall(f"{SVG}g")[panel].findall(f"{SVG}path"):
        if path.get("fill") == "none":
            pairs = re.findall(r"([\d.]+) ([\d.]+)", path.attrib["d"])
            found.setdefault(path.attrib["stroke"], []).append([(float(x), float(y)) for x, y in pairs])
    return found


@pytest.mark.fast
@pytest.mark.parametrize("panel", [0, 1])
def test_flat_is_drawn_flat_and_growth_straight(example: Any, drawn: ElementTree.Element, panel: int) -> None:
    aliased, copied = (_places(drawn, panel)[example.KINDS[kind]] for kind in ("aliased", "copied"))
    assert len(aliased) == len(copied) == 2
    for line in aliased:
        assert len(line) == 8
        assert len({y for _, y in line}) == 1
    for line in copied:
        steps = [(two[0] - one[0], one[1] - two[1]) for one, two in itertools.pairwise(line)]
        assert all(x > 30 and y > 5 for x, y in steps), "to the right and up"
        assert max(y for _, y in steps) - min(y for _, y in steps) < 0.25, "doubling is the same step everywhere"


@pytest.mark.fast
def test_texts_do_not_overlap(drawn: ElementTree.Element) -> None:
    panels = drawn.findall(f"{SVG}g")
    boxes = [_box(text, 0, 0) for text in drawn.findall(f"{SVG}text")]
    for panel in panels:
        x, y = map(float, re.findall(r"[\d.]+", panel.attrib["transform"]))
        boxes += [_box(text, x, y) for text in panel.findall(f"{SVG}text")]
    wide, high = float(drawn.attrib["width"]), float(drawn.attrib["height"])
    for index, (left, top, right, bottom, text) in enumerate(boxes):
        assert left >= 0, text
        assert top >= 0, text
        assert right <= wide, text
        assert bottom <= high, text
        for other in boxes[:index]:
            apart = right <= other[0] or other[2] <= left or bottom <= other[1] or other[3] <= top
            assert apart, f"{text} lies over {other[4]}"


def _box(text: ElementTree.Element, x: float, y: float) -> tuple[float, float, float, float, str]:
    """About where a text is: letters are half as wide as they are high, or a little more."""
    size, x, y = float(text.attrib["font-size"]), x + float(text.attrib["x"]), y + float(text.attrib["y"])
    words = text.text or ""
    wide = len(words) * size * 0.56
    left = x - {"start": 0.0, "middle": wide / 2, "end": wide}[text.attrib["text-anchor"]]
    return left, y - 0.8 * size, left + wide, y + 0.2 * size, words

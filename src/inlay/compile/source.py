"""Reading generated code: every line of a library's source that names one of its inputs, and what it does with it."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

_BEGIN, _END = "void AOTInductorModel::run_impl(", "} // AOTInductorModel::run_impl"
_GIVEN = re.compile(r"^auto (\w+) = std::move\(inputs\[(\d+)\]\);$")
_HARMLESS = (
    re.compile(r"^auto \w+_(size|stride) = \w+\.(sizes|strides)\(\);$"),
    re.compile(r"^if \(_check_aoti_runtime_check_inputs_env\(\)\) \{ assert_size_stride\(.*\); \}$"),
    re.compile(r"^\w+\.reset\(\);$"),
    re.compile(r"^//"),
    re.compile(r"^int64_t \w+ = \w+_size\[\d+\];$"),
)
_KERNEL = re.compile(r"^(?:kernels\.)?(cpp_\w+)\(")
_TORCH = re.compile(r"aoti_torch_(?:cpu_)?(\w+)\(")
_PROXY = re.compile(r"aoti_torch_proxy_executor_call_function\(proxy_executor, (\d+),")


@dataclass(frozen=True)
class Mention:
    """A line that names an input: who is called, whether it may read or write there, or that it is not understood."""

    input: int
    by: str
    reads: bool
    writes: bool
    understood: bool = True


def mentions(source: str, calls: Sequence[Any]) -> Iterator[Mention]:
    """All lines of the code that runs which name an input, but those that only look at its sizes."""
    begin = source.find(_BEGIN)
    if begin < 0 or _END not in source[begin:]:
        yield Mention(-1, "the source has no code that runs", False, False, understood=False)
        return
    names: dict[str, int] = {}
    for raw in source[begin : source.index(_END, begin)].splitlines():
        line = raw.strip()
        if (given := _GIVEN.match(line)) is not None:
            names[given[1]] = int(given[2])
            continue
        found = [name for name in dict.fromkeys(re.findall(r"\w+", line)) if name in names]
        if not found or any(pattern.match(line) for pattern in _HARMLESS):
            continue
        for name in found:
            yield _mention(line, name, names[name], calls)


def _mention(line: str, name: str, number: int, calls: Sequence[Any]) -> Mention:
    if (kernel := _KERNEL.match(line)) is not None:
        reads = re.search(rf"\(const [\w:]+\*\)\({name}\b", line) is not None
        writes = re.search(rf"\((?!const )[\w:]+\*\)\({name}\b", line) is not None
        return Mention(number, kernel[1], reads, writes, understood=reads or writes)
    if (proxy := _PROXY.search(line)) is not None and int(proxy[1]) < len(calls):
        target = calls[int(proxy[1])]["node"]["target"]
        return Mention(number, target, True, False)
    if (torch := _TORCH.search(line)) is not None:
        return Mention(number, torch[1], True, torch[1].endswith("_") or "_out" in torch[1] or "copy_" in torch[1])
    return Mention(number, line[:80], False, False, understood=False)

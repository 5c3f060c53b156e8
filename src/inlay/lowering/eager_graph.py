"""Pieces that run call by call: encode a graph of a few operators as JSON, and run it."""

from __future__ import annotations

import json
import operator
from typing import TYPE_CHECKING, Any

import torch

import inlay.ops  # noqa: F401 - registers the operators
from inlay.errors import PackageError, ProgramError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

    from torch import fx

_PYTHON: dict[str, Callable[..., Any]] = {
    "getitem": operator.getitem,
    "add": operator.add,
    "sub": operator.sub,
    "mul": operator.mul,
    "floordiv": operator.floordiv,
    "mod": operator.mod,
}


def encode(graph: fx.Graph) -> dict[str, Any]:
    """Encode a graph without nested graphs as JSON that `EagerGraph` can run."""
    calls = []
    ins: list[str] = []
    for node in graph.nodes:
        if node.op == "placeholder":
            ins.append(node.name)
        elif node.op == "call_function":
            kwargs = {name: _encode_value(value) for name, value in node.kwargs.items()}
            calls.append([node.name, _name(node.target), [_encode_value(each) for each in node.args], kwargs])
        elif node.op != "output":
            raise ProgramError(f"{node.name} is not a call, and cannot be written to a package.")
    return {"ins": ins, "calls": calls, "outs": [_encode_value(each) for each in graph.output_node().args[0]]}  # type: ignore[union-attr]


def _name(target: Any) -> str:
    if isinstance(target, torch._ops.OpOverload):
        return f"{target.namespace}.{target._opname}.{target._overloadname}"
    name = getattr(target, "__name__", "")
    if _PYTHON.get(name) is not target:
        raise ProgramError(f"{target} cannot be written to a package.")
    return f"python.{name}"


def _encode_value(value: Any) -> Any:
    if hasattr(value, "op") and hasattr(value, "name"):
        return {"value": value.name}
    if isinstance(value, (list, tuple)):
        return [_encode_value(each) for each in value]
    if isinstance(value, torch.dtype):
        return {"dtype": str(value).removeprefix("torch.")}
    if isinstance(value, torch.device):
        return {"device": str(value)}
    if isinstance(value, (torch.memory_format, torch.layout)):
        return {"torch": str(value).removeprefix("torch.")}
    if isinstance(value, float) and value in (float("inf"), float("-inf")):
        return {"float": str(value)}
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    raise ProgramError(f"A {type(value).__name__} cannot be written to a package.")


class EagerGraph:
    """Runs what `encode` wrote."""

    def __init__(self, text: dict[str, Any]) -> None:
        self.ins: list[str] = text["ins"]
        self.calls = [
            (name, _target(target), _decode_value(args), {key: _decode_value(value) for key, value in kwargs.items()})
            for name, target, args, kwargs in text["calls"]
        ]
        self.outs = _decode_value(text["outs"])

    @classmethod
    def read(cls, file: Path) -> EagerGraph:
        """Read the calls in a file of a package."""
        try:
            return cls(json.loads(file.read_bytes()))
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            raise PackageError(f"{file.name} is not a valid list of calls.", "Build the package again.") from error

    def __call__(self, inputs: Sequence[Any]) -> list[Any]:
        values = dict(zip(self.ins, inputs, strict=True))
        for name, target, args, kwargs in self.calls:
            values[name] = target(
                *_substitute(args, values), **{key: _substitute(each, values) for key, each in kwargs.items()}
            )
        return list(_substitute(self.outs, values))


class _Value(str):
    """The name of a value, as opposed to a string that is an argument."""


def _target(name: str) -> Any:
    namespace, _, rest = name.partition(".")
    if namespace == "python":
        return _PYTHON[rest]
    operator_name, _, overload = rest.rpartition(".")
    try:
        return getattr(getattr(getattr(torch.ops, namespace), operator_name), overload)
    except AttributeError as error:
        text = f"The package calls {name}, which is not registered."
        remedy = "Import the module that registers it first. If it is torch's own, build the package with this torch."
        raise PackageError(text, remedy) from error


def _decode_value(value: Any) -> Any:
    if isinstance(value, list):
        return [_decode_value(each) for each in value]
    if isinstance(value, dict):
        ((kind, text),) = value.items()
        match kind:
            case "value":
                return _Value(text)
            case "dtype" | "torch":
                return getattr(torch, text)
            case "device":
                return torch.device(text)
            case "float":
                return float(text)
    return value


def _substitute(value: Any, values: dict[str, Any]) -> Any:
    if isinstance(value, _Value):
        return values[value]
    if isinstance(value, list):
        return [_substitute(each, values) for each in value]
    return value

"""Which storages the calls of a program touch, through views, in-place calls and state."""

from __future__ import annotations

import operator
from typing import TYPE_CHECKING, Any

import torch

from inlay.errors import ProgramError
from inlay.program.graphs import all_nodes, is_view, operands, subgraphs, target_text, written
from inlay.state.aliases import SIZES_ONLY, Aliases, bound, is_tensor, storage_of
from inlay.state.updates import recognise
from inlay.state.wrapped import is_wrapper, read
from inlay.streams.work import Life, Storage

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from torch import fx

    from inlay.program.program import Program

GENERATOR = "default generator"
"""The storage that every call that draws random numbers reads and writes: they come in the order of the program."""
_COLLECTIVES = ("_c10d_functional.", "_c10d_functional_autograd.", "c10d.", "c10d_functional.")
_OVERWRITE = frozenset(("copy_", "fill_", "zero_"))
"""Operators that write to what they do not read."""
_SILENT = frozenset(("broadcast_tensors", "meshgrid", "native_batch_norm", "set_", "sum_to_size", "type_as"))
"""Operators that write to their operands or hand them on, and neither their schemas nor their tags say so."""
_MAY_COPY = frozenset(("contiguous", "flatten", "ravel", "reshape", "reshape_as", "resolve_conj", "resolve_neg", "to"))
"""Views of some tensors and copies of others: what they were when the program was traced is not what they will be."""


def is_collective(node: fx.Node) -> bool:
    """Whether a call talks to other processes, or a graph that it runs does."""
    return any(target_text(_operator(each)).startswith(_COLLECTIVES) for each in _calls(node))


def _calls(node: fx.Node) -> Iterator[fx.Node]:
    """A call, and all calls of the graphs that it runs."""
    if node.op == "call_function":
        yield node
    named = {each.target for each in node.all_input_nodes if each.op == "get_attr"}
    for name, module in subgraphs(node.graph) if named else ():
        if name in named:
            yield from (each for each in all_nodes(module.graph) if each.op == "call_function")


def _operator(node: fx.Node) -> Any:
    """What a call calls; of a wrapper, what it wraps."""
    return node.args[0] if is_wrapper(node) else node.target


def is_part(node: fx.Node) -> bool:
    """Whether a node is one of several results of a call, and nothing that is run by itself."""
    return node.target is operator.getitem and hasattr(node.args[0], "op")


class Touched:
    """Reads and writes of each call of a program, by the names of storages.

    A storage is called like the first value in it. A state and its new value are one storage: it is written in place,
    or the new value is kept until the end and copied, and the order is right for both.

    A view touches no memory. It needs the tensor that it is a view of, and is one that others need: both are storages
    without bytes, so that they wait for it and not for what is written to its memory meanwhile.
    """

    def __init__(self, program: Program) -> None:
        self.program = program
        self.aliases, self._same = _aliases(program)
        self.storages: dict[str, Storage] = {}
        self._held: dict[fx.Node, tuple[str, ...]] = {}
        self._names: dict[fx.Node, str] = {}
        self._written: set[str] = set()
        self._loose: set[str] = set()
        self._place = {node: index for index, node in enumerate(program.graph.nodes)}
        self._reshaped = {self.name(each) for node in program.graph.nodes if _reshapes(node) for each in written(node)}
        """Storages of tensors whose sizes or memory are changed in place: to look at them is to read."""
        self.reads: dict[fx.Node, tuple[str, ...]] = {}
        self.writes: dict[fx.Node, tuple[str, ...]] = {}
        for node in program.graph.nodes:
            self._note(node)
        self._finish()

    def held(self, node: fx.Node) -> tuple[str, ...]:
        """The storages that a value may lie in, and what has to be there to have the value at all."""
        return self._held[node]

    def name(self, node: fx.Node) -> str:
        """The storage that a value lies in."""
        if node not in self._names:
            first = min(self.aliases.members(node), key=self._place.__getitem__)
            self._names.update(dict.fromkeys(self.aliases.members(node), first.name))
        return self._names[node]

    def _note(self, node: fx.Node) -> None:
        if node.op == "output":
            return
        if node.op not in ("placeholder", "get_attr", "call_function"):
            raise ProgramError(f"{node.name} is a {node.op}: nobody knows what it touches.", "Give a captured program.")
        if node.op != "call_function":
            self._keep(node, Life.GIVEN)
            self._held[node] = (self.name(node),)
        elif is_part(node):
            self._note_part(node)
        else:
            looks = is_tensor(node) and is_view(node) and not written(node) and not _opaque(node)
            if looks and self._seen_to_share(node):
                self._note_view(node)
            else:
                self.reads[node] = self._read(node)
                self._note_copy(node) if looks else self._note_write(node)

    def _read(self, node: fx.Node) -> tuple[str, ...]:
        if node.target in SIZES_ONLY and not any(self.name(each) in self._reshaped for each in operands(node)):
            return self._handles(operands(node))
        over = written(node) if target_text(node.target).split(".")[1] in _OVERWRITE else ()
        reads = self._all_held(each for each in operands(node) if each not in over)
        return tuple(dict.fromkeys((*reads, *(each for each in self._all_held(over) if not self.storages[each].bytes))))

    def _note_part(self, node: fx.Node) -> None:
        """One of several results: there when the call is done, which makes it if it is new."""
        whole, storage = node.args[0], self.name(node)
        held = self._held[whole]  # type: ignore[index]
        if storage in held:
            self._held[node] = held
            return
        self._keep(node, Life.INTERMEDIATE)
        self._held[node] = (storage,)
        while is_part(whole):  # type: ignore[arg-type]
            whole = whole.args[0]  # type: ignore[union-attr]
        new = self._perhaps_new(node, whole)  # type: ignore[arg-type]
        self._wrote(whole, [*self.writes[whole], storage, *new])  # type: ignore[arg-type,index]

    def _seen_to_share(self, node: fx.Node) -> bool:
        """Whether the values of a view and of what it looks at are in one storage, as they were when it was traced."""
        if self.name(node) in self._reshaped or target_text(node.target).split(".")[1] in _MAY_COPY:
            return False
        known = storage_of(node.meta.get("val")) or storage_of(_first(node.meta.get("val")))
        return known is not None and all(storage_of(each.meta.get("val")) == known for each in self._shared(node))

    def _note_view(self, node: fx.Node) -> None:
        shares = self._shared(node)
        numbers = [each for each in operands(node) if each not in shares]
        self.reads[node] = tuple(dict.fromkeys((*self._all_held(numbers), *self._handles(shares))))
        self.storages[node.name] = Storage(node.name, Life.INTERMEDIATE, (node.name,), 0)
        carried = [each for each in self._all_held(shares) if self.storages[each].bytes != 0]
        self._held[node] = tuple(dict.fromkeys((self.name(node), *carried, node.name)))
        self._wrote(node, [node.name])

    def _note_copy(self, node: fx.Node) -> None:
        """A view, or a copy after all, as only the run knows: it lies in new memory and in the old."""
        carried = [each for each in self._all_held(self._shared(node)) if self.storages[each].bytes != 0]
        self._held[node] = tuple(dict.fromkeys((self.name(node), *carried, node.name)))
        self._wrote(node, [node.name])
        self._own(node)

    def _own(self, node: fx.Node) -> None:
        """A storage for the memory that a call may have made, though its value may also lie in others."""
        self.storages[node.name] = Storage(node.name, Life.INTERMEDIATE, (node.name,))
        self._loose.update(each for each in self._held[node] if each != node.name)

    def _perhaps_new(self, node: fx.Node, call: fx.Node) -> tuple[str, ...]:
        """A storage for the memory of a value that is put to others because nobody knows whether it lies there.

        None is needed where the value was written in place, was seen to lie in an operand, or is a state.
        """
        known = storage_of(node.meta.get("val"))
        seen = known is not None and any(storage_of(each.meta.get("val")) == known for each in operands(call))
        if self.name(node) == node.name or seen or node in self._same or written(call):
            return ()
        self._held[node] += (node.name,)
        self._own(node)
        return (node.name,)

    def _shared(self, node: fx.Node) -> list[fx.Node]:
        return [each for each in operands(node) if self.aliases.share(each, node)]

    def _all_held(self, nodes: Iterable[fx.Node]) -> tuple[str, ...]:
        return tuple(dict.fromkeys(each for node in nodes for each in self._held[node]))

    def _handles(self, nodes: Iterable[fx.Node]) -> tuple[str, ...]:
        return tuple(dict.fromkeys(filter(None, map(self._handle, nodes))))

    def _handle(self, node: fx.Node) -> str | None:
        """What a task waits for that needs a tensor and nothing of its contents; what is given is always there."""
        if node.op != "call_function":
            return None
        while is_part(node):
            node = node.args[0]  # type: ignore[assignment]
        if node.name in self.storages and self.storages[node.name].bytes == 0:
            return node.name
        name = f"{node.name}:handle"
        if name not in self.storages:
            self.storages[name] = Storage(name, Life.INTERMEDIATE, (), 0)
            self._wrote(node, [*self.writes[node], name])
        return name

    def _note_write(self, node: fx.Node) -> None:
        """A call that makes a new value, or writes into old ones, or may."""
        over = [each for each in self._all_held((*written(node), *_unsaid(node))) if self.storages[each].bytes != 0]
        self._keep(node, Life.INTERMEDIATE)
        carried = self._all_held(self._shared(node))
        self._held[node] = tuple(dict.fromkeys((self.name(node), *carried)))
        if _draws(node):
            self.storages.setdefault(GENERATOR, Storage(GENERATOR, Life.STATE, (), 0))
            self.reads[node] += (GENERATOR,)
            over.append(GENERATOR)
        self._wrote(node, [*over, self.name(node), *self._perhaps_new(node, node)])

    def _wrote(self, node: fx.Node, storages: list[str]) -> None:
        self.writes[node] = tuple(dict.fromkeys(storages))
        self._written.update(storages)

    def _keep(self, node: fx.Node, life: Life) -> None:
        name = self.name(node)
        if name not in self.storages:
            self.storages[name] = Storage(name, life, (), _bytes(node.meta.get("val")))

    def _finish(self) -> None:
        """How long each storage lives, and which values lie in it."""
        results: set[str] = set()
        returned: Any = self.program.graph.output_node().args[0]
        for value in returned:
            results.update(self._held.get(value, ()))
        lie: dict[str, list[str]] = {}
        for node, names in self._held.items():
            for name in names:
                lie.setdefault(name, []).append(node.name)
        for name, each in self.storages.items():
            life = each.life
            if life is Life.GIVEN and name in self._written:
                life = Life.STATE
            elif life is Life.INTERMEDIATE and name in results:
                life = Life.RESULT
            values = tuple(lie.get(name, each.values))
            self.storages[name] = Storage(name, life, values, each.bytes, name in self._loose)


def _aliases(program: Program) -> tuple[Aliases, set[fx.Node]]:
    """Which nodes share storage, states and their new values included; and which lie where others do for sure."""
    known = {node: read(node) for node in program.graph.nodes if is_wrapper(node)}
    aliases = Aliases(program.graph, {node: None if each is None else each.lists for node, each in known.items()})
    for wrapped in filter(None, known.values()):
        for value in wrapped.handed_on:
            for base in wrapped.bases:
                aliases.merge(value, base)
    placeholders = {node.name: node for node in program.graph.nodes if node.op == "placeholder"}
    values: Any = program.graph.output_node().args[0]
    same: set[fx.Node] = set()
    for state in recognise(program):
        base = placeholders[state.binding.name]
        versions = [each for each in state.versions if state.eligible]
        for value in (*versions, values[state.position]):
            if hasattr(value, "op"):
                aliases.merge(value, base)
                same.add(value)
    constants: dict[Any, fx.Node] = {}
    inner = {name for name, _ in subgraphs(program.graph)}
    for node in program.graph.nodes:
        if node.op == "get_attr" and node.target not in inner:
            aliases.merge(node, constants.setdefault(node.target, node))
        if is_collective(node) and "wait_tensor" in target_text(node.target):
            aliases.merge(node, operands(node)[0])  # it hands on its operand, which its schema does not say
            same.add(node)
        for each in _unsaid(node) if is_tensor(node) else ():
            for value in (node, *filter(is_part, node.users)):
                aliases.merge(value, each)
    return aliases, same


def _opaque(node: fx.Node) -> bool:
    """Whether a call may write to what it hands on without saying so."""
    return getattr(node.target, "_schema", None) is None or is_collective(node) or bool(_unsaid(node))


def _unsaid(node: fx.Node) -> list[fx.Node]:
    """The tensors that a call may write to or hand on without saying so: all of them, where its schema says too little.

    A wrapper has no schema, and is known to write to copies.
    """
    if node.op != "call_function" or is_part(node) or is_wrapper(node):
        return []
    name = target_text(node.target).split(".")
    silent = name[0] == "aten" and (name[1] in _SILENT or name[1].startswith("unsafe_"))
    tagged = torch.Tag.maybe_aliasing_or_mutating in getattr(node.target, "tags", ())
    if getattr(node.target, "_schema", None) is not None and not silent and not tagged:
        return []
    return [each for each in operands(node) if is_tensor(each)]


def _reshapes(node: fx.Node) -> bool:
    """Whether a call changes sizes, strides or memory of a tensor that stays the same tensor."""
    return torch.Tag.inplace_view in getattr(node.target, "tags", ())


def _draws(node: fx.Node) -> bool:
    """Whether a call draws random numbers, or a graph that it runs does.

    Attention has the tag, and draws none where nothing is dropped.
    """
    seeded = torch.Tag.nondeterministic_seeded
    return any(
        seeded in getattr(_operator(each), "tags", ()) and (is_wrapper(each) or _drops(each)) for each in _calls(node)
    )


def _drops(node: fx.Node) -> bool:
    rates = [argument for argument in node.target._schema.arguments if argument.name == "dropout_p"]  # type: ignore[union-attr]
    given = {argument.name: value for argument, value in bound(node)}
    return not rates or given.get("dropout_p", rates[0].default_value) != 0


def _first(value: Any) -> Any:
    return value[0] if isinstance(value, (list, tuple)) and value else None


def _bytes(value: Any) -> int | None:
    """What a value takes; numbers nothing, and None where sizes are symbolic or unknown.

    Of a tensor of no elements nothing is known: who writes to it may give it some.
    """
    if isinstance(value, torch.Tensor):
        sizes = (*value.shape, value.element_size())
        return int(value.nbytes) or None if all(type(size) is int for size in sizes) else None
    if isinstance(value, (list, tuple)) or value is None:
        return None
    return 0

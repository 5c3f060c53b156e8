"""Compile a Program and call it with the model's signature. Weights and state are bound once."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import torch
from torch.utils._pytree import tree_flatten, tree_unflatten

from inlay.errors import UsageError
from inlay.lowering.backends import find_backend
from inlay.lowering.owned_state import OwnedState
from inlay.lowering.state.buffers import lift_mutated_buffers
from inlay.lowering.state.declared_aliases import PREALLOCATED, declare_aliases, preallocate_outputs
from inlay.lowering.state.in_place_writes import InPlaceProgram, write_in_place
from inlay.lowering.state.state_copies import find_compiled_copies
from inlay.program.bindings import Role, tensor_text

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from inlay.analysis.state_updates import StateUpdate
    from inlay.lowering.backends import BindableCode, Run
    from inlay.program.bindings import Binding, Bindings
    from inlay.program.program import Program
    from inlay.program.remarks import Remark


__all__ = ["CompiledProgram", "compile_program"]


def compile_program(
    program: Program,
    backend: str = "inductor",
    *,
    alias: Mapping[str | int, str | int] | None = None,
    lift_mutable_buffers: bool = False,
    preallocate: bool = False,
) -> CompiledProgram:
    """Compile a program without transforms and without a package.

    `alias` declares outputs that live in the storage of inputs. With `lift_mutable_buffers`, state that the module owns
    becomes arguments: the caller reads `bindings`, creates tensors of those types, and passes them by name. With
    `preallocate`, outputs of fixed shape that alias nothing are allocated now, and the next call overwrites them.

    >>> import torch
    >>> from inlay.testing import program_of
    >>> program = program_of(lambda x, state: state.add_(x), [torch.ones(2), torch.zeros(2)])
    >>> compiled, state = compile_program(program, "eager"), torch.zeros(2)
    >>> compiled(torch.ones(2), state) is state, state
    (True, tensor([1., 1.]))
    """
    if alias:
        program = declare_aliases(program, alias)
    if lift_mutable_buffers:
        program = lift_mutated_buffers(program)
    if preallocate:
        if backend == "aot":
            raise UsageError("AOTInductor allocates the outputs of a library at each call.", "Use inductor or eager.")
        program = preallocate_outputs(program)
    code = find_backend(backend)(program)
    made = write_in_place(program)
    if backend != "eager":
        made = replace(made, states=tuple(find_compiled_copies(program)))
    return CompiledProgram(made, code, backend)


@dataclass(eq=False)
class CompiledProgram:
    """A compiled program that can be called. Its `bindings` list inputs, outputs, and the state that it writes to."""

    in_place_program: InPlaceProgram
    code: BindableCode
    backend: str
    owned_tensors: dict[str, torch.Tensor] = field(default_factory=dict)
    """Weights, and the state that the program owns."""

    def __post_init__(self) -> None:
        program = self.in_place_program.program
        self._validator = InputValidator(program)
        self._bound_run: tuple[list[int], Run] | None = None
        kinds = {row.alias.binding: row.alias.kind for row in program.bindings.outs if row.alias is not None}
        for row in program.bindings.with_role(Role.PARAMETER, Role.BUFFER, Role.CONSTANT):
            value = program.tensors[row.name].read()
            self.owned_tensors[row.name] = value.clone() if row.name in kinds else value
        outputs = {name: name for name, kind in kinds.items() if kind == PREALLOCATED}
        self._outputs = OwnedState(self.owned_tensors, outputs, {})
        """Preallocated outputs. They are no state, but also for one call at a time."""
        states = kinds.keys() - outputs
        self.initial = {name: program.tensors[name].read().clone() for name in states & program.tensors.keys()}
        """Initial values of states, by name. The model writes to its own tensors when it is called; these stay."""
        names = {program.bindings[name].target: name for name in self.owned_tensors if name in states}
        self.state = OwnedState(self.owned_tensors, names, self.initial)
        """The state that the program owns, by its names in the model."""
        users = [index for index, row in enumerate(program.bindings.outs) if row.alias is None]
        declared = self.in_place_program.declared_outputs
        self._declared = [(users.index(index), name) for index, name in declared.items()]
        """Place of a returned value → the state that it is."""

    @property
    def bindings(self) -> Bindings:
        """The table of all inputs and outputs."""
        return self.in_place_program.program.bindings

    @property
    def states(self) -> tuple[StateUpdate, ...]:
        """The state bindings, how each is written, and whether this backend updates it in place."""
        return self.in_place_program.states

    @property
    def remarks(self) -> list[Remark]:
        """Which states are not updated in place, or not known to be, and why."""
        return self.in_place_program.remarks

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the program like the model; lifted state is passed by name."""
        calling = self.in_place_program.program.call_spec
        given, spec = tree_flatten((args, kwargs))
        if spec != calling.in_spec:
            given = self._reorder(args, kwargs)
        values = self._validator(given)
        with self.state.exclusive(), self._outputs.exclusive():
            results = list(self._bind()(values))
        for place, name in self._declared:
            owned = self.owned_tensors.get(name)
            results[place] = values[self._validator.places[name]] if owned is None else owned
        return tree_unflatten(results, calling.out_spec)

    def _bind(self) -> Run:
        """Return the code, bound to the current `owned_tensors`."""
        places = [value.data_ptr() for value in self.owned_tensors.values()]
        if self._bound_run is None or self._bound_run[0] != places:
            self._bound_run = places, self.code(self.owned_tensors)
        return self._bound_run[1]

    def _reorder(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Any]:
        """Reorder arguments that are passed by name where the capture had positions, or in another order."""
        spec = self.in_place_program.program.call_spec.in_spec
        wanted_args, wanted_kwargs = tree_unflatten(list(range(spec.num_leaves)), spec)
        names = self.in_place_program.program.call_spec.arg_names
        by_name = dict(zip(names, args, strict=False)) | kwargs
        missing = [name for name in (*names[: len(wanted_args)], *wanted_kwargs) if name not in by_name]
        unknown = sorted(set(kwargs) - set(names) - set(wanted_kwargs))
        if missing or unknown:
            what = f"lacks {', '.join(missing)}" if missing else f"has unknown arguments {', '.join(unknown)}"
            raise UsageError(f"The call {what}.", f"Pass {', '.join(dict.fromkeys((*names, *wanted_kwargs)))}.")
        made = (
            tuple(by_name[name] for name in names[: len(wanted_args)]),
            {name: by_name[name] for name in wanted_kwargs},
        )
        given, found = tree_flatten(made)
        if found != spec:
            raise UsageError("The arguments are not nested like those that the program was captured with.")
        return given


class InputValidator:
    """Checks the types of a program's arguments, and makes tensors contiguous where they were at capture."""

    def __init__(self, program: Program) -> None:
        captured = {node.name: node.meta.get("val") for node in program.graph.nodes if node.op == "placeholder"}
        inputs = program.bindings.with_role(Role.INPUT)
        self.places = {row.name: place for place, row in enumerate(inputs)}
        """Name of an input → its place in the list of arguments."""
        self.rows = [(place, row) for place, row in enumerate(inputs) if row.is_tensor]
        self.state = {row.name for row in program.bindings.state}
        self.symbols = {symbol.name: symbol for symbol in program.symbols.values()}
        self.contiguous_inputs = {
            row.name for _, row in self.rows if (value := captured[row.name]) is not None and value.is_contiguous()
        }

    def __call__(self, given: Sequence[Any]) -> list[Any]:
        """Return all arguments, made contiguous where required."""
        sizes: dict[int | str, int] = {}
        values = list(given)
        for place, row in self.rows:
            for name, size in zip(row.shape, getattr(values[place], "shape", ()), strict=False):
                known, first = self.symbols.get(str(name)), sizes.setdefault(name, size)
                if known is not None and not known.low <= size == first <= (known.high or size):
                    other = f" and {first}" if size != first else ""
                    raise UsageError(f"{name} is {size}{other}; the program takes one size, {known.range_text}.")
        for place, row in self.rows:
            values[place] = self._validate(row, values[place])
        return values

    def _validate(self, row: Binding, value: Any) -> Any:
        if not isinstance(value, torch.Tensor):
            raise UsageError(f"{row.target} must be {row.type_text}; got a value of type {type(value).__name__}.")
        fits = len(value.shape) == len(row.shape) and all(
            isinstance(wanted, str) or wanted == size for wanted, size in zip(row.shape, value.shape, strict=True)
        )
        if value.dtype is not getattr(torch, row.dtype) or not fits:
            found = tensor_text(value.dtype, value.shape)
            raise UsageError(f"{row.target} must be {row.type_text}; got {found}.")
        if row.name not in self.contiguous_inputs or value.is_contiguous():
            return value
        if row.name in self.state:
            raise UsageError(
                f"{row.target} is state and must be contiguous; got a view of another tensor.",
                "Pass a contiguous tensor: it is updated in place.",
            )
        return value.contiguous()

"""Compile a Program and call it: weights and state bound once, the rest by the signature of the model."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from torch.utils._pytree import tree_flatten, tree_unflatten

from inlay.compile.engines import find_engine
from inlay.compile.given import Given
from inlay.errors import UsageError
from inlay.program.bindings import Role
from inlay.state import InPlace, declare, in_place, lift_mutated_buffers, under_compilers

if TYPE_CHECKING:
    from collections.abc import Mapping

    import torch

    from inlay.compile.engines import Code, Run
    from inlay.program.bindings import Bindings
    from inlay.program.program import Program
    from inlay.program.remarks import Remark
    from inlay.state import State


def compile_program(
    program: Program,
    engine: str = "inductor",
    *,
    alias: Mapping[str | int, str | int] | None = None,
    lift_mutable_buffers: bool = False,
) -> CompiledProgram:
    """Compile a program as it is: no transforms, no package.

    `alias` declares outputs that live in the storage of inputs. With `lift_mutable_buffers` state that the module owns
    is left to the caller, who reads `bindings`, makes tensors of those types, and passes them by name.

    >>> import torch
    >>> from inlay.testing import program_of
    >>> program = program_of(lambda x, state: state.add_(x), [torch.ones(2), torch.zeros(2)])
    >>> compiled, state = compile_program(program, "eager"), torch.zeros(2)
    >>> compiled(torch.ones(2), state) is state, state
    (True, tensor([1., 1.]))
    """
    if alias:
        program = declare(program, alias)
    if lift_mutable_buffers:
        program = lift_mutated_buffers(program)
    code = find_engine(engine)(program)
    made = in_place(program)
    if engine != "eager":
        made = replace(made, states=tuple(under_compilers(program)))
    return CompiledProgram(made, code, engine)


@dataclass(eq=False)
class CompiledProgram:
    """A program that runs. Its table says what it takes, what it returns, and which state it writes to."""

    made: InPlace
    code: Code
    engine: str
    held: dict[str, torch.Tensor] = field(default_factory=dict)
    """Weights, and the state that the program owns."""

    def __post_init__(self) -> None:
        self._given = Given(self.made.program)
        self._bound: tuple[list[int], Run] | None = None
        written = {row.name for row in self.bindings.state}
        for row in self.bindings.of(Role.PARAMETER, Role.BUFFER, Role.CONSTANT):
            value = self.made.program.tensors[row.name].read()
            self.held[row.name] = value.clone() if row.name in written else value

    @property
    def bindings(self) -> Bindings:
        """The one table of all that goes in and comes out."""
        return self.made.program.bindings

    @property
    def states(self) -> tuple[State, ...]:
        """The state bindings, how each is written, and whether this engine does that in place."""
        return self.made.states

    @property
    def remarks(self) -> list[Remark]:
        """What is not in place, or not known to be, and why."""
        return self.made.remarks

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call it like the model; state that was lifted is passed by name."""
        calling = self.made.program.calling
        given, spec = tree_flatten((args, kwargs))
        if spec != calling.in_spec:
            given = self._reordered(args, kwargs)
        rows = self.bindings.of(Role.INPUT)
        values = self._given(self.held | dict(zip((row.name for row in rows), given, strict=True)))
        results = iter(self._run()([values[row.name] for row in rows]))
        states = {state.position: values[state.binding.name] for state in self.states}
        every = [states[index] if index in states else next(results) for index in range(len(self.bindings.outs))]
        users = [self._user_value(index, every, values) for index in self._users()]
        return tree_unflatten(users, calling.out_spec)

    def _run(self) -> Run:
        """The code, bound to what is held now."""
        places = [value.data_ptr() for value in self.held.values()]
        if self._bound is None or self._bound[0] != places:
            self._bound = places, self.code(self.held)
        return self._bound[1]

    def _users(self) -> list[int]:
        return [index for index, row in enumerate(self.bindings.outs) if row.alias is None]

    def _user_value(self, index: int, every: list[Any], values: Mapping[str, Any]) -> Any:
        """An output that was declared to be a state is that state."""
        declared = self.made.declared.get(index)
        return every[index] if declared is None else values[declared]

    def _reordered(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Any]:
        """Arguments given by name where the capture had them by position, or in another order."""
        spec = self.made.program.calling.in_spec
        wanted_args, wanted_kwargs = tree_unflatten(list(range(spec.num_leaves)), spec)
        names = self.made.program.calling.arg_names
        by_name = dict(zip(names, args, strict=False)) | kwargs
        missing = [name for name in (*names[: len(wanted_args)], *wanted_kwargs) if name not in by_name]
        unknown = sorted(set(kwargs) - set(names) - set(wanted_kwargs))
        if missing or unknown:
            what = f"lacks {', '.join(missing)}" if missing else f"takes no {', '.join(unknown)}"
            raise UsageError(
                f"The call {what}.", f"The program takes {', '.join(dict.fromkeys((*names, *wanted_kwargs)))}."
            )
        made = (
            tuple(by_name[name] for name in names[: len(wanted_args)]),
            {name: by_name[name] for name in wanted_kwargs},
        )
        given, found = tree_flatten(made)
        if found != spec:
            raise UsageError("The arguments are not nested like those the program was captured with.")
        return given

"""Random models that read and write one state in random ways: in place or not, they compute what eager computes.

What a backend says of a state is held against what it does: a state that is said to be in place has no block of its
size allocated and no page written that eager PyTorch does not write; any other has a remark.
"""

from __future__ import annotations

import math
import mmap
import random
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import pytest
import torch

from inlay.analysis.state_updates import find_state_updates
from inlay.lowering.compiled_program import compile_program
from inlay.lowering.inner_backend import build_inner_module, compile_with
from inlay.lowering.lower import compile_lowered, lower
from inlay.lowering.state.declared_aliases import declare_aliases
from inlay.lowering.state.index_put import canonicalize_updates
from inlay.package.memory_profiler import allocate_arena, find_written_pages, record_torch_allocations
from inlay.program.bindings import Role
from inlay.testing import program_of

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from inlay.program import Program
    from inlay.program.remarks import Remark

SHAPE = (2, 3, 8, 4)


def _view(rng: random.Random, cache: torch.Tensor) -> torch.Tensor:
    for _ in range(rng.choice((0, 1, 1, 2))):
        axis = rng.randrange(cache.dim())
        match rng.randrange(6):
            case 0 if cache.dim() > 1:
                cache = cache.select(axis, rng.randrange(-cache.shape[axis], cache.shape[axis]))
            case 1:
                start = rng.randrange(cache.shape[axis])
                cache = cache.narrow(axis, start, rng.randrange(1, cache.shape[axis] - start + 1))
            case 2:
                cache = cache.transpose(0, axis)
            case 3:
                places = [slice(None)] * cache.dim()
                places[axis] = slice(rng.randrange(-2, 2), None, rng.choice((1, 2, 3)))
                cache = cache[tuple(places)]
            case 4 if cache.dim() > 1:
                cache = cache[..., : rng.randrange(1, cache.shape[-1] + 1)]
            case _:
                cache = cache.unsqueeze(axis).squeeze(axis)
    return cache


def _read(part: torch.Tensor, cache: torch.Tensor) -> torch.Tensor:
    """A part as it is now; of what is as large as the state only the sum, so that a copy of it is one of the state."""
    return part.clone() if part.numel() < cache.numel() else part.sum()


def _write(rng: random.Random, part: torch.Tensor, cache: torch.Tensor, x: torch.Tensor, at: torch.Tensor) -> None:
    """One of the ways to write to a part of a state, or to all of it."""
    rows = at[:1] % part.shape[0]
    match rng.randrange(18):
        case 0:
            part.copy_(x[: part.numel()].view(part.shape) if part.numel() <= x.numel() else part * 2)
        case 1:
            part.index_copy_(0, rows, part[:1] * 2 + x[0])
        case 2:
            part.add_(x[0])
        case 3:
            other = _view(rng, cache)
            part.copy_(other + 1 if other.shape == part.shape else part.flip(0))
        case 4:
            part[..., :1] = x[1]
        case 5:
            part[..., ::2] += 1
        case 6:
            part.scatter_(0, rows.view(-1, *[1] * (part.dim() - 1)).expand(part[:1].shape), part[:1] * 0 + x[2])
        case 7:
            part.scatter_add_(0, rows.view(-1, *[1] * (part.dim() - 1)).expand(part[:1].shape), part[:1] * 0 + x[2])
        case 8:
            part.index_add_(0, torch.cat([rows, rows]), x[: 2 * part[0].numel()].view(2, *part.shape[1:]), alpha=2)
        case 9:
            part.masked_fill_(part > 0.5, -1.0)
        case 10:
            part[:1] = (part[:1] * 0 + x[3]).double()
        case 11:
            part.copy_(torch.where(part > 0, part, x[4]))
        case 12:
            part.copy_(part.roll(1, -1))
        case 13:
            part.copy_(torch.cat([part[1:], part[:1] * 0 + x[5]]))
        case 14:
            part.index_fill_(0, rows, 0.25)
        case 15:
            part.index_put_((rows,), part[:1] * 0 + x[6], accumulate=rng.random() < 0.5)
        case 16:
            part[part < -1] = 0.0
        case _:
            part.mul_(0.5)


def _model(seed: int) -> Any:
    def model(cache: torch.Tensor, x: torch.Tensor, at: torch.Tensor) -> Any:
        rng = random.Random(seed)
        seen, old = [], cache
        for _ in range(rng.randrange(1, 5)):
            part = _view(rng, cache)
            match rng.randrange(6):
                case 0:
                    seen.append(_read(part, cache))
                case 1:
                    old = part
                case _:
                    _write(rng, part, cache, x, at)
        return (*seen, old.sum())

    return model


def _shuffled(program: Program, rng: random.Random) -> Program:
    """The same functional program, its calls in another order that their operands allow."""
    made = program.copy()
    output = made.graph.output_node()
    waiting = [node for node in made.graph.nodes if node.op == "call_function"]
    while waiting:
        ready = [node for node in waiting if not any(each in waiting for each in node.all_input_nodes)]
        chosen = rng.choice(ready)
        waiting.remove(chosen)
        output.prepend(chosen)
    return made


def _check(seed: int) -> bool:
    x, at = torch.randn(192), torch.tensor([3, 1])
    model = _model(seed)
    program = program_of(model, [torch.randn(SHAPE), x, at])
    shuffled = _shuffled(program, random.Random(seed))
    for each in (program, canonicalize_updates(program)[0], shuffled, canonicalize_updates(shuffled)[0]):
        compiled = compile_program(each, "eager")
        one = torch.randn(SHAPE, generator=torch.Generator().manual_seed(seed))
        two = one.clone()
        expected, actual = model(one, x, at), compiled(two, x, at)
        torch.testing.assert_close(two, one)
        for left, right in zip(expected, actual, strict=True):
            torch.testing.assert_close(right, left)
    return all(state.is_eligible for state in find_state_updates(shuffled))


def test_forty_models() -> None:
    eligible = [_check(seed) for seed in range(40)]
    assert 5 < sum(eligible) < 40, "some are in place, some cannot be"


@pytest.mark.nightly
def test_thousand_models() -> None:
    eligible = [_check(seed) for seed in range(1000, 2000)]
    assert 100 < sum(eligible) < 1000


# ---- functional updates: what is put into a part of a state is read, returned and put into another one


def _functional_model(seed: int) -> Any:
    def model(one: torch.Tensor, two: torch.Tensor, x: torch.Tensor) -> Any:
        rng = random.Random(seed)
        states, made = [one, two], list[torch.Tensor]()
        for _ in range(rng.randrange(1, 5)):
            which, axis, at = rng.randrange(2), rng.randrange(1, 3), rng.randrange(2)
            is_slice = rng.random() < 0.3
            part = states[which].narrow(axis, at, 1) if is_slice else states[which].select(axis, at)
            known = [value for value in made if value.shape == part.shape]
            new = [part + x[0], part * x[1:5], part.softmax(0), x[: part.numel()].view(part.shape) + 1]
            value = rng.choice(known if known and rng.random() < 0.5 else new)
            made.append(value)
            states[which] = (
                torch.slice_scatter(states[which], value, axis, at, at + 1)
                if is_slice
                else torch.select_scatter(states[which], value, axis, at)
            )
        ways = [lambda v: v, lambda v: v.view(-1), lambda v: v.view(-1)[1:] * 2, lambda v: v.transpose(0, 1)]
        return (*states, *(rng.choice(ways)(value) for value in made if rng.random() < 0.6))

    return model


def _check_functional(seed: int) -> bool:
    """Two calls: what the first returned stays as it is when the second writes to the states."""
    rng = torch.Generator().manual_seed(seed)
    model, x = _functional_model(seed), torch.randn(192, generator=rng)
    given = [torch.randn(SHAPE, generator=rng) for _ in range(2)]
    program = declare_aliases(program_of(model, [*given, x]), {0: 0, 1: 1})
    shuffled = _shuffled(program, random.Random(seed))
    for each in (program, canonicalize_updates(program)[0], shuffled, canonicalize_updates(shuffled)[0]):
        compiled, states = compile_program(each, "eager"), [value.clone() for value in given]
        expected, returned = list(given), []
        for number in range(2):
            expected, actual = model(*expected[:2], x + number), compiled(*states, x + number)
            torch.testing.assert_close(states, list(expected[:2]))
            assert [one is two for one, two in zip(actual, states, strict=False)] == [True, True]
            returned.append((actual[2:], expected[2:]))
        for left, right in returned:
            torch.testing.assert_close(left, right)
            assert [value.stride() for value in left] == [value.stride() for value in right]
    return all(state.is_eligible for state in find_state_updates(shuffled))


def test_functional_models() -> None:
    eligible = [_check_functional(seed) for seed in range(16)]
    assert 0 < sum(eligible) < 16, "some are in place, some cannot be"


@pytest.mark.nightly
def test_thousand_functional_models() -> None:
    eligible = [_check_functional(seed) for seed in range(1000, 2000)]
    assert 100 < sum(eligible) < 1000


# ---- what a backend says, and what it does: many states in one program, each of a size of its own


@dataclass(frozen=True)
class _Caches:
    """Caches in memory that is watched, and what is written to them beside."""

    whole: torch.Tensor
    caches: list[torch.Tensor]

    def fill(self, seed: int) -> None:
        self.whole.zero_()
        generator = torch.Generator().manual_seed(seed)
        for cache in self.caches:
            cache.copy_(torch.randn(cache.shape, generator=generator))

    def pages(self, call: Callable[[], Any]) -> list[int]:
        """How many pages of each cache a call writes to."""
        marks, at, found = find_written_pages(call, self.whole), 0, []
        for cache in self.caches:
            count = -(-cache.nbytes // mmap.PAGESIZE)
            found.append(sum(marks[at : at + count]))
            at += count
        return found


def _caches(count: int, *, tiny: bool = False) -> _Caches:
    shape = (3, 1, 4, 1) if tiny else (3, 5, 40, 16)
    shapes = {str(index): ((*shape[:2], shape[2] + index, shape[3]), torch.float32) for index in range(count)}
    whole, held = allocate_arena(shapes)
    return _Caches(whole, list(held.values()))


def _compile(program: Program, backend: str) -> tuple[Callable[..., Any], Sequence[Remark]]:
    """The program on any way to run it in this process, and what is said of its states."""
    if backend == "aot_eager":
        users = [None for row in program.bindings.outs if row.alias is None]
        made = build_inner_module(program, users, backend)
        values = [node.meta["val"] for node in made.module.graph.nodes if node.op == "placeholder"]
        return torch.no_grad()(compile_with(backend, made.module, values)), made.remarks
    if backend == "executable":
        rows = program.bindings.with_role(Role.INPUT)
        executable, names = (compile_lowered(lower(program), "eager"), [row.name for row in rows])
        return lambda *given: [*executable(dict(zip(names, given, strict=True))).values()], executable.remarks
    compiled = compile_program(program, backend)
    assert {state.binding.name for state in compiled.states if not state.is_eligible} <= {
        remark.nodes[0] for remark in compiled.remarks
    }
    return compiled, compiled.remarks


def _check_backend(backend: str, seeds: Sequence[int], *, tiny: bool = False) -> int:
    """How many of the states are in place. One program writes to all of them, so that it is compiled once."""
    models = [_model(seed) for seed in seeds]

    def model(x: torch.Tensor, at: torch.Tensor, *caches: torch.Tensor) -> Any:
        return tuple(value for each, cache in zip(models, caches, strict=True) for value in each(cache, x, at))

    held, at = _caches(len(seeds), tiny=tiny), torch.tensor([3, 1])
    x = torch.randn(20_000, generator=torch.Generator().manual_seed(len(seeds)))
    held.fill(0)
    program = program_of(model, [x, at, *(cache.clone() for cache in held.caches)])
    compiled, said = _compile(program, backend)
    expected = [cache.clone() for cache in held.caches]
    for left, right in zip(model(x, at, *expected), compiled(x, at, *held.caches), strict=True):
        torch.testing.assert_close(right, left, rtol=1e-4, atol=1e-4)
    for seed, one, two in zip(seeds, expected, held.caches, strict=True):
        torch.testing.assert_close(two, one, msg=f"seed {seed}: {{}}".format)
    held.fill(1)
    needed = held.pages(lambda: model(x, at, *held.caches))
    held.fill(1)
    written = held.pages(lambda: compiled(x, at, *held.caches))
    blocks = record_torch_allocations(lambda: compiled(x, at, *held.caches))
    states = {row.name for row in program.bindings.state}
    remarks = {remark.nodes[0] for remark in said}
    for index, seed in enumerate(seeds):
        name = f"values_{index + 2}"
        if name in states and name not in remarks:
            size = math.prod(held.caches[index].shape) * 4
            assert not blocks.count(size), f"seed {seed}: {name} is said to be in place, and copied"
            assert written[index] <= needed[index], f"seed {seed}: {name} writes more pages than eager"
    return len(states - remarks)


def test_backends_do_what_they_say_eager() -> None:
    assert 10 < _check_backend("eager", range(60)) < 60


def test_executables_do_what_they_say() -> None:
    assert 2 < _check_backend("executable", range(12)) < 12


def test_functionalized_calls_copy_every_state() -> None:
    assert _check_backend("aot_eager", range(5)) == 0


@pytest.mark.nightly
@pytest.mark.parametrize("backend", ["eager", "executable", "inductor", "aot"])
def test_tiny_states_are_not_silent(backend: str) -> None:
    """One state of 48 bytes a program: a block of that size is a copy of it."""
    assert 0 < sum(_check_backend(backend, [seed], tiny=True) for seed in range(12)) < 12


@pytest.mark.parametrize("backend", ["aot", pytest.param("inductor", marks=pytest.mark.nightly)])
def test_backends_do_what_they_say_compiled(backend: str) -> None:
    assert 3 < _check_backend(backend, range(16)) < 16


@pytest.mark.nightly
@pytest.mark.parametrize("backend", ["eager", "inductor", "aot"])
@pytest.mark.parametrize("first", range(100, 400, 30))
def test_backends_do_what_they_say_often(backend: str, first: int) -> None:
    _check_backend(backend, range(first, first + 30))

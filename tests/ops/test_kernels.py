"""The C++ kernels against their references: every way, every format, and for lesser processors."""

from __future__ import annotations

import ctypes
from typing import TYPE_CHECKING, Any

import pytest
import torch

from inlay.ops import native
from inlay.ops.cached import cached_attention
from inlay.ops.packed import packed_embedding
from inlay.ops.packing import Packing

if TYPE_CHECKING:
    from pathlib import Path

FORMATS = [Packing(4, -1), Packing(4, 8), Packing(8, 128), Packing(4, -1, 64), Packing(4, -1, 128), Packing(16, 0)]
TYPES = [torch.float32, torch.bfloat16, torch.float16]
WAYS = {"dot": 1, "tiles of bytes": 2, "tiles of bfloat16": 3, "portable": 4}
Pointer, Int, Long, Float = ctypes.c_void_p, ctypes.c_int32, ctypes.c_int64, ctypes.c_float


@pytest.fixture(scope="module", params=["native", "portable"])
def level(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def kernels(level: str, tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    """Both levels end up in one process, where neither may take a function of the other."""
    file: Path = tmp_path_factory.mktemp("kernels") / native.NAME
    native.copy(file, level)
    torch.cpu._init_amx()
    return native.load(file)


def made(packing: Packing, features: int, depth: int) -> torch.Tensor:
    if packing.bits == 16:
        return packing.pack(torch.randn(features, depth))
    q = torch.randint(0, 2**packing.bits, (features, depth))
    scale = torch.rand(features, depth // packing.group) * 0.1
    minimum = -torch.rand_like(scale) * 0.1 * 2 ** (packing.bits - 1) if packing.zero < 0 else None
    return packing.pack(q, scale, minimum)


def linear(
    kernels: Any,
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    features: int,
    packing: Packing,
    way: int,
) -> torch.Tensor:
    rows, depth = x.shape
    y = torch.full((rows, features), float("nan"), dtype=x.dtype)
    kind = TYPES.index(x.dtype)
    pointers = [Pointer(each.data_ptr() if each is not None else None) for each in (x, weight, bias, y)]
    numbers = [Int(kind), Int(kind), Long(rows), Long(features), Long(depth), Long(packing.group)]
    kernels.inlay_packed_linear(*pointers, *numbers, Int(packing.bits), Int(packing.zero), Int(way))
    return y


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("packing", FORMATS, ids=str)
@pytest.mark.parametrize("dtype", TYPES)
def test_linear(kernels: ctypes.CDLL, packing: Packing, way: str, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    for rows, features, depth in (
        (1, 52, 384),
        (2, 16, 128),
        (5, 40, 256),
        (16, 33, 128),
        (17, 48, 384),
        (70, 80, 128),
    ):
        weight, x, bias = (
            made(packing, features, depth),
            torch.randn(rows, depth).to(dtype),
            torch.randn(features).to(dtype),
        )
        exact = x.double() @ packing.unpack(weight, features).double().T
        for given in (None, bias):
            wanted = exact if given is None else exact + given.double()
            found = linear(kernels, x, weight, given, features, packing, WAYS[way]).double()
            # A byte of x is exact to half a 127th of the largest in 32, bfloat16 to half a 128th; sums cancel.
            assert ((found - wanted).norm() / wanted.norm()).item() < 1.5e-2, (rows, features, depth)


@pytest.mark.parametrize("packing", FORMATS, ids=str)
def test_bytes_that_are_exact(kernels: ctypes.CDLL, packing: Packing) -> None:
    """Where x is small whole numbers with a 127 in each 32, turning it into bytes loses nothing."""
    x = torch.randint(-20, 21, (3, 128)).float()
    x[:, ::32] = 127
    weight = made(packing, 24, 128)
    wanted = x @ packing.unpack(weight, 24).T
    found = linear(kernels, x, weight, None, 24, packing, WAYS["dot"])
    torch.testing.assert_close(found, wanted, rtol=2e-5, atol=2e-3)


def test_a_row_of_zeros(kernels: ctypes.CDLL) -> None:
    for packing in FORMATS:
        for way in WAYS.values():
            assert (linear(kernels, torch.zeros(2, 128), made(packing, 20, 128), None, 20, packing, way) == 0).all()


@pytest.mark.parametrize("packing", FORMATS, ids=str)
def test_embedding(kernels: ctypes.CDLL, packing: Packing) -> None:
    weight, tokens = made(packing, 40, 256), torch.tensor([[0, 17, 39], [16, 15, 3]])
    wanted = packing.unpack(weight, 40)[tokens]
    found = torch.empty(2, 3, 256)
    pointers = [Pointer(each.data_ptr()) for each in (weight, tokens, found)]
    numbers = [Int(0), Long(6), Long(48), Long(256), Long(packing.group), Int(packing.bits), Int(packing.zero)]
    kernels.inlay_packed_embedding(*pointers, *numbers)
    torch.testing.assert_close(found, wanted, rtol=1e-6, atol=1e-6)
    assert torch.equal(
        packed_embedding(weight, tokens, packing.bits, packing.zero, packing.group, torch.float32), wanted
    )


class Attention(ctypes.Structure):
    """As in attention.h."""

    _fields_ = (
        *((name, Pointer) for name in ("query",)),
        *((name, Long) for name in ("q_batch", "q_head", "q_row")),
        *((name, Pointer) for name in ("keys", "values", "slots", "lengths", "out")),
        *((name, Int) for name in ("q_type", "kv_type")),
        *((name, Long) for name in ("batch", "heads", "kv_heads", "length", "depth", "width", "room")),
        ("scale", Float),
        ("window", Long),
        ("softcap", Float),
        *((name, Pointer) for name in ("slopes", "sinks")),
        ("extra_type", Int),
    )


def attend(
    kernels: Any,
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    slots: torch.Tensor,
    lengths: torch.Tensor,
    scale: float,
    window: int,
    softcap: float,
    slopes: torch.Tensor | None,
    sinks: torch.Tensor | None,
) -> torch.Tensor:
    batch, heads, length, depth = query.shape
    out = torch.full((batch, length, heads, values.shape[3]), float("nan"), dtype=query.dtype)
    a = Attention()
    a.query, a.out = query.data_ptr(), out.data_ptr()
    a.q_batch, a.q_head, a.q_row, _ = query.stride()
    a.keys, a.values, a.slots, a.lengths = (each.data_ptr() for each in (keys, values, slots, lengths))
    a.q_type, a.kv_type = TYPES.index(query.dtype), TYPES.index(keys.dtype)
    a.batch, a.heads, a.kv_heads, a.length, a.depth = batch, heads, keys.shape[1], length, depth
    a.width, a.room, a.scale, a.window, a.softcap = values.shape[3], keys.shape[2], scale, window, softcap
    a.slopes, a.sinks = (None if each is None else each.data_ptr() for each in (slopes, sinks))
    kernels.inlay_cached_attention(ctypes.byref(a))
    return out.transpose(1, 2)


@pytest.mark.parametrize("held", TYPES)
@pytest.mark.parametrize(
    ("batch", "heads", "kv_heads", "depth", "width"),
    [(1, 9, 3, 64, 64), (3, 4, 4, 32, 48), (2, 8, 1, 128, 128), (2, 5, 5, 24, 40)],
)
def test_attention(
    kernels: ctypes.CDLL, level: str, batch: int, heads: int, kv_heads: int, depth: int, width: int, held: torch.dtype
) -> None:
    """Rows that were not filled are NaN: one that is read would show."""
    torch.manual_seed(0)
    room = 256
    for length in (1, 3, 17, 100):
        for before in (0, 130):
            for window, softcap, sloping, sinking in (
                (0, 0, 0, 0),
                (7, 0, 0, 0),
                (64, 5, 0, 1),
                (0, 0, 1, 0),
                (0, 5, 1, 1),
            ):
                query = torch.randn(batch, length, heads, depth).transpose(1, 2)
                keys, values = (torch.full((4, kv_heads, room, size), float("nan")).to(held) for size in (depth, width))
                slots = torch.randperm(4)[:batch]
                lengths = torch.tensor([max(0, before - index) for index in range(batch)])
                for slot, filled in zip(slots.tolist(), (lengths + length).tolist(), strict=True):
                    keys[slot, :, :filled] = torch.randn(kv_heads, filled, depth).to(held)
                    values[slot, :, :filled] = torch.randn(kv_heads, filled, width).to(held)
                slopes, sinks = torch.rand(heads) * 0.1 if sloping else None, torch.randn(heads) if sinking else None
                rest = (slots, lengths, depth**-0.5, window, float(softcap), slopes, sinks)
                wanted = cached_attention(query, keys, values, *rest)
                found = attend(kernels, query, keys, values, *rest)
                # Over a bfloat16 cache, queries and weights become bfloat16 where there are instructions for it.
                bound = 1e-2 if held == torch.bfloat16 and level != "portable" else 2e-5
                assert (found - wanted).abs().max() <= bound * wanted.abs().max(), (length, before)

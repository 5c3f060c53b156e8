"""The C++ kernels against their references: every way, every format, and for lesser processors."""

from __future__ import annotations

import ctypes
from typing import TYPE_CHECKING, Any

import pytest
import torch

from inlay.ops import native
from inlay.ops.cached_attention import cached_attention
from inlay.ops.packed_linear import packed_embedding, packed_linear
from inlay.ops.weight_layout import Packing, mixed_size, pack_mixed, read_mixed

if TYPE_CHECKING:
    from pathlib import Path

FORMATS = [Packing(4, -1), Packing(4, 8), Packing(8, 128), Packing(4, -1, 64), Packing(4, -1, 128), Packing(4, 8, 64)]
FORMATS += [Packing(5, 16), Packing(5, -1), Packing(4, -1, 256), Packing(5, -1, 256), Packing(6, 32, 256)]
FORMATS += [Packing(16, 0), Packing(32, 0)]
TYPES = [torch.float32, torch.bfloat16, torch.float16]
WAYS = {"dot": 1, "tiles of bytes": 2, "tiles of bfloat16": 3, "portable": 4}
Pointer, Int, Long, Float = ctypes.c_void_p, ctypes.c_int32, ctypes.c_int64, ctypes.c_float


@pytest.fixture(scope="module", params=["native", "portable"])
def level(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def kernels(level: str, tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    """Both levels end up in one process, where neither may take a function of the other."""
    file: Path = tmp_path_factory.mktemp("kernels") / native.LIBRARY_NAME
    native.install(file, level)
    torch.cpu._init_amx()
    return native.load(file)


def made(packing: Packing, features: int, depth: int) -> torch.Tensor:
    if packing.bits >= 16:
        return packing.pack(torch.randn(features, depth))
    q = torch.randint(0, 2**packing.bits, (features, depth))
    scale = torch.rand(features, depth // packing.group_size) * 0.1
    minimum = -torch.rand_like(scale) * 0.1 * 2 ** (packing.bits - 1) if packing.zero_point < 0 else None
    factors: list[torch.Tensor] = []
    if packing.factors:
        scale, shape = scale / 32, (features, depth // packing.group_size * packing.factors)
        factors = [torch.randint(-128 if minimum is None else 0, 128 if minimum is None else 64, shape).char()]
        if minimum is not None:
            minimum = minimum / 32
            factors.append(torch.randint(0, 64, shape).char())
    return packing.pack(q, scale, minimum, *factors)


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
    numbers = [Int(kind), Int(kind), Long(rows), Long(features), Long(depth), Long(packing.group_size)]
    assert not kernels.inlay_packed_linear(*pointers, *numbers, Int(packing.bits), Int(packing.zero_point), Int(way))
    return y


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("packing", FORMATS, ids=str)
@pytest.mark.parametrize("dtype", TYPES)
def test_linear(kernels: ctypes.CDLL, packing: Packing, way: str, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    for rows, features, columns in (
        (1, 52, 384),
        (2, 16, 128),
        (5, 40, 256),
        (16, 33, 128),
        (17, 48, 384),
        (70, 80, 128),
    ):
        depth = columns * 2 if packing.factors else columns  # whole groups of 256
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
    x = torch.randint(-20, 21, (3, 256)).float()
    x[:, ::32] = 127
    weight = made(packing, 24, 256)
    wanted = x @ packing.unpack(weight, 24).T
    found = linear(kernels, x, weight, None, 24, packing, WAYS["dot"])
    torch.testing.assert_close(found, wanted, rtol=2e-5, atol=2e-3)


def test_a_row_of_zeros(kernels: ctypes.CDLL) -> None:
    for packing in FORMATS:
        for way in WAYS.values():
            assert (linear(kernels, torch.zeros(2, 256), made(packing, 20, 256), None, 20, packing, way) == 0).all()


@pytest.mark.parametrize("packing", FORMATS, ids=str)
def test_embedding(kernels: ctypes.CDLL, packing: Packing) -> None:
    weight, tokens = made(packing, 40, 256), torch.tensor([[0, 17, 39], [16, 15, 3]])
    wanted = packing.unpack(weight, 40)[tokens]
    found = torch.empty(2, 3, 256)
    pointers = [Pointer(each.data_ptr()) for each in (weight, tokens, found)]
    numbers = [
        Int(0),
        Long(6),
        Long(40),
        Long(256),
        Long(packing.group_size),
        Int(packing.bits),
        Int(packing.zero_point),
    ]
    assert not kernels.inlay_packed_embedding(*pointers, *numbers)
    torch.testing.assert_close(found, wanted, rtol=1e-6, atol=1e-6)
    assert torch.equal(
        packed_embedding(weight, tokens, 40, packing.bits, packing.zero_point, packing.group_size, torch.float32),
        wanted,
    )


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("packing", FORMATS, ids=str)
def test_what_is_not_finite_goes_through(kernels: ctypes.CDLL, packing: Packing, way: str) -> None:
    """A row of x with one such number gives a row without finite ones; no other row changes."""
    torch.manual_seed(0)
    weight = made(packing, 32, 256)
    for rows in (1, 3, 17, 40):
        for strange in (float("nan"), float("inf"), -float("inf")):
            x = torch.randn(rows, 256)
            plain = linear(kernels, x, weight, None, 32, packing, WAYS[way])
            x[rows // 2, 77] = strange
            found = linear(kernels, x, weight, None, 32, packing, WAYS[way])
            wanted = x @ packing.unpack(weight, 32).T
            assert torch.equal(found.isfinite(), wanted.isfinite()), (rows, strange)
            assert torch.equal(found[found.isfinite()], plain[found.isfinite()])


@pytest.mark.parametrize("dtype", TYPES)
def test_numbers_at_the_ends_of_their_format(kernels: ctypes.CDLL, dtype: torch.dtype) -> None:
    """The smallest give what is next to nothing, large ones what is large: neither gives NaN."""
    packing = Packing(4, -1)
    weight = made(packing, 32, 128)
    large = torch.finfo(dtype).max ** 0.5 if dtype is torch.float16 else 1e30  # sums stay within the format
    for size in (torch.finfo(dtype).tiny, torch.finfo(dtype).smallest_normal / 4, large):
        x = torch.full((5, 128), size, dtype=dtype)
        wanted = x.double() @ packing.unpack(weight, 32).double().T
        for way in WAYS.values():
            found = linear(kernels, x, weight, None, 32, packing, way).double()
            assert found.isfinite().all() or not wanted.to(dtype).isfinite().all()
            # Where x becomes bytes, numbers below 4e-37 count as 0.
            assert ((found - wanted).abs() <= 0.05 * size * 128 + max(1e-35, torch.finfo(dtype).tiny)).all()


class Attention(ctypes.Structure):
    """As in attention.h."""

    _fields_ = (
        *((name, Pointer) for name in ("query",)),
        *((name, Long) for name in ("q_batch", "q_head", "q_row")),
        *((name, Pointer) for name in ("keys", "values", "slots", "lengths", "out")),
        *((name, Int) for name in ("q_type", "kv_type")),
        *((name, Long) for name in ("batch", "heads", "kv_heads", "length", "depth", "width", "room", "held")),
        ("scale", Float),
        ("window", Long),
        ("softcap", Float),
        *((name, Pointer) for name in ("slopes", "sinks")),
        *((name, Int) for name in ("slopes_type", "sinks_type", "tiled")),
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
    a.held, a.tiled = keys.shape[0], int(length >= 16)
    a.slopes, a.sinks = (None if each is None else each.data_ptr() for each in (slopes, sinks))
    assert not kernels.inlay_cached_attention(ctypes.byref(a))
    return out.transpose(1, 2)


@pytest.mark.parametrize("held", TYPES)
@pytest.mark.parametrize(
    ("batch", "heads", "kv_heads", "depth", "width"),
    [(1, 9, 3, 64, 64), (3, 4, 4, 32, 48), (2, 8, 1, 128, 128), (2, 5, 5, 24, 40)],
)
def test_attention(
    kernels: ctypes.CDLL, level: str, batch: int, heads: int, kv_heads: int, depth: int, width: int, held: torch.dtype
) -> None:
    """Rows that were not filled are NaN: one that is read would show. Without any, the end of the cache is reached."""
    torch.manual_seed(0)
    for length in (1, 3, 17, 100):
        room = 130 + length
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


@pytest.mark.parametrize("held", TYPES)
@pytest.mark.parametrize(("window", "length", "more"), [(64, 1, 0), (100, 17, 12), (300, 100, 1), (1000, 40, 65)])
def test_rings(kernels: ctypes.CDLL, level: str, window: int, length: int, more: int, held: torch.dtype) -> None:
    """Slots with the rows of a window and a call, and a few more; sequences that went through them several times."""
    torch.manual_seed(0)
    room = window + length - 1 + more
    bound = 1e-2 if held == torch.bfloat16 and level != "portable" else 2e-5
    for softcap, extras in ((0.0, False), (5.0, False), (0.0, True)):
        query = torch.randn(3, length, 4, 64).transpose(1, 2)
        keys, values = (torch.randn(4, 2, room, 64).to(held) for _ in range(2))
        lengths = torch.tensor([3 * room - length // 2, 5, 7 * room + 11])
        slopes, sinks = (torch.rand(4) * 1e-3, torch.randn(4)) if extras else (None, None)
        rest = (torch.randperm(4)[:3], lengths, 0.125, window, softcap, slopes, sinks)
        found = attend(kernels, query, keys, values, *rest)
        wanted = cached_attention(query, keys, values, *rest)
        assert (found - wanted).abs().max() <= bound * wanted.abs().max()


@pytest.mark.parametrize("held", TYPES)
@pytest.mark.parametrize("length", [1, 3, 40])
def test_attention_over_what_is_not_finite(kernels: ctypes.CDLL, length: int, held: torch.dtype) -> None:
    """A row is not finite where one of its scores or values is not, and rows that do not see those are as before."""
    torch.manual_seed(0)
    before, room, position = 50, 50 + length, 50 + length // 2
    query, keys, values = (torch.randn(1, 2, count, 32) for count in (length, room, room))
    keys, values = keys.to(held), values.to(held)
    slots, lengths = torch.tensor([0]), torch.tensor([before])
    rest = (slots, lengths, 0.2, 0, 0.0, None, None)
    plain = attend(kernels, query, keys, values, *rest)
    seen = torch.arange(before, room) >= position
    for strange in (float("nan"), float("inf"), -float("inf")):
        other = values.clone()
        other[0, 1, position, 5] = strange
        found = attend(kernels, query, keys, other, *rest)
        assert not found[0, 1, seen, 5].isfinite().any()
        found[0, 1, seen, 5] = plain[0, 1, seen, 5]
        # Over a bfloat16 cache, rows of a head with such values are computed one by one.
        torch.testing.assert_close(found, plain, rtol=2e-2, atol=2e-2)
        other = keys.clone()
        other[0, 1, position, 5] = strange
        found = attend(kernels, query, other, values, *rest)
        nothing = query[0, 1, :, 5] * strange < 0  # a score of -inf: the others count
        assert not found[0, 1, seen & ~nothing].isfinite().any()
        assert found[0, 1, ~seen | nothing].isfinite().all()
        assert torch.equal(found[0, 0], plain[0, 0])
        other = query.clone()
        other[0, 0, length // 2, 3] = strange
        found = attend(kernels, other, keys, values, *rest)
        assert not found[0, 0, length // 2].isfinite().any()
        found[0, 0, length // 2] = plain[0, 0, length // 2]
        assert torch.equal(found, plain)


def handle(tensor: torch.Tensor) -> tuple[Any, Any]:
    """A tensor as compiled pieces give it to a kernel, and what must live as long."""
    place = Pointer(tensor._cdata)
    return Pointer(ctypes.addressof(place)), place


def called(kernels: Any, level: str, name: str, *given: Any) -> torch.Tensor:
    """The result of a kernel on tensors; an error says why it refused."""
    kept = [handle(each) if isinstance(each, torch.Tensor) else (each, None) for each in given]
    result = Pointer()
    if getattr(kernels, f"inlay_{native.build_tag(level)}_{name}")(*(each for each, _ in kept), ctypes.byref(result)):
        raise IndexError(kernels.inlay_last_error().decode())
    capsule = ctypes.pythonapi.PyCapsule_New
    capsule.restype, capsule.argtypes = ctypes.py_object, [Pointer, ctypes.c_char_p, Pointer]
    (made,) = torch._C._aoti.alloc_tensors_by_stealing_from_void_ptrs([capsule(result, None, None)])
    return made


def test_tokens_outside_are_refused(kernels: ctypes.CDLL, level: str) -> None:
    """Also those that a weight has bytes for because its last block is not full."""
    packing = Packing(8, 128)
    weight = made(packing, 40, 64)
    numbers = [Long(each) for each in (40, 8, 128, 32)] + [Int(6)]
    for tokens in (torch.tensor([[0, 39]]), torch.empty(0, 3, dtype=torch.int64)):
        found = called(kernels, level, "packed_embedding", weight, tokens, *numbers)
        assert torch.equal(found, packed_embedding(weight, tokens, 40, 8, 128, 32, torch.float32))
    for token in (-1, 40, 47, 48, 10**6):
        tokens, sentence = torch.tensor([[3, token]]), f"token {token} at 1 is not from 0 to 39"
        with pytest.raises(IndexError, match=sentence):
            called(kernels, level, "packed_embedding", weight, tokens, *numbers)
        with pytest.raises(IndexError, match=sentence):
            packed_embedding(weight, tokens, 40, 8, 128, 32, torch.float32)


def mixed_weight(formats: list[Packing], size: int = 0) -> tuple[torch.Tensor, list[tuple[int, Packing]]]:
    parts = [(20 + 3 * index, packing) for index, packing in enumerate(formats)]
    packed = (made(packing, features, 512) for features, packing in parts)
    return pack_mixed(parts, 512, packed, max(size, mixed_size(parts, 512))), parts


def test_mixed_formats(kernels: ctypes.CDLL, level: str) -> None:
    """As compiled pieces call the kernel, with bytes to spare and without."""
    torch.manual_seed(0)
    for formats, size in (([*FORMATS[:3], *FORMATS[5:10]], 0), ([FORMATS[9]], 1 << 18), ([FORMATS[9], FORMATS[0]], 0)):
        weight, parts = mixed_weight(formats, size)
        assert read_mixed(weight) == (parts, 512, mixed_size(parts, 512))
        features = sum(count for count, _ in parts)
        bias = torch.randn(features)
        for rows in (1, 5, 40):
            x = torch.randn(rows, 512)
            wanted = packed_linear(x, weight, bias, features, 0, 0)
            given = handle(bias)
            numbers = [Long(each) for each in (features, 0, 0, 8, 16)]
            found = called(kernels, level, "packed_linear", x, weight, ctypes.byref(given[0]), *numbers)
            assert (found - wanted).norm() / wanted.norm() < 1.5e-2
    for given_x, short, sentence in (
        (torch.randn(2, 256), weight, "does not have these columns"),
        (x, weight[:-300], "fewer bytes than its parts"),
        (x, weight.view(1, -1), "a packed weight that is contiguous"),
    ):
        with pytest.raises(IndexError, match=sentence):
            called(kernels, level, "packed_linear", given_x, short, None, *numbers)


def test_slots_and_lengths_outside_are_refused(kernels: ctypes.CDLL, level: str) -> None:
    query, rows = torch.randn(2, 4, 3, 16), torch.randn(4, 2, 10, 16)
    numbers = (ctypes.c_double(0.25), Long(0), ctypes.c_double(0), None, None, Int(0))

    def both(slots: list[int], lengths: list[int], query: torch.Tensor = query) -> torch.Tensor:
        where = torch.tensor(slots, dtype=torch.int64), torch.tensor(lengths, dtype=torch.int64)
        found = called(kernels, level, "cached_attention", query, rows, rows, *where, *numbers)
        torch.testing.assert_close(found, cached_attention(query, rows, rows, *where, 0.25, 0, 0.0))
        return found

    both([3, 0], [7, 0])
    assert both([], [], query[:0]).shape == (0, 4, 3, 16)
    assert both([1, 2], [10, 0], query[:, :, :0]).shape == (2, 4, 0, 16)
    for slots, lengths, sentence in (
        ([0, -1], [0, 0], "slot -1 at 1 is not from 0 to 3"),
        ([4, 0], [0, 0], "slot 4 at 0 is not from 0 to 3"),
        ([0, 1], [-3, 0], "length -3 at 0 is not from 0 to 7"),
        ([0, 1], [0, 8], "length 8 at 1 is not from 0 to 7"),
    ):
        with pytest.raises(IndexError, match=sentence):
            both(slots, lengths)
        with pytest.raises(IndexError, match=sentence):
            cached_attention(query, rows, rows, torch.tensor(slots), torch.tensor(lengths), 0.25, 0, 0.0)


def test_tensors_that_do_not_fit_are_refused(kernels: ctypes.CDLL, level: str) -> None:
    packing = Packing(4, -1)
    weight, x = made(packing, 40, 64), torch.randn(3, 64)
    numbers = [Long(each) for each in (4, -1, 8, 16)]
    one, other = torch.randn(40), torch.randn(40).bfloat16()  # handles do not keep tensors
    bias, narrow = handle(one), handle(other)
    found = called(kernels, level, "packed_linear", x, weight, ctypes.byref(bias[0]), Long(40), *numbers)
    assert found.shape == (3, 40)
    assert called(kernels, level, "packed_linear", x[:0], weight, None, Long(40), *numbers).shape == (0, 40)
    for given, sentence in (
        ((x, weight, ctypes.byref(narrow[0]), Long(40)), "a bias in the number format of x"),
        ((x, weight, None, Long(60)), "the weight has not the shape"),
        ((torch.randn(3, 96), weight, None, Long(40)), "the weight has not the shape"),
        ((x.double(), weight, None, Long(40)), "wants x in float32, bfloat16 or float16"),
    ):
        with pytest.raises(IndexError, match=sentence):
            called(kernels, level, "packed_linear", *given, *numbers)

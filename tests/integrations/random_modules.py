"""Random small modules, and several sets of inputs for each: what people write, and what compilers get wrong.

A module is a list of blocks drawn by a seed. Each takes hidden values `[batch, length, WIDTH]` and what was given
beside them, and makes new ones; some write to caches, buffers, counters or the inputs, some keep a value to return.
"""

from __future__ import annotations

import copy
import random
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.nn import functional as F

if TYPE_CHECKING:
    from torch import Tensor

HEADS, HEAD, WIDTH, ROOM = 2, 8, 16, 24
DTYPES = (torch.float32, torch.float32, torch.bfloat16, torch.float16)


class Given:
    """What a block may read and write beside the hidden values."""

    def __init__(self, owner: Random, x: Tensor, inputs: dict[str, Any]) -> None:
        self.owner, self.x, self.inputs = owner, x, inputs
        self.kept: list[Any] = []


def _weight(rng: random.Random, *shape: int) -> nn.Parameter:
    generator = torch.Generator().manual_seed(rng.randrange(1 << 30))
    return nn.Parameter(torch.randn(shape, generator=generator) * shape[-1] ** -0.5)


class Block(nn.Module):
    """One step of a module; its draws are made when it is."""

    def __init__(self, rng: random.Random) -> None:
        super().__init__()
        self.kind = rng.randrange(1 << 16)
        self.draw(rng)

    def draw(self, rng: random.Random) -> None:
        """Weights and choices."""

    def forward(self, h: Tensor, given: Given) -> Tensor:
        raise NotImplementedError


# ---- norms, gates, projections


class Norm(Block):
    def draw(self, rng: random.Random) -> None:
        self.weight, self.bias = _weight(rng, WIDTH), _weight(rng, WIDTH)
        self.eps = rng.choice((1e-6, 1e-5, 0.1))

    def forward(self, h: Tensor, given: Given) -> Tensor:
        match self.kind % 6:
            case 0:
                return F.rms_norm(h, (WIDTH,), self.weight, self.eps)
            case 1:
                wide = h.float()
                wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.eps)
                return self.weight * wide.to(h.dtype)
            case 2:
                wide = h.to(torch.float32)
                wide = wide * torch.rsqrt(wide.square().mean(-1, True) + self.eps)
                return (wide * (1 + self.weight.float())).type_as(h)
            case 3:
                return F.layer_norm(h, (WIDTH,), self.weight, self.bias, self.eps)
            case 4:
                centred = h - h.mean(-1, keepdim=True)
                return centred / torch.sqrt(centred.pow(2).mean(-1, keepdim=True) + self.eps) * self.weight + self.bias
        total = h + given.x if h.shape == given.x.shape else h + h
        given.kept.append(total)
        return F.rms_norm(total, (WIDTH,), self.weight, self.eps)


class Gate(Block):
    def draw(self, rng: random.Random) -> None:
        self.gate, self.up, self.down = _weight(rng, 32, WIDTH), _weight(rng, 32, WIDTH), _weight(rng, WIDTH, 32)
        self.both = _weight(rng, 64, WIDTH)
        self.bias = _weight(rng, 32)

    def forward(self, h: Tensor, given: Given) -> Tensor:
        match self.kind % 5:
            case 0:
                return F.linear(F.silu(F.linear(h, self.gate)) * F.linear(h, self.up), self.down)
            case 1:
                return F.linear(F.gelu(F.linear(h, self.gate), approximate="tanh") * F.linear(h, self.up), self.down)
            case 2:
                gate, up = F.linear(h, self.both).chunk(2, -1)
                return F.linear(F.silu(gate) * up, self.down)
            case 3:
                gate, up = F.linear(h, self.both)[..., ::2], F.linear(h, self.both)[..., 1::2]
                gate, up = gate.clamp(max=7.0), up.clamp(-7.0, 7.0)
                return F.linear((up + 1) * (gate * torch.sigmoid(gate * 1.702)), self.down)
        return F.linear(torch.relu(F.linear(h, self.gate, self.bias)).square(), self.down) + h


class Mixed(Block):
    """Products that are no projection: einsum, a table, a short convolution, the best values."""

    def draw(self, rng: random.Random) -> None:
        self.weight, self.taps = _weight(rng, WIDTH, WIDTH), _weight(rng, WIDTH, 1, 3)

    def forward(self, h: Tensor, given: Given) -> Tensor:
        match self.kind % 6:
            case 0:
                return torch.einsum("bnd,de->bne", h, self.weight)
            case 1:
                ids = given.inputs["ids"]
                return h + F.embedding(ids % WIDTH, self.weight)
            case 2:
                padded = F.pad(h.transpose(1, 2), (2, 0))
                return F.conv1d(padded, self.taps, groups=WIDTH).transpose(1, 2) * h
            case 3:
                best = torch.softmax(h.float(), -1).topk(2, -1)
                given.kept.append(best.indices.sum(-1))
                return h * best.values.sum(-1, keepdim=True).to(h.dtype)
            case 4:
                return torch.where(h > 0, h, h * 0.5).cumsum(-1) * 0.1
        return torch.baddbmm(h, h, self.weight.expand(h.shape[0], WIDTH, WIDTH), beta=0.5)


# ---- attention


def _rotated(kind: int, t: Tensor, positions: Tensor) -> Tensor:
    frequencies = 1.0 / (100.0 ** (torch.arange(0, HEAD, 2, dtype=torch.float32) / HEAD))
    angles = positions[..., None].float() * frequencies
    if kind % 3 == 0:
        cos, sin = (each.to(t.dtype) for each in (angles.cos(), angles.sin()))
        even, odd = t[..., ::2], t[..., 1::2]
        return torch.stack([even * cos - odd * sin, even * sin + odd * cos], -1).flatten(-2)
    cos, sin = (torch.cat([each, each], -1).to(t.dtype) for each in (angles.cos(), angles.sin()))
    if kind % 3 == 1:
        cos, sin = cos.unsqueeze(0).unsqueeze(1), sin.unsqueeze(0).unsqueeze(1)
    turned = torch.cat([-t[..., HEAD // 2 :], t[..., : HEAD // 2]], -1)
    return t * cos + turned * sin


def _mask(kind: int, given: Given, length: int, dtype: torch.dtype) -> Any:
    rows, columns = torch.arange(length)[:, None], torch.arange(length)[None, :]
    match kind % 8:
        case 0:
            return columns <= rows
        case 1:
            return (columns <= rows) & (columns > rows - 3)
        case 2:
            return torch.full((length, length), float("-inf"), dtype=dtype).triu(1)
        case 3:
            return torch.where(columns <= rows, 0.0, torch.finfo(dtype).min).to(dtype)
        case 4:
            kept = given.inputs["mask"][:, None, None, :] | (columns == 0)
            return (columns <= rows) & kept
        case 5:
            return torch.ones(length, length, dtype=torch.bool).tril()
        case 6:
            return (columns < rows + 1.0) & (columns > rows - 2 - 2)
    return None


class Attention(Block):
    def draw(self, rng: random.Random) -> None:
        self.qkv, self.out = _weight(rng, (2 + 2 * rng.choice((1, 2))) * HEAD, WIDTH), _weight(rng, WIDTH, WIDTH)
        self.mask, self.rotary, self.way = rng.randrange(9), rng.randrange(5), rng.randrange(5)

    def forward(self, h: Tensor, given: Given) -> Tensor:
        batch, length, _ = h.shape
        q, rest = F.linear(h, self.qkv).split([WIDTH, self.qkv.shape[0] - WIDTH], -1)
        q = q.view(batch, length, HEADS, HEAD).transpose(1, 2)
        k, v = (each.reshape(batch, length, -1, HEAD).transpose(1, 2) for each in rest.chunk(2, -1))
        if self.rotary < 3:
            positions = torch.arange(length) if self.kind % 2 else given.inputs["positions"]
            q, k = _rotated(self.rotary, q, positions), _rotated(self.rotary, k, positions)
        grouped = k.shape[1] != HEADS
        if grouped and self.way != 4:
            repeats = HEADS // k.shape[1]
            k, v = k.repeat_interleave(repeats, 1), v[:, :, None].expand(-1, -1, repeats, -1, -1).flatten(1, 2)
        causal = self.mask == 8
        mask = None if causal else _mask(self.mask, given, length, h.dtype)
        if self.way < 2:
            scores = q @ k.transpose(-1, -2) * HEAD**-0.5
            if mask is not None:
                scores = scores.masked_fill(~mask, float("-inf")) if mask.dtype is torch.bool else scores + mask
            made = torch.softmax(scores, -1, dtype=torch.float32).to(v.dtype) @ v
        else:
            made = F.scaled_dot_product_attention(q, k, v, mask, is_causal=causal, enable_gqa=grouped and self.way == 4)
        return h + F.linear(made.transpose(1, 2).reshape(batch, length, WIDTH), self.out)


# ---- state


class Cache(Block):
    """Writes to a cache that is a buffer or an input, and reads it before or after."""

    rows: Tensor

    def draw(self, rng: random.Random) -> None:
        self.own, self.early = rng.random() < 0.5, rng.random() < 0.3
        self.register_buffer("rows", torch.zeros(4, ROOM, WIDTH))

    def forward(self, h: Tensor, given: Given) -> Tensor:
        batch, length, _ = h.shape
        cache = self.rows if self.own else given.inputs["cache"]
        early = cache[:batch].sum(1) if self.early else None
        at = given.inputs["positions"]
        match self.kind % 12:
            case 0:
                cache[:batch].index_copy_(1, at, h)
            case 1:
                cache[:batch, at] = h
            case 2:
                cache[:batch, :length] = h
            case 3:
                cache[:batch, 1 : 2 * length : 2][:, :length] += h[:, : cache[:batch, 1 : 2 * length : 2].shape[1]]
            case 4:
                cache[:batch].scatter_(1, at[None, :, None].expand(batch, length, WIDTH), h)
            case 5:
                cache[:batch].scatter_add_(1, at[None, :, None].expand(batch, length, WIDTH), h)
            case 6:
                cache.index_add_(1, at[:1], cache[:, :1] + 1)
            case 7:
                cache.copy_(cache.roll(1, 1))
            case 8:
                cache.mul_(0.5)
                cache[:batch, :length].add_(h)
            case 9:
                cache.masked_fill_(cache > 0.5, 0.25)
            case 10:
                cache.copy_(torch.cat([cache[:, length:], h.new_zeros(4, length, WIDTH)], 1)[:, :ROOM])
            case _:
                cache.transpose(0, 1)[at, :batch] = h.transpose(0, 1)
        late = cache[:batch, :length].mean(1, keepdim=True)
        return h + late if early is None else h + late + early.unsqueeze(1)


class Counter(Block):
    count: Tensor
    total: Tensor

    def draw(self, rng: random.Random) -> None:
        self.register_buffer("count", torch.zeros((), dtype=torch.int64))
        self.register_buffer("total", torch.zeros(WIDTH))

    def forward(self, h: Tensor, given: Given) -> Tensor:
        self.count += 1
        if self.kind % 3 == 0:
            given.kept.append(self.count)
        if self.kind % 2:
            self.total.mul_(0.9).add_(h.detach().sum((0, 1)), alpha=0.1)
            return h + self.total
        return h * self.count.to(h.dtype)


# ---- shapes, writes to what was computed, numbers, and what changes nothing


class Shape(Block):
    def forward(self, h: Tensor, given: Given) -> Tensor:
        batch, length, width = h.shape
        match self.kind % 12:
            case 0:
                return h.transpose(1, 2).contiguous().transpose(1, 2)
            case 1:
                return h.reshape(batch * length, width).view(batch, length, width)
            case 2:
                return torch.cat([h[..., width // 2 :], h[..., : width // 2]], -1)
            case 3:
                return torch.stack(h.unbind(-1), -1)
            case 4:
                return h.flip(1) + h[:, :1] if length else h
            case 5:
                return h + h.mean(1, keepdim=True).expand(-1, length, -1) if length else h
            case 6:
                return torch.cat([h[:, :0], h], 1)
            case 7:
                heads = h.unflatten(-1, (HEADS, HEAD)).permute(0, 2, 1, 3).reshape(batch, HEADS, length, HEAD)
                return heads.sum(1).repeat(1, 1, 2)
            case 8:
                first, *others = h.split(5, -1)
                return torch.cat([*others, first * 2], -1)
            case 9:
                return h.as_strided(h.shape, h.stride(), h.storage_offset()) * 1.5
            case 10:
                given.kept += [length, h.shape, h[:, -1:] if length else h]
                return h * length
        return h[:, torch.arange(length - 1, -1, -1)]


class Write(Block):
    """Writes to values of its own, to inputs, to views of both."""

    def forward(self, h: Tensor, given: Given) -> Tensor:
        mine = h * 2 if self.kind % 2 else h.clone()
        match self.kind % 11:
            case 0:
                mine.add_(1)
            case 1:
                mine[:, :1] = 0
            case 2:
                mine.transpose(1, 2)[:, 3:5].mul_(3)
            case 3:
                mine.masked_fill_(mine > 1, 0.5)
                mine.relu_()
            case 4:
                given.x.mul_(1.5)
                return h + given.x if h.shape == given.x.shape else h
            case 5:
                given.inputs["cache"][0].add_(1)
                return h + given.inputs["cache"].mean()
            case 6:
                before = mine.sum()
                mine.zero_()
                return mine + before
            case 7:
                part = mine[..., 2:6]
                mine.sigmoid_()
                return mine + part.sum(-1, keepdim=True)
            case 8:
                given.kept.append(mine[:, :1])
                mine += 1
            case 9:
                mine.copy_(mine.flip(-1))
                mine[..., ::2] = mine[..., 1::2]
            case _:
                given.inputs["cache"].copy_(given.inputs["cache"].flip(0))
        return mine


class Number(Block):
    def forward(self, h: Tensor, given: Given) -> Tensor:
        scale, steps, flag = (given.inputs[name] for name in ("scale", "steps", "flag"))
        match self.kind % 7:
            case 0:
                return h * scale
            case 1:
                return h[..., :steps].repeat(1, 1, WIDTH // steps) if WIDTH % steps == 0 else h + steps
            case 2:
                return h + 1 if flag else h - 1
            case 3:
                for _ in range(steps):
                    h = h * 0.9
                return h
            case 4:
                return h / (h.shape[1] + 1) ** 0.5
            case 5:
                return h + torch.tensor([scale, 2.0], dtype=h.dtype).sum()
        return torch.clamp(h, -scale, scale)


class Nothing(Block):
    """What changes nothing, or nearly."""

    def forward(self, h: Tensor, given: Given) -> Tensor:
        match self.kind % 8:
            case 0:
                return (h + 0) * 1.0
            case 1:
                return h.to(h.dtype)[:, :].contiguous()
            case 2:
                return F.dropout(h, 0.3, training=False)
            case 3:
                return h.transpose(1, 2).transpose(2, 1)
            case 4:
                return h.detach().clone()
            case 5:
                return h.double().to(h.dtype)
            case 6:
                return h.view_as(h) - 0
        return h.expand_as(h)


class Mode(Block):
    """Regions, branches, breaks."""

    def draw(self, rng: random.Random) -> None:
        self.weight = _weight(rng, WIDTH, WIDTH)

    def forward(self, h: Tensor, given: Given) -> Tensor:
        match self.kind % 7:
            case 0:
                with torch.autocast("cpu", dtype=torch.bfloat16):
                    return F.linear(h, self.weight).to(h.dtype)
            case 1:
                with torch.no_grad():
                    return F.linear(h, self.weight)
            case 2:
                with torch.enable_grad():
                    return F.linear(h, self.weight)
            case 3:
                h = h * torch.rsqrt(h.pow(2).mean(-1, keepdim=True) + 1e-6)
                torch._dynamo.graph_break()
                return self.weight[0] * h
            case 4:
                return torch.cond(h.sum() > 0, lambda v: F.silu(v) * (v + 1), lambda v: v - 1, (h,))
            case 5:
                with torch.autocast("cpu", enabled=False):
                    return F.silu(h) * (h + 1)
        return F.silu(h) * F.linear(h, self.weight) if h.shape[0] > 1 else h + 1


BLOCKS: tuple[type[Block], ...] = (
    *(Norm, Norm, Gate, Gate, Attention, Attention, Attention, Mixed, Cache, Cache),
    *(Counter, Shape, Shape, Write, Write, Number, Nothing, Nothing, Mode),
)


class Random(nn.Module):
    """Blocks in a row, and one of several ways of returning."""

    def __init__(self, rng: random.Random) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(rng.choice(BLOCKS)(rng) for _ in range(rng.randrange(1, 6)))
        self.returns = rng.randrange(9)

    def forward(self, x: Tensor, **inputs: Any) -> Any:
        given = Given(self, x, inputs)
        h = x
        for block in self.blocks:
            h = block(h, given)
        match self.returns:
            case 0 | 1:
                return h
            case 2:
                return h, h
            case 3:
                return {"h": h, "x": x, "kept": given.kept}
            case 4:
                return h, x[:, :1], None
            case 5:
                return [h, h[..., :4], h.transpose(1, 2)]
            case 6:
                return h, inputs["cache"], h.shape[0]
            case 7:
                return (*given.kept, h)
        return h, inputs["cache"][0], inputs["scale"]


@dataclass(frozen=True)
class Drawn:
    """A module and the sets of inputs it is called with, one after the other."""

    seed: int
    model: Random
    sets: list[dict[str, Any]]
    dtype: torch.dtype
    dynamic: bool | None
    trained: bool
    """Whether it is called with gradients on."""

    def __str__(self) -> str:
        blocks = ", ".join(f"{type(each).__name__}({each.kind})" for each in self.model.blocks)
        shapes = " ".join(str(tuple(each["x"].shape[:2])) for each in self.sets)
        dtype = str(self.dtype).removeprefix("torch.")
        return f"seed {self.seed}: {dtype}, dynamic={self.dynamic}, {shapes}, returns {self.model.returns}: {blocks}"


def _inputs(rng: random.Random, batch: int, length: int, dtype: torch.dtype, numbers: dict[str, Any]) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(rng.randrange(1 << 30))

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator).to(dtype)

    x = normal(batch, length, WIDTH)
    match rng.randrange(8):
        case 0:
            x = normal(batch, WIDTH, length).transpose(1, 2)
        case 1:
            x = normal(batch + 1, length, WIDTH)[1:]
        case 2:
            x = normal(batch, length, 2 * WIDTH)[..., ::2]
    cache = normal(4, ROOM, WIDTH)
    if rng.random() < 0.1 and batch <= 4 and length:
        x = cache[:batch, :length]  # it is a part of the cache
    return {
        "x": x,
        "mask": torch.rand(batch, length, generator=generator) > 0.3,
        "positions": torch.randperm(ROOM, generator=generator)[:length],
        "ids": torch.randint(0, 99, (batch, length), generator=generator),
        "cache": cache,
        **numbers,
    }


def _sizes(rng: random.Random) -> list[tuple[int, int]]:
    sizes = [(rng.choice((1, 2, 2, 3, 4)), rng.choice((1, 2, 5, 7, 12))) for _ in range(2)]
    if rng.random() < 0.4:
        sizes.append((rng.choice((0, 1, 2)), rng.choice((0, 1, 1, 3))))
    return sizes


def draw(seed: int) -> Drawn:
    """A module that eager runs, by its seed."""
    rng = random.Random(seed)
    while True:
        model = Random(rng)
        dtype, dynamic = rng.choice(DTYPES), rng.choice((None, False, True, True))
        numbers = {"scale": rng.choice((0.5, 1.0, 3.0)), "steps": rng.choice((1, 2, 4, 5)), "flag": rng.random() < 0.5}
        sets = []
        for batch, length in _sizes(rng):
            if rng.random() < 0.2:
                numbers = numbers | {"scale": rng.random() + 0.5, "steps": rng.choice((1, 2, 3))}
            sets.append(_inputs(rng, batch, length, dtype, numbers))
        drawn = Drawn(seed, model.to(dtype), sets, dtype, dynamic, rng.random() < 0.1)
        if _runs(drawn):
            return drawn


def _runs(drawn: Drawn) -> bool:
    try:
        with torch.no_grad():
            for given in drawn.sets:
                copy.deepcopy(drawn.model)(**copy.deepcopy(given))
    except (RuntimeError, IndexError, ValueError):
        return False
    return True

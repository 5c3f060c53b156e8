"""Every canonical operator: torch's own checks of schema, fake kernel, autograd and dynamic tracing."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.testing._internal.optests.generate_tests import OpCheckError

import inlay.ops  # noqa: F401 - registers the operators
from inlay.ops.registration import DECOMPOSITIONS

pytestmark = pytest.mark.fast
inlay_ops: Any = torch.ops.inlay


def _x(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(0))


HEADS = (_x(2, 4, 5, 8), _x(2, 2, 5, 8), _x(2, 2, 5, 8))
SAMPLES: dict[str, list[tuple[Any, ...]]] = {
    "rms_norm": [
        (_x(2, 3, 8), _x(8), 1e-5, 0.0, True),
        (_x(3, 8).bfloat16(), _x(8).bfloat16(), 1e-5, 1.0, False),
    ],
    "add_rms_norm": [(_x(2, 3, 8), _x(2, 3, 8), _x(8), 1e-5, 0.0, True)],
    "rope": [(_x(2, 3, 5, 8), _x(5, 8), _x(5, 8))],
    "rope_interleaved": [(_x(2, 3, 5, 8), _x(5, 8), _x(5, 8))],
    "swiglu": [(_x(2, 8), _x(2, 8))],
    "geglu": [(_x(2, 8), _x(2, 8), "none"), (_x(2, 8), _x(2, 8), "tanh")],
    "clamped_swiglu": [(_x(2, 8), _x(2, 8), 1.7, 0.5)],
    "gated_short_conv": [(_x(2, 5, 12), _x(4, 1, 3))],
    "attention": [
        (*HEADS, None, 0.3, True, 0, 0.0),
        (*HEADS, None, 0.3, True, 3, 20.0),
        (*HEADS, _x(2, 1, 5, 5), 0.3, False, 0, 0.0, {"sinks": _x(4)}),
        (*HEADS, _x(2, 1, 5, 5) > 0, 0.3, False, 0, 20.0, {"slopes": _x(4, 1, 1)}),
        (*HEADS, None, 0.3, False, 0, 0.0, {"slopes": _x(4), "sinks": _x(4)}),
        (*HEADS, _x(2, 1, 5, 5), 0.3, False, 0, 0.0, {"zero_rows": False}),
    ],
}


def test_every_operator_has_samples() -> None:
    ours = {each.name() for each, function in DECOMPOSITIONS.items() if function.__module__.startswith("inlay.")}
    assert ours == {f"inlay::{name}" for name in SAMPLES}


@pytest.mark.parametrize(
    ("name", "args"),
    [(name, args) for name, samples in SAMPLES.items() for args in samples],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_opcheck(name: str, args: tuple[Any, ...]) -> None:
    options = args[-1] if isinstance(args[-1], dict) else {}
    torch.library.opcheck(getattr(inlay_ops, name).default, args[: len(args) - bool(options)], options)


def test_a_wrong_fake_kernel_is_found() -> None:
    """opcheck can fail."""

    @torch.library.custom_op("inlay_test::halved", mutates_args=())
    def halved(x: torch.Tensor) -> torch.Tensor:
        return x[::2].clone()

    halved.register_fake(torch.empty_like)
    with pytest.raises(OpCheckError):
        torch.library.opcheck(torch.ops.inlay_test.halved.default, (torch.ones(4),))


def test_alibi_adds_a_slope_a_head() -> None:
    query, slopes = _x(1, 2, 6, 8), torch.tensor([0.5, 0.25])
    positions = torch.arange(6)
    bias = slopes.view(1, 2, 1, 1) * (positions[None, :] - positions[:, None])  # as published: relative, not absolute
    hidden = torch.full((6, 6), float("-inf")).triu(1)
    scores = query @ query.transpose(2, 3) * 0.3 + bias + hidden
    expected = torch.softmax(scores, -1) @ query
    actual = inlay_ops.attention(query, query, query, None, 0.3, True, 0, 0.0, slopes=slopes)
    torch.testing.assert_close(actual, expected)


def test_sinks_take_their_share() -> None:
    query, sinks = _x(1, 2, 6, 8), torch.tensor([1.0, -2.0])
    exponents = torch.exp(query @ query.transpose(2, 3) * 0.3)
    weights = exponents / (exponents.sum(-1, keepdim=True) + torch.exp(sinks).view(1, 2, 1, 1))
    actual = inlay_ops.attention(query, query, query, None, 0.3, False, 0, 0.0, sinks=sinks)
    torch.testing.assert_close(actual, weights @ query)

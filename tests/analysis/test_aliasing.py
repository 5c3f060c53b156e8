"""What may share storage, where little is known: the answer is yes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import fx

from inlay.analysis.aliasing import Aliases, byte_range, is_non_overlapping, may_overlap
from inlay.program.program import Symbol
from inlay.program.symbols import FakeValues

pytestmark = pytest.mark.fast


@pytest.mark.parametrize("value", [3, None, torch.eye(2).to_sparse()], ids=["a number", "nothing", "a sparse tensor"])
def test_what_has_no_storage_spans_no_bytes(value: Any) -> None:
    assert byte_range(value) is None


def test_sizes_that_are_not_numbers() -> None:
    value = FakeValues([Symbol("batch", 1, None, 4)]).tensor(torch.float32, ("batch", 4))
    assert byte_range(value) is None
    assert may_overlap(byte_range(value), byte_range(torch.empty(2)))
    assert not is_non_overlapping(value)
    assert is_non_overlapping(torch.empty(3, 4))


@pytest.mark.parametrize("known", [True, False])
def test_a_conversion_of_what_states_no_value(known: bool) -> None:
    """It may convert nothing, and give what it was given."""
    graph = fx.Graph()
    x = graph.placeholder("x")
    converted = graph.call_function(torch.ops.prims.convert_element_type.default, (x, torch.float64))
    if known:
        x.meta["val"], converted.meta["val"] = torch.empty(2), torch.empty(2, dtype=torch.float64)
    assert Aliases(graph, {}).may_share(x, converted) is not known

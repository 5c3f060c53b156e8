"""Recommendations for candidates: an existing kernel before a new one; defer where a measurement decides."""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import StrEnum
from typing import TYPE_CHECKING

from inlay.insight.candidates.op_kinds import FUSIBLE, OpKind, op_kind
from inlay.ops.catalog import KernelEntry, lookup
from inlay.ops.catalog.source_tree import TreeEntry, entries_for
from inlay.transforms import registry

if TYPE_CHECKING:
    from collections.abc import Sequence

    from inlay.insight.candidates.region import FusionRegion

_CODE = "inlay.testing.generated_code shows"


class Recommendation(StrEnum):
    """The recommended action."""

    USE_EXISTING = "use_existing_kernel"
    TRITON = "needs_triton_fallback"
    DEFER = "defer"


class Support(StrEnum):
    """Whether a kernel exists, best first."""

    CALLABLE = "callable here"
    EXISTING = "exists elsewhere"
    NONE = "must be written"


@dataclass(frozen=True)
class Advice:
    """Existing kernels, the recommendation, and its strengths, weaknesses and risks."""

    kernels: tuple[KernelEntry, ...]
    recommendation: Recommendation
    strengths: str
    weaknesses: str
    risks: str
    support: Support = Support.NONE
    tree: tuple[TreeEntry, ...] = ()
    """Entries of the searched source trees that have the name of the operation."""

    @property
    def lookup(self) -> str:
        """`found` or `not_found`."""
        return "found" if self.kernels else "not_found"

    @property
    def evidence(self) -> str:
        """Path and symbol of the first kernel, or the sources that were searched."""
        if not self.kernels:
            return "inlay/ops/catalog:lookup (ATen, oneDNN, quantized, inlay, Inductor, packages, upstream)"
        first = self.kernels[0]
        also = ", ".join(entry.name for entry in self.kernels[1:4])
        return first.evidence + (f"; also {also}" if also else "")


def advise(region: FusionRegion, dtype: str, entries: Sequence[TreeEntry] = ()) -> Advice:
    """Return the advice for a region of this dtype, with the entries of source trees that have its name."""
    advice = _advise_from_catalog(region, dtype)
    operation = region.catalog_keys[0]
    is_specific = region.replacement is not None or "+" in operation
    tree = tuple(entries_for(operation, entries)) if is_specific else ()
    if tree and not advice.kernels:
        check = f"only the name matches; read {tree[0].evidence} and compare what it computes"
        strength = f"{tree[0].name} may compute it"
        advice = Advice((), Recommendation.DEFER, strength, "not callable here", check)
    usable = advice.kernels and advice.kernels[0].is_usable(dtype)
    support = Support.CALLABLE if usable else Support.EXISTING if advice.kernels or tree else Support.NONE
    return replace(advice, support=support, tree=tree)


def _advise_from_catalog(region: FusionRegion, dtype: str) -> Advice:
    found = tuple(lookup(region.catalog_keys, dtype))
    if not found:
        return _nothing(region)
    first = found[0]
    if first.is_usable(dtype):
        return _use(found)
    strength = f"{first.name} computes it; no new kernel is needed"
    if first.is_available:
        weakness = f"it supports {' and '.join(first.dtypes)}, not {dtype} ({first.conditions})"
        settle = f"build in {first.dtypes[0]}; {_CODE} whether it is called"
    else:
        weakness = f"it is not installed ({first.conditions})"
        settle = f"install {first.source} on a supported machine and compare its time with Inductor's kernel"
    return Advice(found, Recommendation.DEFER, strength, weakness, f"not measured; {settle}")


def _use(found: tuple[KernelEntry, ...]) -> Advice:
    first = found[0]
    if first.transform and first.transform in registry():
        cls = registry()[first.transform]
        numbers = {"exact": "results stay the same", "rounding": "results change by rounding"}
        how = f"the transform {first.transform} inserts it: --set {first.transform}.enabled=true"
        risk = numbers.get(cls.numerics.value, "results change")
    elif first.source == "inductor":
        how, risk = "Inductor fuses it in a build", f"a custom operator in between prevents this; {_CODE} it"
    elif first.source == "onednn":
        how, risk = "Inductor inserts it when weights are frozen", f"not in every build; {_CODE} it"
    else:
        how, risk = (
            "no transform inserts it yet; --scaffold writes a first version",
            "that transform must check the conditions",
        )
    weakness = first.conditions or "none known"
    return Advice(found, Recommendation.USE_EXISTING, how, weakness, risk)


def _nothing(region: FusionRegion) -> Advice:
    parts = [entry for node in region.kernels for entry in lookup([f"{node.target}".split(".")[1]])]
    partly = f"; {parts[0].name} computes part of it ({parts[0].conditions})" if parts else ""
    works = {op_kind(node) for node in region.kernels}
    if works == {OpKind.COPY}:
        settle = f"compile it; {_CODE} whether the copy remains"
        return Advice((), Recommendation.DEFER, "views cost nothing", "its consumer must accept strides", settle)
    if works <= FUSIBLE and region.catalog_keys[-1] != "mixed reductions":
        return Advice(
            (),
            Recommendation.TRITON,
            "only loads, arithmetic and stores, so that one kernel is simple",
            f"a kernel to maintain{partly}",
            "not timed without a GPU; the CPU runs the reference",
        )
    if works <= FUSIBLE:
        settle = f"compile it alone; {_CODE} whether Inductor generates one kernel"
        return Advice((), Recommendation.DEFER, "Inductor may fuse it", "reductions over different rows", settle)
    heavy = "attention" if OpKind.ATTENTION in works else "a GEMM"
    return Advice(
        (),
        Recommendation.DEFER,
        "the intermediate value would stay in registers",
        f"requires a new kernel for {heavy} that is as fast as the library's{partly}",
        "decide after --measure, which reports the time outside the library's kernel",
    )

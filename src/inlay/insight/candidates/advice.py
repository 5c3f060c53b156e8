"""What to do about a candidate: an existing kernel before a new one, and no guess where one more look would tell."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING

from inlay.insight.candidates.op_kinds import FUSIBLE, OpKind, op_kind
from inlay.ops.catalog import KernelEntry, lookup
from inlay.transforms import registry

if TYPE_CHECKING:
    from inlay.insight.candidates.region import FusionRegion

_CODE = "inlay.testing.generated_code shows"


class Recommendation(StrEnum):
    """What to do."""

    USE_EXISTING = "use_existing_kernel"
    TRITON = "needs_triton_fallback"
    DEFER = "defer"


@dataclass(frozen=True)
class Advice:
    """What the catalog knows, what to do, and what speaks for and against it."""

    kernels: tuple[KernelEntry, ...]
    recommendation: Recommendation
    strengths: str
    weaknesses: str
    risks: str

    @property
    def lookup(self) -> str:
        """`found` or `not_found`."""
        return "found" if self.kernels else "not_found"

    @property
    def evidence(self) -> str:
        """Path and symbol of the kernel to look at first, or what was looked through."""
        if not self.kernels:
            return "inlay/ops/catalog:lookup (ATen, oneDNN, quantized, inlay, Inductor, packages, upstream)"
        first = self.kernels[0]
        also = ", ".join(entry.name for entry in self.kernels[1:4])
        return first.evidence + (f"; also {also}" if also else "")


def advise(region: FusionRegion, dtype: str) -> Advice:
    """What to do about a region of this dtype."""
    found = tuple(lookup(region.catalog_keys, dtype))
    if not found:
        return _nothing(region)
    first = found[0]
    if first.is_usable(dtype):
        return _use(found)
    strength = f"{first.name} computes it: nobody need write it"
    if first.is_available:
        weakness = f"it works in {' and '.join(first.dtypes)}, and this is {dtype} ({first.conditions})"
        settle = f"a build in {first.dtypes[0]} settles it: {_CODE} whether it is called"
    else:
        weakness = f"it is not installed here ({first.conditions})"
        settle = f"install {first.source} where it runs, and measure it beside what Inductor makes"
    return Advice(found, Recommendation.DEFER, strength, weakness, f"not measured; {settle}")


def _use(found: tuple[KernelEntry, ...]) -> Advice:
    first = found[0]
    if first.transform and first.transform in registry():
        cls = registry()[first.transform]
        numbers = {"exact": "the numbers stay the same", "rounding": "the rounding changes"}
        how = f"the transform {first.transform} puts it in: --set {first.transform}.enabled=true"
        risk = numbers.get(cls.numerics.value, "the numbers change")
    elif first.source == "inductor":
        how, risk = "Inductor fuses it by itself in a build", f"a custom operator in between undoes it; {_CODE} that"
    elif first.source == "onednn":
        how, risk = "Inductor puts it in by itself when weights are frozen", f"not in every build; {_CODE} it"
    else:
        how, risk = (
            "no transform puts it in yet: --scaffold starts one",
            "conditions have to be checked by that transform",
        )
    weakness = first.conditions or "none known"
    return Advice(found, Recommendation.USE_EXISTING, how, weakness, risk)


def _nothing(region: FusionRegion) -> Advice:
    parts = [entry for node in region.kernels for entry in lookup([f"{node.target}".split(".")[1]])]
    partly = f"; {parts[0].name} computes a part of it ({parts[0].conditions})" if parts else ""
    works = {op_kind(node) for node in region.kernels}
    if works == {OpKind.COPY}:
        settle = f"one dump of the compiled code settles it: {_CODE} whether the copy is still there"
        return Advice((), Recommendation.DEFER, "views cost nothing", "its reader must take strides", settle)
    if works <= FUSIBLE and region.catalog_keys[-1] != "mixed reductions":
        return Advice(
            (),
            Recommendation.TRITON,
            "nothing but loads, arithmetic and stores: one kernel is simple",
            f"a kernel to keep{partly}",
            "not timed without a GPU; the CPU keeps the reference",
        )
    if works <= FUSIBLE:
        settle = f"compile it alone: {_CODE} whether Inductor makes one kernel of it"
        return Advice((), Recommendation.DEFER, "Inductor may fuse it", "reductions over different rows", settle)
    heavy = "attention" if OpKind.ATTENTION in works else "a GEMM"
    return Advice(
        (),
        Recommendation.DEFER,
        "the value in between would stay in registers",
        f"it means writing {heavy} again, which must not be slower than the library's{partly}",
        "--measure says how much of its time is not the library's own; decide after that",
    )

"""Times the kernel choices that a package contains again, and tells what autotune on this machine would change."""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any

import torch

from inlay.bench.metrics import percentile
from inlay.lowering import kernel_choice
from inlay.lowering.buckets import measured_kernels
from inlay.ops.weight_layout import Packing

if TYPE_CHECKING:
    from collections.abc import Callable

    from inlay.package.manifest import Manifest


@dataclass(frozen=True)
class KernelProbe:
    """A linear layer of a bucket at one number of rows: the kernel in the package, and the choice of autotune."""

    bucket: str
    features: int
    depth: int
    bits: int
    rows: int
    recorded: str
    tuned: str
    p50_us: dict[str, float]
    """Kernel → median of its calls in microseconds."""
    p99_us: dict[str, float]

    @property
    def gain(self) -> float:
        """How much faster the choice of autotune is, as a ratio of medians; 1 if it is the same kernel."""
        return self.p50_us[self.recorded] / self.p50_us[self.tuned]

    def to_json(self) -> dict[str, Any]:
        """Return the probe as JSON."""
        return asdict(self) | {"gain": self.gain}


def probe_kernels(manifest: Manifest, on_step: Callable[[str], None] = lambda _: None) -> list[KernelProbe]:
    """Time every recorded choice again, on random inputs in bfloat16, and choose by the rule of a build."""
    found = []
    for (bucket, features, depth, bits), row in measured_kernels(manifest.buckets).items():
        on_step(f"timing {bucket}, {features} × {depth}")
        packing = Packing(bits, row.zero, row.group)
        counts = sorted(map(int, row.timings))
        samples = kernel_choice.sample_kernels(features, depth, packing, torch.bfloat16, counts)
        fastest = {count: {name: min(each) for name, each in took.items()} for count, took in samples.items()}
        singly, tiled = kernel_choice.thresholds(fastest, bits)
        tuned = replace(row, dot_rows=singly, tiles8_rows=tiled)
        for count, took in samples.items():
            p50, p99 = (
                {name: round(percentile(each, share) * 1e6, 1) for name, each in took.items()} for share in (0.5, 0.99)
            )
            variants = row.variant(count), tuned.variant(count)
            found.append(KernelProbe(bucket, features, depth, bits, count, *variants, p50, p99))
    return found

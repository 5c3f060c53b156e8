"""Running programs: below `torch.compile`, eagerly or through Inductor."""

from inlay.compile.torch_compile import Compiled, inlay

__all__ = ["Compiled", "inlay"]

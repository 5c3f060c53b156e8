"""Running programs: compiled by an engine, or below `torch.compile`."""

from inlay.compile.program import CompiledProgram, compile_program
from inlay.compile.torch_compile import Compiled, inlay

__all__ = ["Compiled", "CompiledProgram", "compile_program", "inlay"]

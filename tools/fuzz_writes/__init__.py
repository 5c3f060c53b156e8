"""Fuzzer of `fix_functionalization`: random graphs with writes and shared storage must keep their results and effects.

    python -m tools.fuzz_writes --graphs 1000 --seed 0

`operators` contains the mutating operators, `grow` generates a graph of wrapped calls, views, copies and in-place
calls, `check` runs it before and after `fix_functionalization`, compares every byte and reduces a failure.
"""

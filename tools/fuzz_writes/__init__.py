"""Random graphs that write and share storage; what they compute and what they leave behind must stay what it was.

    python -m tools.fuzz_writes --graphs 1000 --seed 0

`operators` are the mutating operators, `grow` makes a graph of wrapped calls, views, copies and in-place calls, `check`
runs it before and after `fix_functionalization`, compares every byte and makes a failure small.
"""

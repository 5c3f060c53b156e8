"""Fuzzer: random programs around the patterns of every transform; results before and after must agree.

    python -m inlay.testing.fuzz --graphs 1000 --seed 0

`templates` contains the graphs of sites, `generator` combines sites into a program and mutates some, `checker` runs
every transform and compares results, `reducer` reduces a failing program.
"""

"""Random programs grown around the patterns of every transform; numbers before and after must agree.

    python -m inlay.testing.fuzz --graphs 1000 --seed 0

`templates` says what a place looks like, `grow` puts places into a graph and spoils some, `check` runs every transform
and compares, `reduce` makes a failure small enough to read.
"""

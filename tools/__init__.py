"""Tools for maintainers, not part of the wheel: replay, write fuzzer, condition deletion, benchmarks."""

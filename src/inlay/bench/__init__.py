"""Benchmarks a package against its roofline and against other systems; contestants take turns in one run."""

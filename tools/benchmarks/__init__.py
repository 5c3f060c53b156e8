"""Benchmark scripts; docs/benchmarks.md describes how to run them."""

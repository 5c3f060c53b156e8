"""Clusters under load and under failures: `python -m tools.benchmarks.cluster SCENARIO PACKAGE`."""

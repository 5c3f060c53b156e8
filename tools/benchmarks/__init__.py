"""What is measured, and the scripts that measure it. docs/benchmarks.md says how they are run."""

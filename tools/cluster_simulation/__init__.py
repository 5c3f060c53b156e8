"""A simulator of a cluster of serving replicas in virtual time. See docs/dev/simulation.md."""

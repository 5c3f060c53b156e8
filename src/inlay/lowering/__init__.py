"""Lower a transformed program to running code: partitioning, backends, compiled libraries, execution."""

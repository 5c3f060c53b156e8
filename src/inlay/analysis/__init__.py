"""Analyses of a program: aliasing, state updates, liveness, the sequence axis, masks. They change nothing."""

"""What is known of a program before it is rewritten: aliasing, state updates, liveness, the sequence axis, masks."""

"""In-place state: what shares storage, and what may be written where it stands."""

"""The build cache: keys, entries, lookup."""

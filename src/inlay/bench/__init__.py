"""Measuring a package against its limit and against others: contestants take turns in one run."""

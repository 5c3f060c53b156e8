"""Classify attention masks symbolically, from how they are computed."""

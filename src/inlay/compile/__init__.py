"""Backends: how a program becomes code."""

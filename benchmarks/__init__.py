"""Measured ratios: the files here are the entry points."""

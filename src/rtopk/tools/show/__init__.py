"""Palette, intervals and what is printed on a terminal: the same everywhere."""

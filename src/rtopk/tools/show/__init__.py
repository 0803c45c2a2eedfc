"""Palette, intervals and the terminal: what studies and tools show, the same everywhere."""

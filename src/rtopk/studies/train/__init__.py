"""One training run: its configuration, loop, folder and record; many of them side by side."""

"""Experiments: tasks (data and model), the one training loop, and the records of runs."""

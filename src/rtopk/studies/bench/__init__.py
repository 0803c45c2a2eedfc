"""Benchmarks: each measures us beside a floor and rivals in the same run."""

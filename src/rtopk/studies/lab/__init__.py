"""The statistical half of the paper, running: models, encoder, estimators, bounds, risk, convergence.

Everything is in bits, so every logarithm of a bound is to base 2.
"""

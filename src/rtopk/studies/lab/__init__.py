"""The statistical half of the paper, running: model, encoder, bounds, risk, convergence.

Everything is in bits, so every logarithm of a bound is to base 2.
"""

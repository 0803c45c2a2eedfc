"""The statistical half of the paper, running: models, encoder, estimators, bounds, risk."""

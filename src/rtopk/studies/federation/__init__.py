"""The federated setting on Flower's engines."""

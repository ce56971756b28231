"""Federated learning with flrce on Flower."""

"""Samples, and how they are shared out among clients."""

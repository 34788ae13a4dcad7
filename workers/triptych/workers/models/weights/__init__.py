"""Weights: how checkpoints store them, how they are read, and how they are kept for products."""

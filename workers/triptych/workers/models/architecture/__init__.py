"""Checks whether an architecture can be served: attention masks and calls, RoPE, weights."""

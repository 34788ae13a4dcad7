"""Compression methods: compositions of scorer, budget, merger, basis and codec."""

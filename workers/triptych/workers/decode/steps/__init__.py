"""Decode steps that are captured: graphs of a GPU, programs of a CPU."""

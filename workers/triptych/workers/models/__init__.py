"""Models: where they come from, how they are stored, loaded and run."""

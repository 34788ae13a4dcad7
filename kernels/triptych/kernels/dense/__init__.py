"""Products with constant weights of 8 or 16 bits."""

"""A fused forward pass for plain pre-norm blocks."""

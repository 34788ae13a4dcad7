"""What a checkpoint's architecture asks of attention, and which part of it is served."""

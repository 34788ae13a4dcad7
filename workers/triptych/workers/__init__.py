"""The engines of the three stages, free of Ray: messages in, messages out."""

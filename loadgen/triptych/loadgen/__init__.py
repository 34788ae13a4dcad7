"""Load generator for any OpenAI-compatible server: workloads, streaming client, statistics."""

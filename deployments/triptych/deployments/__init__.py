"""The Ray Serve application: its builder, and replicas of ingress, router, pool and workers."""

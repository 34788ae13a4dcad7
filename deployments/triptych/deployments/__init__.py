"""Ray Serve: the builder and the thin shells around engines, router, pool and HTTP app."""

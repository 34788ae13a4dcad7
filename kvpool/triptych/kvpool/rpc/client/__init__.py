"""A worker's access to the pool: allocate and free pages, hand requests off, attach them."""

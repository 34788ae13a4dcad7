"""What messages do to the state of the router, by whom they come from."""

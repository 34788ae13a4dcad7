"""Wait until nothing is booked: the router hears of an end after the client does."""

import time

from triptych.workers.local import LocalServer


def booked_in_the_end(server: LocalServer, timeout_s: float = 30.0) -> dict[str, int]:
    """What is booked once nothing is, or after ``timeout_s``."""
    deadline = time.monotonic() + timeout_s
    while server.booked_bytes and time.monotonic() < deadline:
        time.sleep(0.01)
    return dict(server.booked_bytes)

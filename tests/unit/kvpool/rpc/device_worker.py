"""A worker of a pool with arenas on devices, in a process of its own, for tests that kill it.

ADDRESS NAME DIRECTORY DEVICE
"""

import sys
from pathlib import Path

from tests.fake_driver import FakeDriver
from triptych.kvpool import PoolClient
from triptych.kvpool.pool.device_arenas import DeviceArenas


def main(address: str, name: str, directory: str, device: str) -> None:
    """Allocate four pages at home, and queue writes of 7 to them; then sleep."""
    driver = FakeDriver(Path(directory))
    pool = PoolClient(address, name, directory=Path(directory), device=(driver, device))
    assert isinstance(pool.arena, DeviceArenas)
    ids = pool.allocate(4)
    for page in ids.tolist():
        driver.queue_write(pool.arena, page, 7)
    sys.stdout.write(" ".join(map(str, ids.tolist())) + "\n")
    sys.stdout.flush()
    sys.stdin.read()


if __name__ == "__main__":
    main(*sys.argv[1:])

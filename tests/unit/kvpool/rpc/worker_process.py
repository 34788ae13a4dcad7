"""A worker in a process of its own, for tests that kill and freeze it.

ADDRESS NAME DIRECTORY [CHECKPOINT_BYTES]
"""

import sys
from pathlib import Path

from triptych.core.errors import TriptychError
from triptych.kvpool.rpc.client.pool_client import PoolClient


def say(line: str) -> None:
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


def main(address: str, name: str, directory: str, checkpoint_bytes: str = "0") -> None:
    """Hold 150 pages, a third of them committed; after each line of input, try to go on.

    The checkpoint says the lease, the first ten pages taken, and the committed ones, in int32.
    """
    pool = PoolClient(
        address, name, directory=Path(directory), checkpoint_bytes=int(checkpoint_bytes)
    )
    taken, handed_on = pool.allocate(100), pool.allocate(50)
    pool.arena.data[taken[:10]] = 7
    pool.arena.data[handed_on] = 8
    (lease_ref,) = pool.handoff([("r", handed_on)])
    if pool.checkpoint is not None:
        pool.checkpoint[: 4 * 61].view("<i4")[:] = [lease_ref.lease, *taken[:10], *handed_on]
    say("holding")
    for _ in sys.stdin:
        for call in (lambda: pool.allocate(1), lambda: pool.handoff([("s", pool.allocate(1))])):
            try:
                call()
            except TriptychError as error:
                say(type(error).__name__)
            else:
                say("went on")


if __name__ == "__main__":
    main(*sys.argv[1:])

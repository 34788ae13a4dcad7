"""A worker in a process of its own, for tests that kill and freeze it: ADDRESS NAME DIRECTORY."""

import sys
from pathlib import Path

from triptych.core.errors import TriptychError
from triptych.kvpool.client import PoolClient


def say(line: str) -> None:
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


def main(address: str, name: str, directory: str) -> None:
    """Hold 150 pages, a third of them committed; after each line of input, try to go on."""
    pool = PoolClient(address, name, directory=Path(directory))
    pool.take(100)
    pool.handoff([("r", pool.take(50))])
    say("holding")
    for _ in sys.stdin:
        for call in (lambda: pool.take(1), lambda: pool.handoff([("s", pool.take(1))])):
            try:
                call()
            except TriptychError as error:
                say(type(error).__name__)
            else:
                say("went on")


if __name__ == "__main__":
    main(*sys.argv[1:])

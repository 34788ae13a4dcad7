"""A pool in a process of its own, for tests that kill it: DIRECTORY."""

import sys
from pathlib import Path

from triptych.core.config import PoolConfig
from triptych.kvpool.service import PoolServer


def say(line: str) -> None:
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


def main(directory: str) -> None:
    server = PoolServer(PoolConfig(capacity_bytes=1 << 20), 256, directory=Path(directory))
    say(server.start())
    sys.stdin.read()
    server.stop()


if __name__ == "__main__":
    main(*sys.argv[1:])

"""A pool in a process of its own, for tests that kill or starve it: DIRECTORY [MODE].

Modes: ``disk`` keeps prefixes below the directory; ``starve`` does so where no file may be larger
than a block's header.
"""

import resource
import sys
from pathlib import Path

from triptych.core.config import PoolConfig
from triptych.kvpool import PrefixSettings
from triptych.kvpool.service import PoolServer

PREFIXES = PrefixSettings(block_tokens=4, total_bytes=64 * 256, tenant_bytes=64 * 256)


def say(line: str) -> None:
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


def main(directory: str, mode: str = "") -> None:
    folder = Path(directory)
    disk = {"disk_path": str(folder / "tier"), "disk_bytes": 1 << 20} if mode else {}
    config = PoolConfig(capacity_bytes=1 << 20, **disk)  # type: ignore[arg-type]
    server = PoolServer(config, 256, directory=folder, prefixes=PREFIXES if mode else None)
    if mode == "starve":
        resource.setrlimit(resource.RLIMIT_FSIZE, (4096, 4096))
    say(server.start())
    sys.stdin.read()
    server.stop()


if __name__ == "__main__":
    main(*sys.argv[1:])

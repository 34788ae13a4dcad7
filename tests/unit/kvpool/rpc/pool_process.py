"""A pool in a process of its own, for tests that kill or starve it: DIRECTORY [MODE ...].

Says where its workers find it. Modes: ``disk`` keeps prefixes below the directory; ``starve`` does
so where no file may be larger than a block's header; ``arena`` lays the pages there, as on a disk;
``outside HOST TOKEN LEASE_S`` listens for other nodes too, and says the arena and the two ports.
"""

import resource
import sys
from pathlib import Path

from triptych.core.config import PoolConfig
from triptych.kvpool import Access, PoolServer, PrefixSettings

CAPACITY_BYTES = 64 << 20
PREFIXES = PrefixSettings(block_tokens=4, total_bytes=64 * 256, tenant_bytes=64 * 256)


def say(line: str) -> None:
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


def _server(directory: Path, mode: str, *outside: str) -> PoolServer:
    if mode == "outside":
        host, token, lease_s = outside
        config = PoolConfig(kv_cache_memory_bytes=CAPACITY_BYTES, lease_ttl_s=float(lease_s))
        access = Access(token)
        return PoolServer(
            config, 4096, directory=directory, prefixes=PREFIXES, outside=(host, access)
        )
    if mode == "arena":
        config = PoolConfig(kv_cache_memory_bytes=1 << 20, arena_path=str(directory / "arena"))
        return PoolServer(config, 256, directory=directory)
    disk = {"disk_path": str(directory / "tier"), "disk_bytes": 1 << 20} if mode else {}
    config = PoolConfig(kv_cache_memory_bytes=1 << 20, **disk)  # type: ignore[arg-type]
    return PoolServer(config, 256, directory=directory, prefixes=PREFIXES if mode else None)


def main(directory: str, mode: str = "", *outside: str) -> None:
    server = _server(Path(directory), mode, *outside)
    if mode == "starve":
        resource.setrlimit(resource.RLIMIT_FSIZE, (4096, 4096))
    say(server.start())
    if server.outside:
        say(f"{server.arena} {server.outside.calls} {server.outside.pages}")
    sys.stdin.read()
    server.stop()


if __name__ == "__main__":
    main(*sys.argv[1:])

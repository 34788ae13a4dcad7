"""A disk tier in a process of its own, for tests that kill or starve it: DIRECTORY MODE."""

import resource
import sys
from collections.abc import Iterator
from pathlib import Path

from tests.unit.kvpool.disk.disk_objects import PAGE_BYTES, meta_of, pages_of
from triptych.core.errors import PoolError
from triptych.kvpool.disk.block_file import ObjectMeta, Pages
from triptych.kvpool.disk.store import DiskStore

PAGES = 40 * (1 << 20) // (8 * PAGE_BYTES)
"""Five MiB: several parts."""


def say(line: str) -> None:
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


def slowly(meta: ObjectMeta) -> Iterator[Pages]:
    """A twentieth of the pages at a time, after a word about it."""
    pages = pages_of(meta)
    for at in range(0, meta.pages, meta.pages // 20):
        say(f"writing {at}")
        yield pages[at : at + meta.pages // 20]


def store_for_ever(tier: DiskStore) -> None:
    number = 0
    while True:
        meta = meta_of(number, PAGES)
        tier.store(meta, slowly(meta))
        say(f"stored {number}")
        number += 1


def store_what_fits(tier: DiskStore) -> None:
    """No file may be larger than 1 MiB."""
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, 1 << 20))
    for number, pages in enumerate([100, PAGES, 200]):
        meta = meta_of(number, pages)
        try:
            tier.store(meta, [pages_of(meta)])
        except PoolError as error:
            say(f"refused {number}: {error}")
        else:
            say(f"stored {number}")
    say(f"failed {tier.stat().failed}")


def main(directory: str, mode: str) -> None:
    with DiskStore(Path(directory), 1 << 30, PAGE_BYTES) as tier:
        say("ready")
        {"store": store_for_ever, "starve": store_what_fits}[mode](tier)


if __name__ == "__main__":
    main(*sys.argv[1:])

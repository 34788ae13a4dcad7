"""Throughput of the disk tier, compared with plain reads and writes of as many bytes.

    python benchmarks/kvpool/disk_tier.py --json benchmarks/results/disk_tier.json

One object of 64 MiB. Restoring it into consecutive pages, into scattered pages, and reading its
file plainly alternate, A B C A B C; before each of them the file is dropped from the page cache
(``posix_fadvise`` with DONTNEED). Then storing alternates with a plain write and fsync. The plain
read and write check nothing. Figures are medians, with the quartiles as the spread.
"""

import argparse
import os
import secrets
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path

import numpy as np
from rates import Rate, rates, timed

from triptych.cli.output import console, make_table, write_json
from triptych.core.config import MIB
from triptych.kvpool.disk.block_file import PART_BYTES, READ_PARTS, ObjectMeta, Pages, page_runs
from triptych.kvpool.disk.store import DiskStore
from triptych.loadgen.report.host import host_info

PAGE_BYTES = 3584
CHUNK_BYTES = PART_BYTES * READ_PARTS


class Bench:
    """One object, the arena that it comes from, and files to compare it with."""

    def __init__(self, directory: Path, mib: int) -> None:
        self.directory = directory
        self.pages = mib * MIB // PAGE_BYTES
        self.tier = DiskStore(directory / "tier", 4 * mib * MIB, PAGE_BYTES)
        chance = np.random.default_rng(0)
        self.source: Pages = chance.integers(0, 256, (self.pages, PAGE_BYTES), np.uint8)
        self.arena: Pages = np.zeros((2 * self.pages, PAGE_BYTES), np.uint8)
        self.plain: Pages = np.zeros((self.pages * PAGE_BYTES + MIB, 1), np.uint8)
        together = np.arange(self.pages, dtype=np.int32)
        apart = chance.permutation(2 * self.pages)[: self.pages].astype(np.int32)
        self.targets = [page_runs(self.arena, ids) for ids in (together, apart)]
        self.meta = self.new_meta()
        self.tier.store(self.meta, [self.source])
        self.file = directory / "tier" / f"{self.meta.key.hex()}.kv"

    @property
    def nbytes(self) -> int:
        return self.pages * PAGE_BYTES

    def new_meta(self) -> ObjectMeta:
        return ObjectMeta(
            key=secrets.token_bytes(32),
            parent=bytes(32),
            namespace=bytes(32),
            tokens=bytes(256),
            tenant="",
            pages=self.pages,
            page_bytes=PAGE_BYTES,
        )

    def forget(self) -> None:
        """Put the object's file out of the page cache."""
        descriptor = os.open(self.file, os.O_RDONLY)
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(descriptor)

    def restore(self, target: int) -> int:
        loaded = self.tier.load(self.meta.key, self.targets[target])
        if loaded is None:
            raise SystemExit("the object was not read back")
        return loaded.reads

    def check(self) -> None:
        """Raise unless what was restored is what was stored."""
        for target, runs in enumerate(self.targets):
            self.arena[:] = 0xA5
            self.restore(target)
            if b"".join(runs) != self.source.tobytes():
                raise SystemExit("other pages were read back")

    def read(self) -> int:
        """The same bytes, in as large chunks, and nothing else."""
        view, at, calls = self.plain.reshape(-1).data, 0, 0
        descriptor = os.open(self.file, os.O_RDONLY)
        while done := os.preadv(descriptor, [view[at : at + CHUNK_BYTES]], at):
            at, calls = at + done, calls + 1
        os.close(descriptor)
        return calls

    def store(self) -> None:
        self.tier.store(self.new_meta(), [self.source])

    def write(self) -> None:
        path = self.directory / secrets.token_hex(8)
        with path.open("wb", buffering=0) as file:
            view = self.source.reshape(-1).data
            for at in range(0, self.nbytes, PART_BYTES):
                file.write(view[at : at + PART_BYTES])
            os.fsync(file.fileno())
        path.unlink()


def turns(
    ways: dict[str, Callable[[], object]], nbytes: int, count: int, before: Callable[[], None]
) -> list[Rate]:
    """Measure each way ``count`` times, in turns; the last is the plain one."""
    took_s = {name: list[float]() for name in ways}
    for _ in range(count):
        for name, way in ways.items():
            before()
            took_s[name].append(timed(way))
    return rates(took_s, nbytes)


def measure(bench: Bench, count: int) -> list[Rate]:
    restores: dict[str, Callable[[], object]] = {
        "restore": lambda: bench.restore(0),
        "restore, pages apart": lambda: bench.restore(1),
        "plain read": bench.read,
    }
    cached = {f"{name}, cached": way for name, way in restores.items()}
    stores = {"store": bench.store, "plain write and fsync": bench.write}
    rows = turns(restores, bench.nbytes, count, bench.forget)
    rows += turns(cached, bench.nbytes, count, lambda: None)
    rows += turns(stores, bench.nbytes, count, lambda: None)
    return rows


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--mib", type=int, default=64)
    parser.add_argument("--turns", type=int, default=15)
    parser.add_argument("--directory", type=Path, help="where to write; default: a temporary one")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args(arguments)
    host = host_info()
    with tempfile.TemporaryDirectory(dir=options.directory) as folder:
        bench = Bench(Path(folder), options.mib)
        bench.check()
        reads = {"restore": bench.restore(0), "apart": bench.restore(1), "plain": bench.read()}
        rows = measure(bench, options.turns)
        bench.tier.close()
    console.print(make_table(list(asdict(rows[0])), [list(asdict(row).values()) for row in rows]))
    if options.json:
        fields: dict[str, object] = {
            "mib": options.mib,
            "turns": options.turns,
            "page_bytes": PAGE_BYTES,
        }
        fields["reads"] = reads
        write_json({"host": host, **fields, "rows": [asdict(row) for row in rows]}, options.json)


if __name__ == "__main__":
    main()

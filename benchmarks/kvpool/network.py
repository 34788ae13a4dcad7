"""Throughput of fetching pages from the pool of another node, compared with a socket copy.

    python benchmarks/kvpool/network.py --json benchmarks/results/network.json

Two pools and a plain sender are processes of their own; pages pass over loopback TCP into this one.
A turn measures each way once: consecutive pages, pages all over the arena, the same through TLS,
and as many bytes from ``sendall`` into ``recv_into`` with nothing checked. A fetch is measured
whole: reserving, attaching, copying with checksums, committing, releasing. Figures are medians,
with the quartiles as the spread; ratios are medians over the turns.
"""

import argparse
import multiprocessing as mp
import socket
import subprocess
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from multiprocessing.connection import Connection
from pathlib import Path

import numpy as np
from rates import Rate, rates

from triptych.cli.output import console, make_table, write_json
from triptych.core.config import MIB, NetworkConfig, PoolConfig
from triptych.kvpool import Access, Fetcher, PoolClient, PoolServer
from triptych.kvpool.pool.free_list import PageIds
from triptych.loadgen.report.host import host_info

PAGE_BYTES = 3584
TOKEN = "a token of benchmarks"
SOCKET_BYTES = MIB
LOOPBACK = "127.0.0.1"


def run_pool(pipe: Connection, directory: Path, config: PoolConfig, access: Access) -> None:
    """A pool until the pipe is closed."""
    outside = (LOOPBACK, access)
    with PoolServer(config, PAGE_BYTES, directory=directory, outside=outside) as server:
        pipe.send((server.address, server.arena, server.outside))
        pipe.poll(None)


def run_sender(pipe: Connection, nbytes: int) -> None:
    """Send as many bytes to everybody who connects."""
    listener = socket.create_server((LOOPBACK, 0))
    pipe.send(listener.getsockname()[1])
    content = memoryview(np.random.default_rng(0).integers(0, 256, nbytes, np.uint8).data)
    while True:
        client, _ = listener.accept()
        with client:
            for at in range(0, nbytes, SOCKET_BYTES):
                client.sendall(content[at : at + SOCKET_BYTES])


class Node:
    """A pool process and this process's worker in it."""

    def __init__(self, directory: Path, mib: int, access: Access) -> None:
        directory.mkdir()
        config = PoolConfig(kv_cache_memory_bytes=3 * mib * MIB, extent_pages=1024)
        self._pipe, theirs = mp.Pipe()
        self.process = mp.Process(target=run_pool, args=(theirs, directory, config, access))
        self.process.start()
        theirs.close()
        address, self.arena, self.outside = self._pipe.recv()
        self.worker = PoolClient(address, "worker", directory=directory)
        self.worker.arena.data[:] = 1  # every page of memory is there before anything is measured

    def close(self) -> None:
        self.worker.close()
        self._pipe.close()
        self.process.join()


class Bench:
    """Two nodes, the way between them, and the plain sender."""

    def __init__(self, far: Node, near: Node, access: Access, pages: int, port: int) -> None:
        self.far, self.near, self._port = far, near, port
        self._fetcher = Fetcher(near.worker, {far.arena: far.outside}.get, access)
        self._apart = np.random.default_rng(1).permutation(2 * pages)[:pages].astype(np.int32)
        self.pages = pages

    @property
    def nbytes(self) -> int:
        return self.pages * PAGE_BYTES

    def fetch(self, *, apart: bool) -> float:
        """Seconds that the pages of one request take to come over."""
        producer, worker = self.far.worker, self.near.worker
        stock = np.sort(producer.allocate(2 * self.pages))
        ids: PageIds = stock[self._apart] if apart else stock[: self.pages]
        producer.free(np.setdiff1d(stock, ids))
        producer.arena.data[ids] = np.random.default_rng(0).integers(0, 256, PAGE_BYTES, np.uint8)
        (lease_ref,) = producer.handoff([("r", ids)])
        begun = time.perf_counter()
        made, mine = self._fetcher.fetch("r", lease_ref, ids)
        took_s = time.perf_counter() - begun
        if not np.array_equal(worker.arena.data[mine], producer.arena.data[ids]):
            raise SystemExit("other pages came over")
        worker.release([made.lease])
        return took_s

    def plain(self) -> float:
        target = memoryview(self.near.worker.arena.data.reshape(-1)[: self.nbytes].data)
        begun, at = time.perf_counter(), 0
        with socket.create_connection((LOOPBACK, self._port)) as connection:
            while at < self.nbytes:
                at += connection.recv_into(target[at : at + SOCKET_BYTES])
        return time.perf_counter() - begun

    def close(self) -> None:
        self._fetcher.close()


def make_certificates(directory: Path) -> NetworkConfig:
    """A certificate that has signed itself, made by ``openssl``."""
    key, certificate = directory / "key.pem", directory / "certificate.pem"
    command = ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256"]
    command += ["-nodes", "-days", "2", "-subj", "/CN=bench", "-keyout", str(key)]
    command += ["-addext", f"subjectAltName=IP:{LOOPBACK}", "-out", str(certificate)]
    subprocess.run(command, check=True, capture_output=True)
    pem = str(certificate)
    return NetworkConfig(tls_cert_file=pem, tls_key_file=str(key), tls_ca_file=pem)


def turns(ways: dict[str, Callable[[], float]], count: int) -> dict[str, list[float]]:
    """Seconds of each way, ``count`` times in turns, after one turn that does not count."""
    took_s = {name: list[float]() for name in ways}
    for turn in range(count + 1):
        for name, way in ways.items():
            one_s = way()
            if turn:
                took_s[name].append(one_s)
    return took_s


def measure(directory: Path, mib: int, count: int) -> list[Rate]:
    pages = mib * MIB // PAGE_BYTES
    pipe, theirs = mp.Pipe()
    sender = mp.Process(target=run_sender, args=(theirs, pages * PAGE_BYTES), daemon=True)
    sender.start()
    port = pipe.recv()
    accesses = {
        "plain": Access(TOKEN),
        "tls": Access.of(make_certificates(directory), TOKEN),
    }
    nodes = list[Node]()
    benches = dict[str, Bench]()
    for name, access in accesses.items():
        far, near = (Node(directory / f"{name}-{end}", mib, access) for end in ("far", "near"))
        nodes += [far, near]
        benches[name] = Bench(far, near, access, pages, port)
    ways: dict[str, Callable[[], float]] = {
        "fetch": lambda: benches["plain"].fetch(apart=False),
        "fetch, pages apart": lambda: benches["plain"].fetch(apart=True),
        "fetch, TLS": lambda: benches["tls"].fetch(apart=False),
        "plain socket": lambda: benches["plain"].plain(),
    }
    try:
        return rates(turns(ways, count), pages * PAGE_BYTES)
    finally:
        for thing in (*benches.values(), *nodes):
            thing.close()
        sender.terminate()


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--mib", type=int, default=64)
    parser.add_argument("--turns", type=int, default=15)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args(arguments)
    mp.set_start_method("spawn")  # gRPC and a fork do not go together
    host = host_info()
    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
        rows = measure(Path(folder), options.mib, options.turns)
    console.print(make_table(list(asdict(rows[0])), [list(asdict(row).values()) for row in rows]))
    if options.json:
        fields = {"mib": options.mib, "turns": options.turns, "page_bytes": PAGE_BYTES}
        write_json({"host": host, **fields, "rows": [asdict(row) for row in rows]}, options.json)


if __name__ == "__main__":
    main()

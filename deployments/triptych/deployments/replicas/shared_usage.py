# msgpack has no type hints; nothing untyped leaves this module.
# pyright: reportUnknownMemberType=false
"""The use of API keys, counted over all ingress replicas of a node.

Each key with a limit has a file in the run directory, which is locked while its use changes: what
the rate limit still allows, and the running requests of each replica. Those of a replica that died
do not count. Replicas on other nodes count on their own.
"""

import fcntl
import os
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import astuple
from pathlib import Path
from typing import cast

import msgpack

from triptych.deployments.http.keys import Use
from triptych.kvpool.pool.processes import ProcessKey, is_alive, this_process

MAX_BYTES = 1 << 16
"""Size of a file: a few dozen bytes for each replica."""

Running = dict[ProcessKey, int]
"""Running requests of each replica."""


class SharedUsage:
    """A ``UsageTable`` of files in one directory."""

    def __init__(self, directory: Path, process: ProcessKey | None = None) -> None:
        """``process``: the replica that counts; default: this one."""
        directory.mkdir(mode=0o700, exist_ok=True)
        self._directory, self._process = directory, process or this_process()

    @contextmanager
    def change(self, sha256: str) -> Generator[Use]:
        """The present use of a key. Changes of the block count, unless it raises."""
        path = self._directory / sha256
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX)
            use, running = _read(descriptor)
            before = use.running
            yield use
            own = running.get(self._process, 0) + use.running - before
            _write(descriptor, use, running | {self._process: own})
        finally:
            os.close(descriptor)  # and the lock is released


def _read(descriptor: int) -> tuple[Use, Running]:
    """The use of a key, and the part of each replica that still runs."""
    data = os.read(descriptor, MAX_BYTES)
    if not data:
        return Use(), {}
    allowance, counted_s, parts = cast(
        "tuple[float, float, list[tuple[tuple[int, int, str], int]]]",
        msgpack.unpackb(data, use_list=False),
    )
    found = {ProcessKey(*process): count for process, count in parts if count}
    running = {process: count for process, count in found.items() if is_alive(process)}
    return Use(sum(running.values()), allowance, counted_s), running


def _write(descriptor: int, use: Use, running: Running) -> None:
    parts = [(astuple(process), count) for process, count in running.items()]
    data = cast("bytes", msgpack.packb((use.allowance, use.counted_s, parts)))
    os.pwrite(descriptor, data, 0)
    os.ftruncate(descriptor, len(data))

# msgpack has no type hints; nothing untyped leaves this module.
# pyright: reportUnknownMemberType=false
"""Sums the Prometheus metrics of the ingress replicas of a node, which share one port.

Each scrape may reach another replica, and counters of one alone would go up and down. Each replica
writes its samples to a file in the run directory every second, and adds those of the others to its
own when it is asked. What a replica counted before it died stays: the next one that starts moves it
into one file.
"""

import fcntl
from collections import defaultdict
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import astuple
from pathlib import Path
from typing import cast

import msgpack

from triptych.deployments.http.metrics import LabelledSample
from triptych.kvpool.pool.processes import ProcessKey, is_alive, this_process

INTERVAL_S = 1.0
"""Time between two writes of a replica."""
Fields = tuple[str, str, tuple[tuple[str, str], ...], bool, float]
"""A ``LabelledSample`` in a file."""
ENDED = "ended"
"""File with the counts of replicas that have ended."""


class SharedMetrics:
    """Files of samples in one directory, one for each replica."""

    def __init__(self, directory: Path, process: ProcessKey | None = None) -> None:
        """``process``: the replica that writes; default: this one."""
        directory.mkdir(mode=0o700, exist_ok=True)
        self._directory, self._process = directory, process or this_process()
        self._own = f"{self._process.pid}-{self._process.started}"
        self._gather_ended()

    def write(self, samples: Sequence[LabelledSample]) -> None:
        """Publish the samples of this replica."""
        _write(self._directory / self._own, self._process, samples)

    def others(self) -> list[LabelledSample]:
        """The samples of all other replicas; of those that have ended, their counts."""
        found = list[LabelledSample]()
        with self._locked(fcntl.LOCK_SH):
            for path in self._files():
                process, samples = _read(path)
                is_over = process is None or not is_alive(process)
                found += (one for one in samples if not (is_over and one.is_gauge))
        return found

    def _files(self) -> Iterator[Path]:
        """The files of other replicas, and the one of those that have ended."""
        hidden = (self._own, "lock")
        return (
            one
            for one in self._directory.iterdir()
            if one.name not in hidden and one.suffix != ".new"
        )

    def _gather_ended(self) -> None:
        """Move the counts of replicas that have ended into one file."""
        counts = defaultdict[LabelledSample, float](float)
        with self._locked(fcntl.LOCK_EX):
            for path in list(self._files()):
                process, samples = _read(path)
                if process is not None and is_alive(process):
                    continue
                for one in samples:
                    if not one.is_gauge:
                        counts[one.at(0.0)] += one.value
                path.unlink()
            _write(self._directory / ENDED, None, [one.at(n) for one, n in counts.items()])

    @contextmanager
    def _locked(self, how: int) -> Generator[None]:
        with (self._directory / "lock").open("w") as file:
            fcntl.flock(file, how)
            yield


def _write(path: Path, process: ProcessKey | None, samples: Sequence[LabelledSample]) -> None:
    key = astuple(process) if process else None
    new = path.with_suffix(".new")
    new.write_bytes(cast("bytes", msgpack.packb((key, [astuple(one) for one in samples]))))
    new.replace(path)


def _read(path: Path) -> tuple[ProcessKey | None, list[LabelledSample]]:
    """The replica that wrote a file and its samples; None: the file of those that have ended."""
    unpack = cast(
        "Callable[..., tuple[tuple[int, int, str] | None, list[Fields]]]",
        msgpack.unpackb,
    )
    key, samples = unpack(path.read_bytes(), use_list=False)
    return ProcessKey(*key) if key else None, [LabelledSample(*one) for one in samples]

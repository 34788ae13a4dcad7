"""Core scheduling: how the stages of one machine share its CPU cores.

Threads of two stages on the same core wait for each other's time slices, and with them all threads
of both. So each core has threads of one stage at a time:

- With several cores, workers that only decode have one part of them, and all others, whose steps
  come before the first token, the other part. While one part has no work, steps of the other may
  have more cores; then the first one waits until the step ends, at most a chunk of a prompt.
  Decode steps of many requests pause between them while prompts wait: see ``PACE``.
- The workers of a part take turns: the one that has waited longest takes the next step.
- A single core is one part. There a decode step that can wait lets prompts go first.

Where other programs run on these cores, a step has fewer threads (``thread_team``).
"""

import fcntl
import os
import struct
import time
from collections.abc import Callable, Generator
from contextlib import contextmanager
from dataclasses import astuple
from enum import Enum
from pathlib import Path

import torch

from triptych.core.config.machine import usable_cores
from triptych.workers.thread_team import ThreadTeam, Usage, idle_cores

POLL_S = 0.004
"""Interval at which a stage that yields checks whether it still has to."""
PACE = 1.5
"""Begin of a decode step of many requests after that of the last one, in times of the last one's
length, while prompts wait. A step of ten requests takes less than twice as long as one of four, so
a pause saves more time than it takes. With 16 clients on two cores 2.55 to 2.74 requests a
second are answered instead of 2.40 to 2.52, and with 2 as many (docs/log.md). Steps that are
divided take as long for a request in small steps as in large ones, and do not pause."""


class CoreUse(Enum):
    """How the threads of a step use its cores."""

    TEAM = "team"
    """Its threads wait for each other after each operation."""
    SMALL = "small"
    """It gains little from the last core, and leaves that to other processes. A chunk of a prompt
    may have the cores of such a decode step, if that is not urgent."""
    DIVIDED = "divided"
    """Its threads wait for each other once, so a decode step may have all cores, and does not pause
    while prompts wait."""


class DedicatedCores:
    """Every step uses the same number of threads, without waiting for other stages."""

    def __init__(self, threads: int) -> None:
        torch.set_num_threads(threads)

    @contextmanager
    def step(self, _is_urgent: Callable[[], bool], _use: CoreUse = CoreUse.TEAM) -> Generator[None]:
        yield

    def set_working(self, *, has_more: bool, has_prompts: bool) -> None:
        """Do nothing: the cores are this worker's own."""


class SharedCores:
    """Steps of all workers that share a directory, on the cores of a machine.

    Two file locks order the steps of a part of the cores: the holder of ``next`` gets ``turn``
    next, so a worker that has just ended a step cannot take the next one before a worker that
    waits. The kernel releases the locks of a process that dies. The file of ``turn`` holds the
    thread team that the workers of the part share; only the holder reads and writes it. Workers
    with work share the lock of ``working``, decode workers that lend their cores that of ``lent``
    in its place, and workers that have prompts after a step that of ``queue``; a step with cores of
    both parts holds ``both``.
    """

    def __init__(
        self, directory: Path, cores: int | None = None, *, is_decode_only: bool = False
    ) -> None:
        """``cores``: most threads of a step; None: the cores that this process can use."""
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._cores = cores or usable_cores()
        self._is_divided, self._is_decode_only = self._cores > 1, is_decode_only
        own, other = ("decode", "prompts") if is_decode_only else ("prompts", "decode")
        part = own if self._is_divided else "all"
        self._next, self._turn = (_lock(directory / f"{name}.{part}") for name in ("next", "turn"))
        self._working = _lock(directory / f"working.{own}")
        self._others_work = _lock(directory / f"working.{other}")
        self._both, self._queue, self._lent = (
            _lock(directory / name) for name in ("both", "queue", "lent")
        )
        self._share = self._cores // 2 if is_decode_only else self._cores - self._cores // 2
        """Cores of this part while the other one works."""
        self._next_s = 0.0
        """Time (monotonic clock) at which a step that pauses begins at the latest."""
        self._is_lent = False
        """Whether a chunk of a prompt may have the cores of decode."""
        torch.set_num_threads(self._cores)

    def set_working(self, *, has_more: bool, has_prompts: bool) -> None:
        """Set whether this worker has more to do: its part of the cores is its own while it has.

        ``has_prompts``: prompts are here, even if they wait for another worker of this part, as
        those that are prefilled some layers at a time do for their compressor.
        """
        if not self._is_lent:
            fcntl.flock(self._working, _shared_if(has_more))
        elif not has_more:
            fcntl.flock(self._lent, fcntl.LOCK_UN)
        if not self._is_decode_only:
            fcntl.flock(self._queue, _shared_if(has_prompts))

    def _other_part_works(self) -> bool:
        return _is_held(self._others_work)

    @contextmanager
    def step(self, is_urgent: Callable[[], bool], use: CoreUse = CoreUse.TEAM) -> Generator[None]:
        """Wait for the turn and hold it during a step.

        A step that is not urgent lets prompts go first if it would have the same core, and pauses
        if they wait.
        """
        may_lend = use is CoreUse.SMALL and self._should_lend()
        self._claim(is_lent=may_lend and not is_urgent())
        while not is_urgent() and self._should_wait(use):
            time.sleep(POLL_S)
        fcntl.flock(self._next, fcntl.LOCK_EX)
        fcntl.flock(self._turn, fcntl.LOCK_EX)
        fcntl.flock(self._next, fcntl.LOCK_UN)
        begun_s = time.monotonic()
        try:
            with self._threads(use):
                yield
        finally:
            fcntl.flock(self._turn, fcntl.LOCK_UN)
            self._next_s = begun_s + PACE * (time.monotonic() - begun_s)

    def _should_lend(self) -> bool:
        """Whether a chunk of a prompt that begins now may have the cores of decode."""
        return self._is_divided and self._is_decode_only and _is_held(self._queue)

    def _claim(self, *, is_lent: bool) -> None:
        """Show the other part that this one works, or that it may have all cores all the same."""
        self._is_lent = is_lent
        fcntl.flock(self._working, _shared_if(not is_lent))
        if self._is_decode_only:
            fcntl.flock(self._lent, _shared_if(is_lent))

    def _should_wait(self, use: CoreUse) -> bool:
        """Whether a step that is not urgent does not begin yet."""
        if not self._is_divided:
            return self._other_part_works()
        if use is not CoreUse.TEAM or not self._is_decode_only:
            return False
        if time.monotonic() >= self._next_s:
            return False
        return _is_held(self._queue)

    @contextmanager
    def _threads(self, use: CoreUse) -> Generator[None]:
        """Run a step with as many threads as it has cores."""
        if not self._is_divided:
            yield
            return
        is_team = not self._is_decode_only and use is not CoreUse.SMALL
        team = self._enlarged_team() if is_team else None
        if team is not None and team.threads <= self._share:  # nobody has to wait for it
            torch.set_num_threads(team.threads)
            yield
            return
        with self._alone() as is_alone:
            if not is_alone:
                torch.set_num_threads(min(self._share, self._read_team().threads))
                yield
            elif team is not None:
                with self._judged(team):
                    yield
            else:
                is_divided = self._is_decode_only and use is CoreUse.DIVIDED
                torch.set_num_threads(max(1 + is_divided, self._cores - 1))
                yield

    @contextmanager
    def _alone(self) -> Generator[bool]:
        """Wait for a step that has cores of both parts; keep both if the other part has no work."""
        begun_s = time.monotonic()
        fcntl.flock(self._both, fcntl.LOCK_EX)
        try:
            if time.monotonic() - begun_s > POLL_S:  # a chunk had its cores: this step keeps them
                self._claim(is_lent=False)
            is_alone = not self._other_part_works()
            if not is_alone:
                fcntl.flock(self._both, fcntl.LOCK_UN)
            yield is_alone
        finally:
            fcntl.flock(self._both, fcntl.LOCK_UN)

    @contextmanager
    def _judged(self, team: ThreadTeam) -> Generator[None]:
        """Run a step with the shared thread team, and judge the team by what the step used."""
        before = Usage.now()
        torch.set_num_threads(team.threads)
        yield
        after = Usage.now()
        team = team.after(after - before, after.wall_s)
        numbers = team.threads, team.enlarge_at_s, team.rest_s, *astuple(team.window)
        os.pwrite(self._turn, _TEAM.pack(*numbers), 0)

    def _enlarged_team(self) -> ThreadTeam:
        """The team for the next step, with cores that became idle."""
        team = self._read_team()
        if team.threads >= self._cores:
            return team
        lent = int(_is_held(self._lent))  # a step of decode that runs ends within milliseconds
        return team.enlarged(self._cores, idle_cores(lent), time.monotonic())

    def _read_team(self) -> ThreadTeam:
        """The team as the last step left it; all cores at the first step."""
        written = os.pread(self._turn, _TEAM.size, 0)
        if len(written) < _TEAM.size:
            return ThreadTeam(threads=self._cores)
        threads, enlarge_at_s, rest_s, wall_s, cpu_s, switches = _TEAM.unpack(written)
        return ThreadTeam(
            threads=min(threads, self._cores),
            window=Usage(wall_s=wall_s, cpu_s=cpu_s, switches=switches),
            enlarge_at_s=enlarge_at_s,
            rest_s=rest_s,
        )


def _lock(path: Path) -> int:
    """The file of a lock, which is made if it is missing."""
    return os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)


def _shared_if(is_held: bool) -> int:
    """The operation that takes a lock, shared with others, or releases it."""
    return fcntl.LOCK_SH if is_held else fcntl.LOCK_UN


def _is_held(lock: int) -> bool:
    """Whether another process holds a lock."""
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    fcntl.flock(lock, fcntl.LOCK_UN)
    return False


_TEAM = struct.Struct("=iddddq")
"""Threads, time of the next enlargement, rest, and the window."""


Cores = DedicatedCores | SharedCores

"""Child processes that do one risky thing at a time within limits of time and memory.

What a client sends may need any amount of both. So it is worked on in a child process that limits
itself, and dies if the work exceeds a limit: the parent tells by the signal which limit it was.
"""

import asyncio
import itertools
import resource
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Self

from triptych.core.errors import Overloaded

START_S = 30.0
"""For the start of a process: it imports what it works with."""


class LimitExceeded(Exception):
    """The work exceeded a limit of its process; the argument says which."""


class _ProcessLost(Exception):
    """The process died for a reason that no work has."""


@dataclass(frozen=True)
class Job:
    """A kind of work for child processes, and its limits."""

    name: str
    """What is done, in messages."""
    module: str
    """Module of the child, which calls ``answer_frames``."""
    first: bytes
    """A frame that is answered at the start, to see that the process works."""
    wall_s: float
    """For one frame on a busy machine."""
    ends: Mapping[signal.Signals, str]
    """What a frame did that ended the process, by signal."""


@dataclass(eq=False)
class _LimitedProcess:
    """One child process; it is used by one thread at a time."""

    job: Job
    process: subprocess.Popen[bytes]
    pipe: Connection

    @classmethod
    def start(cls, job: Job) -> Self:
        ours, theirs = Pipe()
        with theirs:
            number = theirs.fileno()
            process = subprocess.Popen(
                [sys.executable, "-m", job.module, str(number)],
                pass_fds=(number,),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
            )
        child = cls(job, process, ours)
        child.ask(job.first, START_S)
        return child

    def ask(self, frame: bytes, wall_s: float) -> bytes:
        """Raises: LimitExceeded; _ProcessLost if the process did not die of the frame"""
        try:
            self.pipe.send_bytes(frame)
            if not self.pipe.poll(wall_s):
                self.process.kill()
                self.end()
                raise LimitExceeded(f"needs more than {wall_s:g} s")
            return self.pipe.recv_bytes()
        except (EOFError, OSError):
            self.end()
            raise self._cause_of_death() from None

    def end(self) -> None:
        """End the process, if it has not ended, and wait for its end."""
        self.pipe.close()
        try:  # a process that dies closes the pipe some time before it is dead
            self.process.wait(1.0)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()

    def _cause_of_death(self) -> Exception:
        code = self.process.returncode
        reason = self.job.ends.get(signal.Signals(-code)) if code < 0 else None
        return _ProcessLost(f"exit code {code}") if reason is None else LimitExceeded(reason)


class LimitedProcesses:
    """Answers frames in at most ``count`` child processes; they start when they are needed."""

    def __init__(self, job: Job, *, count: int, max_waiting: int) -> None:
        """``max_waiting``: frames that wait for a process; one more is refused with 503."""
        self._job, self._max_waiting = job, max_waiting
        self._threads = ThreadPoolExecutor(count, thread_name_prefix=job.name)
        self._idle = list[_LimitedProcess]()
        self._lock = threading.Lock()
        self._waiting = 0

    async def ask(self, frame: bytes) -> bytes:
        """The answer to a frame.

        Raises: LimitExceeded; Overloaded if too many wait, or the processes do not work
        """
        if self._waiting >= self._max_waiting:
            raise Overloaded(f"{self._waiting} wait: {self._job.name}")
        self._waiting += 1
        try:
            loop = asyncio.get_running_loop()
            return await loop.run_in_executor(self._threads, self._run, frame)
        finally:
            self._waiting -= 1

    def close(self) -> None:
        """End the child processes."""
        self._threads.shutdown(cancel_futures=True)
        while self._idle:
            self._idle.pop().end()

    def _run(self, frame: bytes) -> bytes:
        """Answer in an idle process, or in a new one; once more if the process was lost."""
        for attempt in itertools.count(1):
            with self._lock:
                child = self._idle.pop() if self._idle else None
            try:
                child = child or _LimitedProcess.start(self._job)
                return child.ask(frame, self._job.wall_s)
            except _ProcessLost as error:
                if attempt == 2:
                    raise Overloaded(f"the process ended: {self._job.name}: {error}") from None
            finally:
                if child is not None and child.process.returncode is None:
                    with self._lock:
                        self._idle.append(child)
        raise AssertionError


# ---------------------------------------------------------------- in the child process


def answer_frames(
    pipe: int,
    answer: Callable[[bytes], bytes],
    *,
    cpu_s: float,
    memory_bytes: int,
    stack_bytes: int,
) -> None:
    """Answer one frame after another, each in a thread, until the parent closes the pipe.

    A frame that needs more than ``cpu_s`` of processor time ends the process with SIGPROF.
    """
    _limit_memory(memory_bytes)
    threading.stack_size(stack_bytes)

    def work(frame: bytes) -> None:
        signal.setitimer(signal.ITIMER_PROF, cpu_s)
        try:
            reply = answer(frame)
        finally:
            signal.setitimer(signal.ITIMER_PROF, 0)
        parent.send_bytes(reply)

    with Connection(pipe) as parent:
        while True:
            try:
                frame = parent.recv_bytes()
            except EOFError:
                return
            thread = threading.Thread(target=work, args=(frame,))
            thread.start()
            thread.join()


def _limit_memory(memory_bytes: int) -> None:
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    limit = pages * resource.getpagesize() + memory_bytes
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))

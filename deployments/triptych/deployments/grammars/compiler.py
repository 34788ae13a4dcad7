"""The ingress's side of compiling grammars: child processes, their limits, and a cache."""

import asyncio
import atexit
import itertools
import json
import signal
import subprocess
import sys
import threading
from collections import OrderedDict
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cache
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from typing import Self

from triptych.core.errors import GrammarError, Overloaded
from triptych.core.grammar import GrammarSource
from triptych.deployments.grammars.compile_process import CPU_S, MEMORY_BYTES, STACK_BYTES

PROCESSES = 2
WALL_S = 2.0
"""For one grammar on a busy machine."""
START_S = 30.0
"""For the start of a process: it imports llguidance."""
MAX_WAITING = 32
"""Grammars that wait for a process; one more is refused with 503."""
MAX_CACHED = 256

ENDS = {
    signal.SIGPROF: f"needs more than {CPU_S:g} s of processor time",
    signal.SIGABRT: f"needs more than {MEMORY_BYTES >> 20} MiB of memory",
    signal.SIGSEGV: f"nests deeper than a stack of {STACK_BYTES >> 20} MiB allows",
    signal.SIGBUS: f"nests deeper than a stack of {STACK_BYTES >> 20} MiB allows",
}
"""What a grammar did that ended the process, by signal."""
ADVICE = "ask for a simpler schema, expression or grammar"


class _ProcessLost(Exception):
    """The process died for a reason that no grammar has."""


@dataclass(eq=False)
class _CompileProcess:
    """One child process; it is used by one thread at a time."""

    process: subprocess.Popen[bytes]
    pipe: Connection

    @classmethod
    def start(cls) -> Self:
        ours, theirs = Pipe()
        with theirs:
            module = "triptych.deployments.grammars.compile_process"
            number = theirs.fileno()
            process = subprocess.Popen(
                [sys.executable, "-m", module, str(number)],
                pass_fds=(number,),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
            )
        child = cls(process, ours)
        child.compile(GrammarSource("regex", "a"), START_S)
        return child

    def compile(self, source: GrammarSource, wall_s: float = WALL_S) -> str:
        """Raises: GrammarError; _ProcessLost if the process did not die of the grammar"""
        try:
            self.pipe.send_bytes(json.dumps([source.kind, source.text]).encode())
            if not self.pipe.poll(wall_s):
                self.process.kill()
                self.end()
                raise GrammarError(f"it needs more than {wall_s:g} s to compile; {ADVICE}")
            reply: dict[str, str] = json.loads(self.pipe.recv_bytes())
        except (EOFError, OSError):
            self.end()
            raise self._cause_of_death() from None
        if "error" in reply:
            raise GrammarError(reply["error"])
        return reply["grammar"]

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
        reason = ENDS.get(signal.Signals(-code)) if code < 0 else None
        if reason is None:
            return _ProcessLost(f"exit code {code}")
        return GrammarError(f"it {reason} to compile; {ADVICE}")


class GrammarCompiler:
    """Compiles the grammars of requests in at most ``PROCESSES`` child processes.

    A grammar that exceeds a limit ends its child process, and nothing else. Results are cached,
    refusals too, so that repeating a grammar costs nothing.
    """

    def __init__(self) -> None:
        self._threads = ThreadPoolExecutor(PROCESSES, thread_name_prefix="grammars")
        self._idle = list[_CompileProcess]()
        self._lock = threading.Lock()
        self._waiting = 0
        self._cache = OrderedDict[GrammarSource, str | GrammarError]()

    async def compile(self, source: GrammarSource) -> str:
        """The grammar as workers take it.

        Raises: GrammarError naming what is wrong, or which limit it exceeds; Overloaded if too many
            grammars wait
        """
        found = self._cache.get(source)
        if found is None:
            found = await self._compile(source)
            self._cache[source] = found
            while len(self._cache) > MAX_CACHED:
                self._cache.popitem(last=False)
        else:
            self._cache.move_to_end(source)
        if isinstance(found, GrammarError):
            raise GrammarError(*found.args)
        return found

    def close(self) -> None:
        """End the child processes."""
        self._threads.shutdown(cancel_futures=True)
        while self._idle:
            self._idle.pop().end()

    async def _compile(self, source: GrammarSource) -> str | GrammarError:
        if self._waiting >= MAX_WAITING:
            raise Overloaded(f"{self._waiting} grammars wait to be compiled")
        self._waiting += 1
        try:
            loop = asyncio.get_running_loop()
            return await loop.run_in_executor(self._threads, self._run, source)
        except GrammarError as error:
            return error
        finally:
            self._waiting -= 1

    def _run(self, source: GrammarSource) -> str:
        """Compile in an idle process, or in a new one; once more if the process was lost."""
        for attempt in itertools.count(1):
            with self._lock:
                child = self._idle.pop() if self._idle else None
            try:
                child = child or _CompileProcess.start()
                return child.compile(source)
            except _ProcessLost as error:
                if attempt == 2:
                    raise Overloaded(f"the process that compiles grammars ended: {error}") from None
            finally:
                if child is not None and child.process.returncode is None:
                    with self._lock:
                        self._idle.append(child)
        raise AssertionError


@cache
def process_compiler() -> GrammarCompiler:
    """The compiler of this process. Its child processes end when this process does."""
    compiler = GrammarCompiler()
    atexit.register(compiler.close)
    return compiler

"""The ingress's side of compiling grammars: child processes, their limits, and a cache."""

import atexit
import json
import signal
from collections import OrderedDict
from functools import cache

from triptych.core.errors import GrammarError
from triptych.core.grammar import GrammarSource
from triptych.deployments.grammars.compile_process import CPU_S, MEMORY_BYTES, STACK_BYTES
from triptych.deployments.limited_processes import Job, LimitedProcesses, LimitExceeded

PROCESSES = 2
WALL_S = 2.0
"""For one grammar on a busy machine."""
MAX_WAITING = 32
"""Grammars that wait for a process; one more is refused with 503."""
MAX_CACHED = 256

ADVICE = "ask for a simpler schema, expression or grammar"


def _frame(source: GrammarSource) -> bytes:
    return json.dumps([source.kind, source.text]).encode()


JOB = Job(
    name="grammars",
    module="triptych.deployments.grammars.compile_process",
    first=_frame(GrammarSource("regex", "a")),
    wall_s=WALL_S,
    ends={
        signal.SIGPROF: f"needs more than {CPU_S:g} s of processor time",
        signal.SIGABRT: f"needs more than {MEMORY_BYTES >> 20} MiB of memory",
        signal.SIGSEGV: f"nests deeper than a stack of {STACK_BYTES >> 20} MiB allows",
        signal.SIGBUS: f"nests deeper than a stack of {STACK_BYTES >> 20} MiB allows",
    },
)


class GrammarCompiler:
    """Compiles the grammars of requests in at most ``PROCESSES`` child processes.

    A grammar that exceeds a limit ends its child process, and nothing else. Results are cached,
    refusals too, so that repeating a grammar costs nothing.
    """

    def __init__(self) -> None:
        self.processes = LimitedProcesses(JOB, count=PROCESSES, max_waiting=MAX_WAITING)
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
        self.processes.close()

    async def _compile(self, source: GrammarSource) -> str | GrammarError:
        try:
            reply: dict[str, str] = json.loads(await self.processes.ask(_frame(source)))
        except LimitExceeded as error:
            return GrammarError(f"it {error} to compile; {ADVICE}")
        return GrammarError(reply["error"]) if "error" in reply else reply["grammar"]


@cache
def process_compiler() -> GrammarCompiler:
    """The compiler of this process. Its child processes end when this process does."""
    compiler = GrammarCompiler()
    atexit.register(compiler.close)
    return compiler

"""The child process that compiles grammars: ``python -m`` this module, with a pipe's number.

A grammar can need any amount of time, memory and stack, and llguidance limits only some of that. So
this process limits itself, and dies if a grammar exceeds a limit: its parent tells by the signal
which limit it was. Both ends speak JSON.
"""

import json
import resource
import signal
import sys
import threading
from multiprocessing.connection import Connection
from pathlib import Path

from triptych.core import grammar
from triptych.core.errors import GrammarError

CPU_S = 0.25
"""Processor time for one grammar. Ordinary ones take 1 to 30 ms; workers compile it once more."""
MEMORY_BYTES = 512 << 20
"""Memory for one grammar."""
STACK_BYTES = 1 << 20
"""Stack for one grammar. Workers have more: what is compiled here does not overflow theirs."""


def main(pipe: int) -> None:
    """Answer one frame after another, until the parent closes the pipe."""
    _limit_memory()
    threading.stack_size(STACK_BYTES)
    with Connection(pipe) as parent:
        while True:
            try:
                frame = parent.recv_bytes()
            except EOFError:
                return
            thread = threading.Thread(target=_answer, args=(parent, frame))
            thread.start()
            thread.join()


def _answer(parent: Connection, frame: bytes) -> None:
    source = grammar.GrammarSource(*json.loads(frame))
    signal.setitimer(signal.ITIMER_PROF, CPU_S)  # SIGPROF ends the process
    try:
        reply = {"grammar": grammar.compile_source(source)}
    except GrammarError as error:
        reply = {"error": str(error)}
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
    parent.send_bytes(json.dumps(reply).encode())


def _limit_memory() -> None:
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    limit = pages * resource.getpagesize() + MEMORY_BYTES
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


if __name__ == "__main__":
    main(int(sys.argv[1]))

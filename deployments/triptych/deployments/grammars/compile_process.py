"""The child process that compiles grammars: ``python -m`` this module, with a pipe's number.

A grammar can need any amount of time, memory and stack, and llguidance limits only some of that
(``limited_processes``). Both ends speak JSON.
"""

import json
import sys

from triptych.core import grammar
from triptych.core.errors import GrammarError
from triptych.deployments.limited_processes import answer_frames

CPU_S = 0.25
"""Processor time for one grammar. Ordinary ones take 1 to 30 ms; workers compile it once more."""
MEMORY_BYTES = 512 << 20
"""Memory for one grammar."""
STACK_BYTES = 1 << 20
"""Stack for one grammar. Workers have more: what is compiled here does not overflow theirs."""


def answer(frame: bytes) -> bytes:
    """The compiled grammar, or what is wrong with it."""
    source = grammar.GrammarSource(*json.loads(frame))
    try:
        reply = {"grammar": grammar.compile_source(source)}
    except GrammarError as error:
        reply = {"error": str(error)}
    return json.dumps(reply).encode()


if __name__ == "__main__":
    answer_frames(
        int(sys.argv[1]), answer, cpu_s=CPU_S, memory_bytes=MEMORY_BYTES, stack_bytes=STACK_BYTES
    )

"""Hostile grammars end a child process at most, and nobody waits for it."""

import asyncio
import os
import random
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

import pytest

from triptych.core.errors import GrammarError, Overloaded
from triptych.core.grammar import MAX_CHARS, GrammarSource, from_regex, schema_source
from triptych.deployments.grammars import GrammarCompiler
from triptych.deployments.grammars.compiler import JOB, MAX_WAITING, PROCESSES
from triptych.deployments.limited_processes import LimitedProcesses


@contextmanager
def compiler_of(wall_s: float) -> Iterator[GrammarCompiler]:
    compiler = GrammarCompiler()
    compiler.processes.close()
    job = replace(JOB, wall_s=wall_s)
    compiler.processes = LimitedProcesses(job, count=PROCESSES, max_waiting=MAX_WAITING)
    yield compiler
    compiler.close()


@pytest.fixture(scope="module")
def compiler() -> Iterator[GrammarCompiler]:
    """One whose processes are ended for the time that they compute, not for that they wait."""
    with compiler_of(wall_s=120.0) as compiler:
        yield compiler


def lark(rules: list[str]) -> GrammarSource:
    return GrammarSource("lark", "\n".join(rules))


def patterns(count: int, seed: int) -> GrammarSource:
    luck = random.Random(seed)
    parts = [f"^.*[{luck.choice('abcdef')}].{{{luck.randint(5, 90)}}}$" for _ in range(count)]
    return schema_source({"allOf": [{"type": "string", "pattern": one} for one in parts]})


HOSTILE = {
    "chain of rules": lark(["start: r0", *(f"r{i}: r{i + 1}" for i in range(4000)), 'r4000: "x"']),
    "chain of references": schema_source(
        {
            "$ref": "#/$defs/a0",
            "$defs": {
                **{f"a{i}": {"$ref": f"#/$defs/a{i + 1}"} for i in range(1200)},
                "a1200": {"type": "null"},
            },
        }
    ),
    "optional letters": GrammarSource("regex", "a?" * 20_000),
    "repeated repeats": GrammarSource("regex", "((((a{1,90}){1,90}){1,90}){1,90}){1,90}"),
    "deep brackets": GrammarSource("regex", "(" * 30_000 + "a" + ")" * 30_000),
    "deep brackets in rules": GrammarSource(
        "lark", "start: " + "(" * 30_000 + '"a"' + ")" * 30_000
    ),
    "tokens within tokens": lark(
        ["start: T0", *(f"T{i}: T{i + 1} T{i + 1}" for i in range(40)), 'T40: "x"']
    ),
    "all of many patterns": patterns(60, 1),
    "all of other patterns": patterns(60, 2),
    "bounded unicode": GrammarSource("regex", r"(\w{1,5000}\W){1,500}"),
}


OFTEN = "chain of rules", "optional letters", "deep brackets", "tokens within tokens"
"""They meet different limits; ``make conformance`` runs the others too."""


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=[] if name in OFTEN else [pytest.mark.conformance])
        for name in HOSTILE
    ],
)
def test_a_hostile_grammar_is_refused_or_compiled_within_seconds(
    compiler: GrammarCompiler, name: str
) -> None:
    """And the process of the event loop computes next to nothing meanwhile."""

    async def compile_it() -> str:
        try:
            return await compiler.compile(HOSTILE[name])
        except GrammarError as error:
            return str(error)

    computed = time.process_time()
    assert asyncio.run(compile_it())
    assert time.process_time() - computed < 1  # compiling here would take many seconds


def test_the_error_names_the_limit(compiler: GrammarCompiler) -> None:
    with pytest.raises(GrammarError, match=r"more than [\d.]+ (s of processor time|MiB of memory)"):
        asyncio.run(compiler.compile(HOSTILE["optional letters"]))
    with pytest.raises(GrammarError, match="stack"):
        asyncio.run(compiler.compile(HOSTILE["chain of rules"]))


def test_the_time_that_a_grammar_waits_for_a_core_is_limited_too() -> None:
    with (
        compiler_of(wall_s=0.01) as compiler,
        pytest.raises(GrammarError, match=r"than 0\.01 s to"),
    ):
        asyncio.run(compiler.compile(HOSTILE["optional letters"]))


def test_a_process_that_is_killed_is_replaced(compiler: GrammarCompiler) -> None:
    asyncio.run(compiler.compile(GrammarSource("regex", "before")))
    for one in compiler.processes._idle:
        os.kill(one.process.pid, signal.SIGKILL)
        one.process.wait()
    expected = from_regex("after")
    assert asyncio.run(compiler.compile(GrammarSource("regex", "after"))) == expected


def test_results_and_refusals_are_kept(compiler: GrammarCompiler) -> None:
    good, bad = GrammarSource("regex", "kept"), GrammarSource("regex", "(")
    made = asyncio.run(compiler.compile(good))
    with pytest.raises(GrammarError) as first:
        asyncio.run(compiler.compile(bad))
    for one in compiler.processes._idle:
        one.process.kill()
    assert asyncio.run(compiler.compile(good)) == made
    with pytest.raises(GrammarError) as second:
        asyncio.run(compiler.compile(bad))
    assert str(second.value) == str(first.value)


def test_one_more_than_may_wait_is_refused_and_may_come_again(compiler: GrammarCompiler) -> None:
    async def flood() -> list[str | BaseException]:
        sources = [GrammarSource("regex", f"flood {i}") for i in range(MAX_WAITING + 3)]
        return await asyncio.gather(*map(compiler.compile, sources), return_exceptions=True)

    results = asyncio.run(flood())
    refused = [one for one in results if isinstance(one, Overloaded)]
    assert len(refused) == 3
    assert all(isinstance(one, str | Overloaded) for one in results)


def test_a_source_that_is_too_long_is_refused_before_it_is_kept() -> None:
    """The cache holds 256 sources."""
    with pytest.raises(GrammarError, match="characters: at most"):
        GrammarSource("regex", "a" * (MAX_CHARS + 1))

# pyright: basic, reportPrivateUsage=false
# numba is untyped.
"""Kernels are called with the types for which a server compiles them when it starts."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.tiny import DIFFKV
from tests.unit.workers.test_local_server import config, greedy, prompt
from triptych.kernels import block_table_ops
from triptych.kernels.compact import cpu
from triptych.workers.local import LocalServer

UNIFORM: dict[str, object] = {"policy": "uniform:k8v4", "recent_window_tokens": 4}
CALLS = block_table_ops.CALLS.calls + cpu.CALLS.calls


@pytest.fixture
def no_compilation() -> Iterator[None]:
    """Kernels of ``CALLS`` that refuse calls with other types."""
    functions = {function for function, _ in CALLS}
    for function in functions:
        function._reset_overloads()  # other tests call them with other types
    for function, arguments in CALLS:
        function.compile(arguments)
    for function in functions:
        function.disable_compile()
    yield
    for function in functions:
        function.disable_compile(False)


@pytest.mark.usefixtures("no_compilation")
@pytest.mark.parametrize("compressor", [DIFFKV, UNIFORM], ids=["diffkv", "uniform"])
def test_answers_need_no_other_compilation(compressor: dict[str, object], tiny_model: Path) -> None:
    with LocalServer(config(compressor={**compressor}), tiny_model) as server:
        asked = [server.request(prompt(count), greedy(90)) for count in (3, 70, 130)]
        done = server.complete(asked)
    assert [len(one.tokens) for one in done] == [90] * 3

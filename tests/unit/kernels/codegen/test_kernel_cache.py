# pyright: reportPrivateUsage=false
"""Entry points of kernels are compiled when they are needed, and by one process."""

import fcntl
import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any, get_args

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from triptych.core.methods.kernel_needs import KernelNeed
from triptych.kernels import precompile
from triptych.kernels.codegen import kernel_cache
from triptych.kernels.codegen.kernel_cache import CalledKernels, EntryPoint
from triptych.kernels.floats import nth_largest

SMALL = "pointwise.cpu_rotation:_start"
"""What compiles in a fifth of a second."""
RACE = f"""
import json, os
from triptych.kernels.precompile import find
entry = find({SMALL!r})
ends = os.pipe()
for _ in range(3):
    if not os.fork():
        entry.address
        os.write(ends[1], b"f" if entry._compiled.cache_hits else b"c")
        os._exit(0)
os.close(ends[1])
print(json.dumps(sorted(open(ends[0]).read())))
"""
TWICE = f"""
import json
from triptych.kernels.precompile import compile_all
groups = [({SMALL!r},), ("block_table_ops:CALLS", "int4.cpu:_start")]
print(json.dumps([sorted(compile_all(groups, 2)) for _ in range(2)]))
"""


def in_empty_cache(code: str, directory: Path) -> object:
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={"NUMBA_CACHE_DIR": str(directory), "PYTHONDONTWRITEBYTECODE": "1"},
        capture_output=True,
        check=True,
        timeout=120,
    )
    return json.loads(done.stdout)


def test_of_processes_that_need_a_function_one_compiles_it(tmp_path: Path) -> None:
    assert in_empty_cache(RACE, tmp_path) == ["c", "f", "f"]


def test_functions_that_were_compiled_are_loaded(tmp_path: Path) -> None:
    assert in_empty_cache(TWICE, tmp_path) == [[True] * 3, [False] * 3]


@pytest.mark.parametrize(
    "name", [name for names in precompile.groups(get_args(KernelNeed)) for name in names]
)
def test_every_name_is_found(name: str) -> None:
    assert isinstance(precompile.find(name), (EntryPoint, CalledKernels))


def fresh(name: str) -> EntryPoint:
    """An entry point that this process has not compiled."""
    known = precompile.find(name)
    return EntryPoint(known._function, known._signature)


def test_what_only_the_compiler_needs_is_not_kept() -> None:
    entry = fresh(SMALL)
    assert entry.address
    compiled: Any = entry._compiled
    assert compiled._library._shared_module is None  # numba's name of it


def test_another_process_that_compiles_is_left_alone() -> None:
    entry = fresh(SMALL)
    path = kernel_cache.kernel_cache_dir() / f"{entry.name}.lock"
    assert entry.address
    assert not entry.compile_if_free()  # it is in the cache
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        began = time.monotonic()
        assert not fresh(SMALL).compile_if_free()
        assert time.monotonic() - began < 5


def test_a_process_that_does_not_go_on_is_not_waited_for_without_end(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(kernel_cache, "LONGEST_WAIT_S", 0.2)
    entry = fresh(SMALL)
    with (kernel_cache.kernel_cache_dir() / f"{entry.name}.lock").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        assert entry.address


def test_without_a_cache_to_write_each_process_compiles(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_args: object, **_named: object) -> None:
        raise PermissionError

    monkeypatch.setattr(Path, "mkdir", refuse)
    assert fresh(SMALL).address


NUMBERS = st.floats(width=32) | st.sampled_from([float("nan"), float("inf"), -float("inf"), 0.0])


@given(arrays.arrays(np.float32, st.integers(1, 90), elements=NUMBERS), st.data())
def test_the_nth_largest_is_that_of_sorting(numbers: np.ndarray, data: st.DataObject) -> None:
    count = data.draw(st.integers(1, len(numbers)))
    expected = np.sort(numbers)[len(numbers) - count]
    zero = np.float32(0)  # added to both: the two zeros are equal, and their order is open
    np.testing.assert_equal(nth_largest(numbers, count) + zero, expected + zero)

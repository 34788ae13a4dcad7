# pyright: basic, reportAttributeAccessIssue=false, reportPrivateImportUsage=false
# numba is untyped.
"""The cache of compiled kernels on disk, and functions that are compiled once for all processes.

Stages of a server are processes that start together and call the same kernels. The first that
needs a function compiles it, the others wait for that and load it.
"""

import fcntl
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import cache, cached_property
from hashlib import sha256
from pathlib import Path
from typing import IO, Any

import numba
from numba import cfunc

from triptych.core.config.cache_dirs import can_write, writable_cache_dir
from triptych.kernels.codegen.compile_time import counted_as_compilation

LONGEST_WAIT_S = 120.0
"""How long a process waits for another one that compiles; then it compiles itself."""
_LOOK_EVERY_S = 0.05
_SETTING = threading.RLock()
"""Held while numba's setting differs from what the user has."""
_KERNELS = Path(__file__).parents[1]


class CalledKernels:
    """Kernels of a module that Python calls; numba compiles them for the types of arguments."""

    def __init__(self, *calls: tuple[Any, tuple[Any, ...]]) -> None:
        """``calls``: kernels, each with the types of the arguments of a call."""
        self.calls, module = calls, calls[0][0].py_func.__module__
        self.name = module.removeprefix("triptych.kernels.")

    def compile_if_free(self) -> bool:
        """Compile the kernels; False: they are in the cache, or another process compiles them."""
        with _file_of(self.name) as file:
            if not _is_ours(file):
                return False
            with cache_of_these_sources():
                for function, arguments in self.calls:
                    function.compile(arguments)
            return any(function.stats.cache_misses for function, _ in self.calls)


class EntryPoint:
    """A function that is called by its address, and compiled when that is first read."""

    def __init__(self, function: Callable[..., Any], signature: Any) -> None:
        self._function, self._signature = function, signature
        self.name = f"{function.__module__.removeprefix('triptych.kernels.')}.{function.__name__}"

    @cached_property
    def address(self) -> int:
        """Address of the machine code, from the cache if it is there."""
        with counted_as_compilation(), _file_of(self.name) as file:
            _wait_for(file)
            return self._compile().address

    def compile_if_free(self) -> bool:
        """Compile the function; False: it is in the cache, or another process compiles it now."""
        with _file_of(self.name) as file:
            return _is_ours(file) and not self._compile().cache_hits

    def _compile(self) -> Any:
        with cache_of_these_sources():
            build = cfunc(self._signature, cache=True, error_model="numpy")
            self._compiled = build(self._function)  # keeps the code loaded
        _drop_bitcode(self._compiled)
        return self._compiled


def _drop_bitcode(compiled: Any) -> None:
    """Free what LLVM would need to inline a function, since one called by address is not inlined.

    It takes 25 MB for the 25 functions of the default model, ten times as much as their code.
    """
    compiled._library._shared_module = None


@contextmanager
def cache_of_these_sources() -> Iterator[None]:
    """Use a cache directory named by the hash of all kernel sources.

    numba detects a change of a function's own file, but not of functions that it calls.
    """
    directory = kernel_cache_dir()
    with _SETTING:
        before = numba.config.CACHE_DIR
        numba.config.CACHE_DIR = str(directory)
        try:
            yield
        finally:
            numba.config.CACHE_DIR = before


@cache
def kernel_cache_dir() -> Path:
    """Below ``NUMBA_CACHE_DIR``, or beside the kernels; where neither can be written, our cache."""
    named = numba.config.CACHE_DIR
    places = [Path(named)] if named else [_KERNELS / "__pycache__"]
    return next(filter(can_write, places), writable_cache_dir()) / _digest()


@cache
def _digest() -> str:
    """Directory name from the hash of all kernel sources; numba adds its version and processor."""
    texts = [path.read_bytes() for path in sorted(_KERNELS.rglob("*.py"))]
    return f"kernels-{sha256(b''.join(texts)).hexdigest()[:16]}"


@contextmanager
def _file_of(name: str) -> Iterator[IO[str] | None]:
    """The file that a process locks while it compiles a function; None without a cache to write.

    The system unlocks it when the process ends, however it ends.
    """
    file = None
    with suppress(OSError):
        directory = kernel_cache_dir()
        directory.mkdir(parents=True, exist_ok=True)
        file = (directory / f"{name}.lock").open("w", encoding="utf-8")
    try:
        yield file
    finally:
        if file is not None:
            file.close()


def _is_ours(file: IO[str] | None) -> bool:
    if file is None:
        return True
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _wait_for(file: IO[str] | None) -> None:
    """Wait until no other process compiles; a process that was stopped does not block this one."""
    end = time.monotonic() + LONGEST_WAIT_S
    while not _is_ours(file) and time.monotonic() < end:
        time.sleep(_LOOK_EVERY_S)

"""``Op``: an operation with a reference in torch and one fast implementation per device."""

from collections.abc import Callable, Generator, Iterable, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from importlib import import_module
from time import perf_counter
from typing import Any, Generic, ParamSpec, TypeVar, cast

import torch
from torch import Tensor

from triptych.core.errors import ConfigError

P = ParamSpec("P")
R = TypeVar("R")

REFERENCE = "reference"

OpObserver = Callable[[str, Mapping[str, Any], float, float], None]
"""Called with an op's name, keyword arguments, begin and end in seconds (``perf_counter``)."""
_observer: OpObserver | None = None


@contextmanager
def observe_ops(observer: OpObserver) -> Generator[None]:
    """Call ``observer`` after each op that this process runs; one observer at a time."""
    global _observer
    if _observer is not None:
        raise ConfigError("ops have an observer already: one profile at a time")
    _observer = observer
    try:
        yield
    finally:
        _observer = None


@dataclass(frozen=True)
class Op(Generic[P, R]):
    """An operation with its reference implementation and its fast ones.

    ``spec`` is the readable definition in torch; every entry of ``fast`` must agree with it. A call
    runs the fast implementation for the device of the tensors. A device without one is an error:
    there is no silent fallback. Tests and benchmarks iterate over ops.
    """

    name: str
    spec: Callable[P, R]
    fast: Mapping[str, str] = field(default_factory=dict[str, str])
    """Device type (``"cpu"``, ``"cuda"``) to ``"module:function"``, imported on first use."""
    loaded: dict[str, Callable[P, R]] = field(
        default_factory=dict[str, Callable[P, R]], init=False, repr=False
    )

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R:
        device, observer = self._device([*args, *kwargs.values()]), _observer
        run = self.on(device)
        if observer is None:
            return run(*args, **kwargs)
        begin_s = _time_on(device)
        try:
            return run(*args, **kwargs)
        finally:
            observer(self.name, kwargs, begin_s, _time_on(device))

    @property
    def backends(self) -> list[str]:
        return [REFERENCE, *self.fast]

    def on(self, backend: str) -> Callable[P, R]:
        """The implementation named ``backend``: ``"reference"`` or a device type.

        Raises:  ConfigError if there is none; it names the op and its backends
        """
        if backend == REFERENCE:
            return self.spec
        if backend not in self.loaded:
            self.loaded[backend] = self._load(backend)
        return self.loaded[backend]

    def _load(self, backend: str) -> Callable[P, R]:
        if backend not in self.fast:
            raise ConfigError(
                f"{self.name} has no {backend!r} backend (have {', '.join(self.backends)}): "
                "move its tensors to a device that has one"
            )
        module, _, function = self.fast[backend].partition(":")
        # The type is that of ``spec``; tests load every entry and compare its results.
        return cast(Callable[P, R], getattr(import_module(module), function))

    def _device(self, values: Iterable[Any]) -> str:
        for value in values:
            if isinstance(value, Tensor):
                return value.device.type
        raise ConfigError(f"{self.name}: no tensor among the arguments, so no device to run on")


def _time_on(device: str) -> float:
    """``perf_counter`` in seconds, after all queued work of the device is done."""
    if device == "cuda":
        torch.cuda.synchronize()
    return perf_counter()

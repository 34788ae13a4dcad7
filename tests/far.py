# torch's hooks for backends in Python have no types.
# pyright: basic
"""A fake device called ``far``: memory of the host that is not to be mixed with other memory.

What a GPU would refuse is refused here: operations on tensors of two devices, and numpy on what is
not on the CPU. Numbers are real, so whole engines run, and kernels run in Triton's interpreter. It
takes the place of a GPU in a process of its own. All is done at once, but it knows what a GPU might
not have done yet: ``FarDevice.pending``. A graph is a list of what was asked while it was captured:
a replay does the same with the same memory, and puts and waits are refused in a capture.
"""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import fields, is_dataclass, replace
from functools import partial
from typing import Any
from weakref import WeakSet

import pytest
import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map
from torch.utils.backend_registration import _setup_privateuseone_for_python_backend

from tests.fake_driver import FakeDriver
from tests.interpreter import round_to_nearest
from triptych.kernels import OPS, Op
from triptych.kernels.triton import launch
from triptych.kernels.triton.launch import Launch
from triptych.kvpool import Arena, DeviceArenas
from triptych.workers.device import Bytes, Captured, Device, Numbers

_setup_privateuseone_for_python_backend("far")

_queue: list[str] = []
"""What was asked since the host waited last."""
_asked: list[str] = []
"""All that was asked: kernels, ``PUT``, ``WAIT``, ``REPLAY``."""
_captured: list[tuple[str, Callable[[], Any]]] | None = None
"""What a graph that is being captured will do, by name; None: no graph is."""

_arenas = WeakSet[DeviceArenas]()
"""Checked before each kernel: the driver raises if this process may not use their memory."""

PUT, WAIT, REPLAY = "put", "wait", "replay"


def _ask(name: str) -> None:
    _queue.append(name)
    _asked.append(name)


def _wait() -> None:
    _refuse_in_graph(WAIT)
    _queue.clear()
    _asked.append(WAIT)


def _refuse_in_graph(name: str) -> None:
    if _captured is not None:
        raise RuntimeError(f"{name}: refused while a graph is captured")


def _keep_in_graph(name: str, work: Callable[[], Any], found: Any) -> None:
    """Do the work in each replay, and write what it returns where the capture has it."""
    if _captured is None:
        return
    kept = [_inner(leaf) for leaf in tree_leaves(found) if isinstance(leaf, Tensor)]

    def again() -> None:
        new = [_inner(leaf) for leaf in tree_leaves(work()) if isinstance(leaf, Tensor)]
        for mine, its in zip(kept, new, strict=True):
            if mine.data_ptr() != its.data_ptr():
                mine.copy_(its)

    _captured.append((name, again))


class FarTensor(Tensor):
    """A tensor on ``far``; ``inner`` has its numbers."""

    inner: Tensor

    @staticmethod
    def __new__(cls, inner: Tensor) -> "FarTensor":
        made = Tensor._make_wrapper_subclass(
            cls,
            inner.shape,
            strides=inner.stride(),
            storage_offset=inner.storage_offset(),
            dtype=inner.dtype,
            device="far:0",
        )
        made.inner = inner
        return made

    def tolist(self) -> Any:
        _wait()
        return self.inner.tolist()

    def numpy(self, *, force: bool = False) -> Any:
        raise TypeError("numpy on a tensor of far: move it to the CPU first")

    def __getitem__(self, index: Any) -> Any:
        return super().__getitem__(_there(index))

    def __setitem__(self, index: Any, value: Any) -> None:
        super().__setitem__(_there(index), value)

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _run(func, args, dict(kwargs or {}))


def _run(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """Do on the host what was asked of far, unless a device would refuse."""
    _ask(str(func))
    if func is torch.ops.aten._local_scalar_dense.default:
        _wait()  # numbers for the host
    if func is torch.ops.aten.copy_.default:
        target, source = _inner(args[0]), _inner(args[1])
        if not isinstance(args[1], FarTensor) and args[1].dim():
            _refuse_in_graph(PUT)
        target.copy_(source)
        _keep_in_graph(str(func), lambda: target.copy_(source), target)
        return args[0]
    inner_args, inner_kwargs = tree_map(_inner, args), tree_map(_inner, kwargs)
    if func is torch.ops.aten._to_copy.default:
        wanted = inner_kwargs.pop("device", None)
        copy = func(*inner_args, **inner_kwargs)
        is_near = wanted is not None and torch.device(wanted).type == "cpu"
        if is_near:
            _wait()
            return copy
        if not isinstance(args[0], FarTensor):
            _refuse_in_graph(PUT)
        _keep_in_graph(str(func), lambda: func(*inner_args, **inner_kwargs), copy)
        return FarTensor(copy)
    for leaf in tree_leaves((args, kwargs)):
        if isinstance(leaf, Tensor) and not isinstance(leaf, FarTensor) and leaf.dim():
            raise RuntimeError(f"{func}: tensors of far and of {leaf.device}")
    if inner_kwargs.get("device") is not None:
        inner_kwargs["device"] = torch.device("cpu")
    found = func(*inner_args, **inner_kwargs)
    _keep_in_graph(str(func), lambda: func(*inner_args, **inner_kwargs), found)
    return tree_map(_outer, found)


def _there(index: Any) -> Any:
    """Lists in an index are moved by torch itself, which does not know devices in Python."""
    if isinstance(index, tuple):
        return tuple(map(_there, index))
    return FarTensor(torch.tensor(index)) if isinstance(index, list) else index


def _inner(value: Any) -> Any:
    return value.inner if isinstance(value, FarTensor) else value


def _outer(value: Any) -> Any:
    return FarTensor(value) if isinstance(value, Tensor) else value


OF_TORCH = ("plan_eviction", "stored_mass_limits")
"""Ops that are calls of torch on a GPU too: the device runs them itself, and counts their waits."""

_library = torch.library.Library("_", "IMPL")  # kept: it ends with its last reference
_library.fallback(lambda func, *args, **kwargs: _run(func, args, kwargs), "PrivateUse1")
_factories = torch.library.Library("aten", "IMPL")
for _name in ("arange", "arange.start", "arange.start_step"):  # torch's own would resize a tensor

    def _arange(*args: Any, device: Any = None, **kwargs: Any) -> Tensor:
        return FarTensor(torch.arange(*args, **kwargs))

    _factories.impl(_name, _arange, "PrivateUse1")


class FarDevice(Device):
    """Computes on far; what it shares with other processes both see at once."""

    name = torch.device("far")
    is_host = False
    can_capture = True

    def __init__(self, free_bytes: int = 1 << 30) -> None:
        self._free_bytes = free_bytes

    @property
    def free_bytes(self) -> int:
        return self._free_bytes

    def share(self, memory: Bytes) -> Tensor:
        return FarTensor(torch.from_numpy(memory))

    def share_arena(self, arena: Arena) -> Tensor:
        if not isinstance(arena, DeviceArenas):
            return super().share_arena(arena)
        assert isinstance(arena.driver, FakeDriver)
        _arenas.add(arena)
        return FarTensor(torch.from_numpy(arena.driver.array(arena)))

    def put(self, numbers: Numbers) -> Tensor:
        _refuse_in_graph(PUT)
        _asked.append(PUT)
        return FarTensor(torch.from_numpy(numbers).clone())

    def put_into(self, target: Tensor, numbers: Numbers) -> None:
        _refuse_in_graph(PUT)
        _asked.append(PUT)
        _inner(target).copy_(torch.from_numpy(numbers))

    def capture(self, work: Callable[[], Tensor], pool: object) -> Captured:
        """Runs the work too, but what it computes is overwritten."""
        global _captured
        _captured = graph = list[tuple[str, Callable[[], Any]]]()
        try:
            output = work()
        finally:
            _captured = None
        _inner(output).fill_(torch.nan)

        def replay() -> None:
            _ask(REPLAY)
            for name, again in graph:
                self.before_each(name)
                again()

        return Captured(replay, output)

    def before_each(self, name: str) -> None:
        """Called in a replay before each part of the graph; a test may end the process here."""

    @property
    def pending(self) -> list[str]:
        """What a GPU may still be at."""
        return list(_queue)

    @property
    def asked(self) -> list[str]:
        """All that was asked so far, in order; what a graph does is one ``REPLAY``."""
        return _asked

    def wait(self) -> None:
        _wait()


@pytest.fixture
def far(monkeypatch: pytest.MonkeyPatch) -> Device:
    """The device, with the kernels of a GPU in Triton's interpreter."""
    round_to_nearest()
    for op in _ops_of_gpus():
        monkeypatch.setitem(op.loaded, "far", op.on("cuda"))
    monkeypatch.setattr(launch, "DEFAULT_PROCESSORS", 1)  # each program takes milliseconds here
    run = Launch.run

    def run_inner(one: Launch) -> None:
        _check_all_far(one.name, tree_leaves(one.arguments))
        _ask(one.name)
        inner = replace(one, arguments=tree_map(_inner, one.arguments))
        run(inner)
        _keep_in_graph(one.name, partial(run, inner), None)

    monkeypatch.setattr(Launch, "run", run_inner)
    monkeypatch.setattr(torch, "inference_mode", torch.no_grad)  # has no place for subclasses
    return FarDevice()


@pytest.fixture(scope="session")
def quick_far() -> Iterator[Device]:
    """The device, with the kernels of the CPU: a hundred times as fast."""
    with pytest.MonkeyPatch.context() as patch:
        yield quick_device(patch)


def quick_device(patch: pytest.MonkeyPatch) -> Device:
    """The device with the kernels of the CPU, in any process."""
    for op in _ops_of_gpus():
        near = partial(_run_near, op.name, op.on("cpu"))
        patch.setitem(op.loaded, "far", op.on("cuda") if op.name in OF_TORCH else near)
    patch.setattr(torch, "inference_mode", torch.no_grad)
    return FarDevice()


def _ops_of_gpus() -> list[Op[..., Any]]:
    return [op for op in OPS.values() if "cuda" in op.fast]


def _run_near(name: str, kernel: Any, *args: Any, **kwargs: Any) -> Any:
    _check_all_far(name, tree_leaves((args, kwargs)))
    _ask(name)
    work = partial(
        _with_slots_only, name, kernel, [*map(_unwrapped, args)],
        {at: _unwrapped(kwargs[at]) for at in kwargs},
    )  # fmt: skip
    found = work()
    _keep_in_graph(name, work, found)
    return _wrapped(found)


def _with_slots_only(name: str, kernel: Any, args: list[Any], kwargs: dict[str, Any]) -> Any:
    """Run a kernel of the CPU, which refuses rows without a slot; a GPU's skip them or give NaN."""
    if name == "append_tokens":
        arena, section, *rows = args
        live = rows[2] >= 0
        return (
            kernel(arena, section, *(row[live] for row in rows), **kwargs) if live.any() else None
        )
    attends = name in ("decode_attention", "attend_rotated", "score_tokens")
    if not attends or (live := args[3] >= 0).all():
        return kernel(*args, **kwargs)
    query, arena, sections, slots, *others = args
    kept = {at: item[live] if at == "positions" else item for at, item in kwargs.items()}
    rest: list[Any] = [each[live] if isinstance(each, Tensor) else each for each in others]
    some = query[live], arena, sections, slots[live], *rest
    if name == "score_tokens":
        return kernel(*some, **kept) if live.any() else None
    dtype: torch.dtype = others[0] if name == "attend_rotated" else torch.float32
    out = torch.full_like(query, torch.nan, dtype=dtype)
    sums = kept.get("lse")
    if live.any():
        if sums is not None:
            kept["lse"] = sums[live]
        out[live] = kernel(*some, **kept)
        if sums is not None:
            sums[live] = kept["lse"]
    return out


def _check_all_far(name: str, values: Iterable[Any]) -> None:
    for arena in [one for one in _arenas if one._address]:
        assert isinstance(arena.driver, FakeDriver)
        arena.driver.check(arena)
    kinds = {type(item) for item in values if isinstance(item, Tensor)}
    assert kinds <= {FarTensor}, f"{name}: tensors of far and of others"


def _unwrapped(value: Any) -> Any:
    """Arguments of a kernel, with tensors anywhere in them."""
    if isinstance(value, list | tuple):
        return [_unwrapped(item) for item in value]
    if not is_dataclass(value) or isinstance(value, type):
        return _inner(value)
    changed = _tensors(value)
    assert all(isinstance(part, FarTensor) for part in changed.values())
    return replace(value, **{name: part.inner for name, part in changed.items()})


def _wrapped(found: Any) -> Any:
    """What a kernel returns, with tensors of far in it."""
    if not is_dataclass(found) or isinstance(found, type):
        return tree_map(_outer, found)
    return replace(found, **{name: FarTensor(part) for name, part in _tensors(found).items()})


def _tensors(value: Any) -> dict[str, Tensor]:
    """Fields of a dataclass that are tensors."""
    parts = {part.name: getattr(value, part.name) for part in fields(value) if part.init}
    return {name: part for name, part in parts.items() if isinstance(part, Tensor)}

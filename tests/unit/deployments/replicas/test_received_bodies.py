"""A replica keeps nothing of a body that the application has read, while its request goes on."""

import asyncio
import gc
import pickle
from collections.abc import Callable
from typing import Any, cast

import pytest
from ray.serve._private import replica
from ray.serve._private.http_util import ASGIReceiveProxy

from triptych.deployments.replicas.received_bodies import (
    FreeingReceiveProxy,
    free_received_bodies,
)

PART = 1 << 20
SCOPE: dict[str, Any] = {"type": "http"}
Make = Callable[..., ASGIReceiveProxy]


class FakeServeProxy:
    """Stands for Ray Serve's proxy: a body in two messages, then what ``then`` says."""

    def __init__(self, then: BaseException | dict[str, Any]) -> None:
        self._then, self._calls = then, 0
        self.left = asyncio.Event()

    async def fetch(self, _metadata: object) -> bytes:
        self._calls += 1
        if self._calls == 1:
            parts = [{"type": "http.request", "body": bytes([65 + i]) * PART} for i in range(2)]
            parts[0]["more_body"], parts[1]["more_body"] = True, False
            return pickle.dumps(parts)
        await self.left.wait()
        if isinstance(self._then, BaseException):
            raise self._then
        return pickle.dumps([self._then])


def held_bytes(task: asyncio.Task[None]) -> int:
    """Bytes that the loop of a proxy keeps while it waits."""
    (frame,) = task.get_stack(limit=1)
    seen, todo, size = set[int](), list(frame.f_locals.values()), 0
    while todo:
        one = todo.pop()
        if id(one) not in seen and isinstance(one, bytes | bytearray | dict | list):
            seen.add(id(one))
            size += len(one) if isinstance(one, bytes | bytearray) else 0
            todo += gc.get_referents(one)
    return size


async def read(make: Make, server: FakeServeProxy) -> tuple[bytes, int, ASGIReceiveProxy]:
    """The body, the bytes that are held after it was read, and the proxy."""
    receive = make(SCOPE, cast("Any", None), server.fetch)
    task = asyncio.create_task(receive.fetch_until_disconnect())
    body, more = bytearray(), True
    while more:
        message = await receive()
        body += message["body"]
        more = message["more_body"]
    del message
    await asyncio.sleep(0.01)
    held = held_bytes(task)
    server.left.set()
    await task
    return bytes(body), held, receive


def test_a_body_that_was_read_is_freed_while_its_request_goes_on() -> None:
    async def run() -> None:
        left = {"type": "http.disconnect"}
        body, held, receive = await read(FreeingReceiveProxy, FakeServeProxy(left))
        assert body == b"A" * PART + b"B" * PART
        assert held == 0
        assert await receive() == await receive() == left

    asyncio.run(run())


def test_ray_serve_itself_keeps_it() -> None:
    """Once this fails, ``received_bodies`` can go."""

    async def run() -> None:
        _, held, _ = await read(ASGIReceiveProxy, FakeServeProxy({"type": "http.disconnect"}))
        assert held > 2 * PART

    asyncio.run(run())


@pytest.mark.parametrize("error", [RuntimeError("the proxy is gone"), KeyError("request")])
def test_errors_of_the_transport_arrive_as_before(error: Exception) -> None:
    async def outcome(make: Make) -> str:
        _, _, receive = await read(make, FakeServeProxy(error))
        try:
            return str(await receive())
        except RuntimeError as raised:
            return repr(raised)

    async def run() -> None:
        assert await outcome(FreeingReceiveProxy) == await outcome(ASGIReceiveProxy)

    asyncio.run(run())


def test_replicas_of_a_process_use_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(replica, "ASGIReceiveProxy", ASGIReceiveProxy)
    free_received_bodies()
    assert replica.ASGIReceiveProxy is FreeingReceiveProxy

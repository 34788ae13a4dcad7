"""A replica of a worker that stops while it starts, and its health between two pools."""

import time
from types import SimpleNamespace
from typing import Any, cast

import pytest

from triptych.deployments.replicas.worker import WorkerReplica


async def test_a_worker_that_has_not_started_stops_at_once() -> None:
    """Serve ends a replica also while it loads its model, and shows what that raises."""
    begun: Any = SimpleNamespace(_reporting=cast("Any", WorkerReplica)._reporting)
    await cast("Any", WorkerReplica).__del__(begun)
    assert begun == SimpleNamespace(_reporting=None)


async def test_a_worker_between_two_pools_is_healthy() -> None:
    """Its loop has ended with the pool before; the next loop is made once a pool is there."""
    loop, pool = SimpleNamespace(is_alive=False), SimpleNamespace(is_lost=False, worker="decode-1")
    worker: Any = SimpleNamespace(_pool=pool, _loop=loop, _lost_since=time.monotonic())
    check = cast("Any", WorkerReplica).check_health
    await check(worker)
    worker._lost_since = 0.0
    with pytest.raises(RuntimeError, match="decode-1: the compute loop ended"):
        await check(worker)

"""A replica of a worker that stops while it starts."""

from types import SimpleNamespace
from typing import Any, cast

from triptych.deployments.replicas.worker import WorkerReplica


async def test_a_worker_that_has_not_started_stops_at_once() -> None:
    """Serve ends a replica also while it loads its model, and shows what that raises."""
    begun: Any = SimpleNamespace(_reporting=cast("Any", WorkerReplica)._reporting)
    await cast("Any", WorkerReplica).__del__(begun)

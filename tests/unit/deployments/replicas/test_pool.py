"""The pool's shell, without Ray."""

import shutil
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from triptych.core.config import AppConfig
from triptych.core.layout import Geometry
from triptych.core.pages import PagePlan
from triptych.deployments.app_plan import AppPlan
from triptych.deployments.replicas.pool import PoolReplica
from triptych.kvpool import PREFIX_WORKER, PoolClient

ARGS = {"pool": {"kv_cache_memory_bytes": 16 << 20, "prefix_bytes": 4 << 20}}


@pytest.fixture
def plan() -> Iterator[AppPlan]:
    path = Path(tempfile.mkdtemp(prefix="t-"))  # the path of a socket must be short
    config = AppConfig.from_mapping(ARGS)
    geometry = Geometry(layers=2, kv_heads=2, head_dim=64)
    yield AppPlan(
        config=config,
        model_path=path,
        pages=PagePlan.of(config, geometry),
        context_tokens=64,
        revision="",
        run_dir=path / "run",
        token="a token of the tests",
    )
    shutil.rmtree(path, ignore_errors=True)


def test_it_waits_for_workers_to_leave_and_not_for_its_own_prefixes(
    plan: AppPlan, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Pool(PoolReplica):
        def __del__(self) -> None:
            pass

    shell = Pool(plan)
    worker, waits = PoolClient(plan.pool_address, "decode-1"), list[float]()

    def leave(seconds: float) -> None:
        waits.append(seconds)
        worker.close()

    monkeypatch.setattr(time, "sleep", leave)
    assert PREFIX_WORKER in {line.name for line in worker.stat().workers}
    PoolReplica.__del__(shell)
    assert len(waits) == 1

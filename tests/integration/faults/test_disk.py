"""Prefixes on disk, in the server's own processes: the pool that kept them is killed."""

import random
from pathlib import Path

import pytest

from tests.integration.faults.cluster import Cluster
from tests.tiny import save_tiny_model
from triptych.core.messages import Request, Sampling


@pytest.mark.timeout(240)
async def test_what_a_killed_pool_kept_comes_back(tmp_path: Path) -> None:
    model, folder = tmp_path / "model", tmp_path / "tier"
    model.mkdir()
    request = Request(
        id="",
        prompt=tuple(random.Random(0).choices(range(2, 250), k=220)),
        sampling=Sampling(max_tokens=8, temperature=0.0, ignore_eos=True),
        reply_to="",
    )
    disk = {"disk_path": str(folder), "disk_bytes": 64 << 20}
    async with Cluster(save_tiny_model(model), **disk) as cluster:
        assert (await cluster.answer(request, "s")).ending == "length"
        await cluster.settled()
        kept = cluster.ledger().prefix.blocks
        assert kept > 0
        await cluster.until(lambda: cluster.ledger().disk.stored == kept, "all is written")
        arena = cluster.ledger().arena
        cluster.kill("pool")
        await cluster.until(lambda: bool(cluster.deaths), "the death is seen")
        await cluster.settled()
        found = cluster.ledger()
        assert found.arena != arena
        assert (found.prefix.blocks, found.disk.objects) == (0, kept)
        assert (await cluster.answer(request, "s")).ending == "length"
        await cluster.until(lambda: cluster.ledger().disk.loaded == kept, "all came back")
        await cluster.settled()

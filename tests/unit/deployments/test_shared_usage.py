"""Limits of keys that several ingress replicas count together, also after one of them died."""

import subprocess
import sys
from collections.abc import AsyncGenerator
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.unit.deployments.http.test_keys import entry, start, write
from triptych.core.errors import TooManyRequests
from triptych.deployments.http.keys import Client, KeyRing
from triptych.deployments.replicas.shared_usage import SharedUsage
from triptych.kvpool.pool.processes import this_process

OTHER = replace(this_process(), space="another machine")
"""A process that counts as alive, as it cannot be seen from here."""

HOLD = """
import sys
from pathlib import Path
from triptych.deployments.replicas.shared_usage import SharedUsage

with SharedUsage(Path(sys.argv[1])).change(sys.argv[2]) as use:
    use.running += 3
print("counted", flush=True)
sys.stdin.read()
"""


def replicas(tmp_path: Path, **limits: int) -> tuple[list[Client], list[float]]:
    """The client of one key at two replicas, and their clock."""
    path, now = write(tmp_path / "keys.yaml", entry("ada", **limits)), [100.0]
    usages = SharedUsage(tmp_path / "use"), SharedUsage(tmp_path / "use", OTHER)
    rings = [KeyRing(path, clock=lambda: now[0], usage=usage) for usage in usages]
    return [ring.client("Bearer ada-key", counts=False) for ring in rings], now


async def test_requests_at_a_time_are_counted_at_all_replicas(tmp_path: Path) -> None:
    (one, two), _ = replicas(tmp_path, max_concurrent_requests=4)
    first, second = await start(one, 3), await start(two, 1)
    for client in (one, two):
        with pytest.raises(TooManyRequests, match="4 requests at a time"):
            await start(client, 1)
    await first.aclose()
    third = await start(two, 3)
    with pytest.raises(TooManyRequests):
        await start(one, 1)
    for running in (second, third):
        await running.aclose()
    await (await start(one, 4)).aclose()


async def test_requests_a_minute_are_counted_at_all_replicas(tmp_path: Path) -> None:
    (one, two), now = replicas(tmp_path, requests_per_minute=6)
    for client in (one, two) * 3:
        client.count()
    with pytest.raises(TooManyRequests) as caught:
        two.count()
    assert caught.value.retry_after_s == pytest.approx(10)
    now[0] += 10
    one.count()
    with pytest.raises(TooManyRequests):
        two.count()


async def test_a_request_over_the_rate_does_not_count_as_running(tmp_path: Path) -> None:
    (one, two), now = replicas(tmp_path, max_concurrent_requests=2, requests_per_minute=2)
    one.count(2)
    with pytest.raises(TooManyRequests, match="a minute"):
        await start(two, 2)
    now[0] += 60
    await (await start(one, 2)).aclose()


def test_requests_of_a_dead_replica_do_not_count(tmp_path: Path) -> None:
    usage = SharedUsage(tmp_path / "use")
    other = subprocess.Popen(
        [sys.executable, "-c", HOLD, str(tmp_path / "use"), "key"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    assert other.stdout is not None
    assert other.stdout.readline() == b"counted\n"
    with usage.change("key") as use:
        assert use.running == 3
        use.running += 1
    other.kill()
    other.communicate()
    with usage.change("key") as use:
        assert use.running == 1


@given(steps=st.lists(st.tuples(st.booleans(), st.integers(1, 3), st.booleans()), max_size=30))
async def test_the_limit_holds_whatever_the_order(
    steps: list[tuple[bool, int, bool]], tmp_path_factory: pytest.TempPathFactory
) -> None:
    clients, _ = replicas(tmp_path_factory.mktemp("keys"), max_concurrent_requests=4)
    running = list[tuple[AsyncGenerator[None], int]]()
    for at_second, choices, ends in steps:
        if ends and running:
            await running.pop(0)[0].aclose()
            continue
        total = sum(count for _, count in running)
        try:
            running.append((await start(clients[at_second], choices), choices))
        except TooManyRequests:
            assert total + choices > 4
        else:
            assert total + choices <= 4
    for one, _ in running:
        await one.aclose()

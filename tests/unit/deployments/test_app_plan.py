"""What of the pool requests may book, and what is said when it is too little."""

from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from triptych.core.config import AppConfig
from triptych.core.errors import ConfigError, ModelError
from triptych.core.layout import Geometry
from triptych.core.messages import Report
from triptych.core.pages import PagePlan
from triptych.core.shards import shard_of
from triptych.deployments.app_plan import AppPlan
from triptych.deployments.http.metrics import IngressMetrics
from triptych.deployments.http.vllm_metrics import aliases
from triptych.deployments.monitoring.status import Status
from triptych.kvpool import DiskStats, LocalPool, Namespace, PrefixSettings, Publication
from triptych.router import RouterSnapshot
from triptych.router.state.request_table import State

CAPACITY = 128 << 20
LONG = 131_072


def plan(**pool: object) -> AppPlan:
    config = AppConfig.from_mapping({"pool": {"kv_cache_memory_bytes": CAPACITY, **pool}})
    return AppPlan(
        config=config,
        model_path=Path(),
        pages=PagePlan.of(config, Geometry(layers=30, kv_heads=3, head_dim=64)),
        context_tokens=8192,
        revision="hash",
        run_dir=Path(),
    )


def test_requests_book_neither_stocks_nor_prefixes() -> None:
    with_cache, without = plan(), plan(prefix_bytes=0)
    assert without.bookable_bytes - with_cache.bookable_bytes == CAPACITY // 4
    page = with_cache.pages.page_bytes
    taken = 3 * 2 * 1024 * page + CAPACITY // 4
    assert with_cache.bookable_bytes == CAPACITY // page * page - taken
    with_cache.check()
    without.check()


def test_with_arenas_on_gpus_the_prefix_cache_takes_none_of_what_requests_book() -> None:
    here, there = plan(), plan(arena="device")
    assert there.bookable_bytes - here.bookable_bytes == here.pages.prefix_bytes
    assert there.host_arena_bytes > here.pages.prefix_bytes
    assert (here.pages.share_pages, there.pages.share_pages) == (True, False)
    with pytest.raises(ConfigError, match=r"decode has no GPU.*decode\.actor\.num_gpus"):
        there.check()
    stages = {name: {"actor": {"num_gpus": 1}} for name in ("prefill", "compressor", "decode")}
    settings = {"pool": {"kv_cache_memory_bytes": CAPACITY, "arena": "device"}, **stages}
    replace(there, config=AppConfig.from_mapping(settings)).check()


@pytest.mark.parametrize(
    ("pool", "says"),
    [
        ({"extent_pages": 4000}, "pool.extent_pages=4000: 3 workers"),
        ({"prefix_bytes": CAPACITY // 2 + CAPACITY // 8}, "for requests, less than a quarter"),
    ],
)
def test_too_little_for_requests_is_an_error(pool: dict[str, object], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        plan(**pool).check()


def of_context(context_tokens: int, **settings: object) -> AppPlan:
    config = shard_of(AppConfig.from_mapping(settings), 0)
    geometry = Geometry(layers=30, kv_heads=3, head_dim=64)
    return replace(
        plan(),
        config=config,
        pages=PagePlan.of(config, geometry, is_plain=True),
        context_tokens=context_tokens,
        shards=AppConfig.from_mapping(settings).router.shards,
    )


def test_a_context_that_the_pool_holds_is_served_whole() -> None:
    pool = {"kv_cache_memory_bytes": CAPACITY}
    fine = of_context(2048, pool=pool)
    assert (fine.max_model_len, fine.longest_request_tokens) == (2048, 2048)
    assert fine.context_warning == ""
    in_windows = of_context(2048, pool=pool, model={"max_model_len": 100_000})
    assert (in_windows.max_model_len, in_windows.context_warning) == (100_000, "")


@given(
    st.fixed_dictionaries(
        {"kv_cache_memory_bytes": st.sampled_from([CAPACITY, 2 * CAPACITY])},
        optional={"prefix_bytes": st.sampled_from([0, 1 << 22]), "extent_pages": st.just(64)},
    ),
    st.sampled_from([1, 2]),
    st.sampled_from(["uniform:k8v4", "uniform:fp16", "diffkv"]),
)
def test_a_context_that_the_pool_does_not_hold_is_said_and_bounded(
    pool: dict[str, int], shards: int, policy: str
) -> None:
    actor = {"actor": {"num_replicas": shards}}
    settings = {
        "prefill": actor,
        "compressor": {"policy": policy, **actor},
        "decode": actor,
        "router": {"shards": shards},
    }
    small = of_context(LONG, pool=pool, **settings)
    served = small.max_model_len
    assert 100 < served <= small.longest_request_tokens < LONG
    warning = small.context_warning
    assert f"requests of up to {served} tokens, less than the context of {LONG}" in warning
    assert f"set model.max_model_len to {served}" in warning
    assert of_context(served, pool=pool, **settings).context_warning == ""
    raised = int(warning.split("raise it to ")[1].split()[0])
    more = {**pool, "kv_cache_memory_bytes": raised}
    assert of_context(LONG, pool=more, **settings).context_warning == ""


def test_a_worker_that_loads_other_files_is_refused() -> None:
    """It would publish pages of the new weights under the key of the old ones."""
    plan().check_revision("hash")
    with pytest.raises(ModelError, match=r"changed since .*revision other.*restart"):
        plan().check_revision("other")


IDLE = RouterSnapshot(
    requests={},
    booked_bytes={},
    capacity_bytes=0,
    blocked_reason="",
    oldest_waiting_s=0.0,
    counters={},
    workers=(),
)


def test_a_request_is_running_or_waiting() -> None:
    """As in vLLM, so their sum is the requests that clients wait for."""
    counts = {state: 2**index for index, state in enumerate(State)}
    gauges = Status(replace(IDLE, requests=counts), (), ()).gauges()
    assert gauges["triptych_num_requests_waiting"] == counts[State.WAITING]
    running = sum(counts.values()) - counts[State.WAITING] - counts[State.LEAVING]
    assert gauges["triptych_num_requests_running"] == running
    assert b"num_requests_running" not in IngressMetrics().exposition({})
    text = IngressMetrics().exposition(gauges).decode()
    assert f'vllm:num_requests_running{{model_name="m",engine="0"}} {running}.0' in aliases(
        text, "m"
    )


def test_the_usage_of_the_cache_is_what_requests_hold() -> None:
    """As in vLLM: not what is booked for them."""
    counters = {"preempted": 1, "growth:evicted": 2, "growth:booked": 5}
    router = replace(
        IDLE, booked_bytes={"a": 60, "b": 20}, held_bytes=25, capacity_bytes=100, counters=counters
    )
    gauges = Status(router, (), ()).gauges()
    assert gauges["triptych_kv_cache_usage_perc"] == 0.25
    assert gauges["triptych_num_preemptions"] == 3
    text = IngressMetrics().exposition(gauges).decode()
    assert 'vllm:num_preemptions_total{model_name="m",engine="0"} 3.0' in aliases(text, "m")


def test_metrics_tell_of_prefixes() -> None:
    settings = PrefixSettings(block_tokens=2, total_bytes=4096, tenant_bytes=4096)
    space = Namespace(salt=b"", model="m", revision="", profile="p")
    with LocalPool(16, 256, "w", settings) as pool:
        new = Publication(
            namespace=space, tokens=[1, 2], blocks=[pool.allocate(3)], seconds=0.1, tenant=""
        )
        assert pool.publish_prefix(new) == 1
        assert pool.find_prefix(space, [1, 2, 3]) is not None
        assert pool.find_prefix(space, [5, 6, 7, 8]) is None
        ledger = pool.stat()
    gauges = Status(IDLE, (ledger,), ()).gauges()
    assert not [name for name in gauges if "disk" in name]
    assert gauges["triptych_prefix_cache_queries"] == 7
    assert gauges["triptych_prefix_cache_hits"] == 2
    assert gauges['triptych_prefix_lookups{result="hit"}'] == 1
    assert gauges['triptych_prefix_lookups{result="miss"}'] == 1
    assert gauges["triptych_pool_pages_in_requests"] == 0
    assert gauges["triptych_pool_pages_in_prefixes"] == 3
    assert (gauges["triptych_prefix_blocks"], gauges["triptych_prefix_bytes"]) == (1, 768)


def test_metrics_tell_of_the_disk_and_of_what_was_not_kept() -> None:
    with LocalPool(16, 256, "w") as pool:
        ledger = pool.stat()
    disk = DiskStats(objects=3, capacity_bytes=9, damaged=1, skipped={"queue_full": 4})
    report = Report(
        name="c",
        running=0,
        waiting=0,
        pages_held=0,
        busy_s=0.0,
        prefixes_skipped={"PoolExhausted": 2},
    )
    gauges = Status(IDLE, (replace(ledger, disk=disk),), (report,)).gauges()
    assert gauges["triptych_disk_up"] == 1
    assert (gauges["triptych_disk_objects"], gauges["triptych_disk_damaged"]) == (3, 1)
    assert gauges['triptych_disk_skipped{reason="queue_full"}'] == 4
    assert gauges['triptych_prefix_skipped{worker="c",reason="PoolExhausted"}'] == 2
    gauges = Status(IDLE, (replace(ledger, disk=DiskStats(fault="full")),), ()).gauges()
    assert gauges["triptych_disk_up"] == 0


def test_metrics_are_sums_over_the_pools_of_all_nodes() -> None:
    """But for how large a page is, and whether all disks work."""
    with LocalPool(8, 64) as pool:
        ledger = pool.stat()
    good = replace(ledger, arena="a", disk=DiskStats(capacity_bytes=100, objects=2))
    bad = replace(good, arena="b", disk=DiskStats(capacity_bytes=100, fault="full"))
    gauges = Status(IDLE, (good, bad), ()).gauges()
    assert gauges["triptych_pool_up"] == 1
    assert gauges["triptych_pool_pages"] == 16
    assert gauges["triptych_pool_page_bytes"] == 64
    assert gauges["triptych_disk_capacity_bytes"] == 200
    assert gauges["triptych_disk_objects"] == 2
    assert gauges["triptych_disk_up"] == 0
    assert Status(IDLE, (good, good), ()).gauges()["triptych_disk_up"] == 1
    assert Status(IDLE, (good, None), ()).gauges()["triptych_pool_up"] == 0

"""What the dashboard is told: pages with their formats and owners, and nothing that grows."""

import base64
import json
from dataclasses import replace
from typing import cast

import numpy as np
import pytest

from triptych.core.handles import KVHandle, LeaseId, LeaseRef, PageRun
from triptych.core.messages import CompressionReport, Report
from triptych.deployments.monitoring.dashboard_state import (
    SHOWN_PAGES,
    DashboardState,
    page_kinds,
    page_owners,
)
from triptych.deployments.monitoring.status import Status
from triptych.kvpool import PREFIX_WORKER, OwnerPages, PageMap, PoolStats, WorkerStats
from triptych.kvpool.rpc import page_ranges
from triptych.router import RequestTrace, RouterSnapshot, WorkerLoad

PAGES = 40


def owner(kind: str, worker: str, label: str = "") -> OwnerPages:
    return OwnerPages(kind=kind, worker=worker, label=label)  # pyright: ignore[reportArgumentType]


def page_map(entries: list[int], *owners: OwnerPages, stride: int = 1, pages: int = 0) -> PageMap:
    return PageMap(
        arena="here",
        pages=pages or len(entries) * stride,
        stride=stride,
        owners=owners,
        packed=np.array(entries, "<u2").tobytes(),
    )


def handle(arena: str = "here", **formats: list[int]) -> KVHandle:
    packed = tuple(
        PageRun(name, b"", page_ranges.pack(np.array(ids, np.int32)))
        for name, ids in formats.items()
    )
    return KVHandle(LeaseRef(arena, LeaseId(1), 1), packed, 10)


def trace(number: int, name: str = "secret-id") -> RequestTrace:
    return RequestTrace(
        request=name,
        number=number,
        attempt=0,
        prompt_tokens=5,
        max_tokens=9,
        steps=(("waiting", 1.0), ("prefilling", 2.5)),
        end="finished",
        ended=3.0,
        tokens=4,
        report=CompressionReport(policy="diffkv", raw_bytes=30, stored_bytes=10),
    )


def names(pages: PageMap, handles: dict[str, KVHandle]) -> list[str]:
    kinds, entries = page_kinds(pages, handles)
    return [kinds[entry] for entry in entries]


def test_every_page_has_the_kind_of_its_owner_and_the_format_of_its_handle() -> None:
    pages = page_map(
        [0, 1, 2, 2, 2, 3, 0, 3],
        owner("extent", "decode-1"),
        owner("request", "decode-1", "r"),
        owner("request", PREFIX_WORKER, PREFIX_WORKER),
    )
    expected = ["free", "stock", "k8v4", "fp16", "request", "prefix", "free", "prefix"]
    assert names(pages, {"r": handle(k8v4=[2], fp16=[3])}) == expected


def test_pages_that_moved_on_since_the_handle_was_made_are_not_coloured_by_it() -> None:
    pages = page_map(
        [0, 1, 2, 3],
        owner("request", "d", "r"),
        owner("request", "d", "other"),
        owner("extent", "d"),
    )
    assert names(pages, {"r": handle(k8v4=[0, 1, 2, 3])}) == ["free", "k8v4", "request", "stock"]


def test_pages_of_the_prefix_cache_that_a_request_reads_have_their_format() -> None:
    pages = page_map(
        [1, 2, 2, 0],
        owner("request", "d", "r"),
        owner("request", PREFIX_WORKER, PREFIX_WORKER),
    )
    assert names(pages, {"r": handle(k8v8=[0], k8v4=[1])}) == ["k8v8", "k8v4", "prefix", "free"]


@pytest.mark.parametrize(
    "stale",
    [
        handle("gone", k8v4=[1]),
        handle(k8v4=[10**6]),
        KVHandle(LeaseRef("here", LeaseId(1), 1), (PageRun("k8v4", b"", b"odd"),), 1),
    ],
)
def test_a_handle_that_does_not_fit_the_arena_colours_nothing(stale: KVHandle) -> None:
    pages = page_map([1, 1], owner("request", "d", "r"))
    assert names(pages, {"r": stale}) == ["request", "request"]


def test_of_a_large_pool_the_shown_pages_alone_are_coloured() -> None:
    pages = page_map([1, 1, 0], owner("request", "d", "r"), stride=10)
    assert names(pages, {"r": handle(k4v2=[0, 1, 2, 11, 19])}) == ["k4v2", "request", "free"]


def test_owners_are_workers_by_place_and_requests_by_number() -> None:
    pages = page_map(
        [0, 1, 2, 3, 4, 5],
        owner("extent", "b"),
        owner("request", "a", "r"),
        owner("request", "a", "forgotten"),
        owner("request", PREFIX_WORKER, PREFIX_WORKER),
        owner("request", "a", "late"),
    )
    owners = page_owners(pages, ["a", "b", PREFIX_WORKER], {"r": 7, "late": 2**16 + 3})
    assert owners.tolist() == [0, 1, 7, 0, 0, 3]


def board(
    pages: PageMap | None, traces: tuple[RequestTrace, ...] = (), **handles: KVHandle
) -> DashboardState:
    snapshot = RouterSnapshot(
        requests={"waiting": 1},
        booked_bytes={"here": 5},
        capacity_bytes=9,
        blocked_reason="",
        oldest_waiting_s=0.5,
        counters={"failed:rate_limit_exceeded": 2},
        workers=(
            WorkerLoad(
                name="d",
                address="unix:/secret/path",
                arena="here",
                stages=("decode",),
                is_full=False,
            ),
        ),
    )
    ledger = PoolStats(
        arena="here",
        pages=PAGES,
        page_bytes=256,
        free_pages=30,
        extent_pages=4,
        request_pages=6,
        workers=(
            WorkerStats(name="d", pid=1, extent_pages=4, request_pages=6, requests=1, silent_s=0),
        ),
        by_request={"secret-id": 6},
        allocated_total=9,
        reclaimed_pages_total=0,
        reclaimed_workers_total=0,
    )
    report = Report(name="d", running=2, waiting=1, pages_held=3, busy_s=1.5)
    return DashboardState(
        Status(snapshot, (ledger if pages else None,), (report,)),
        pages,
        traces,
        handles,
        {"d": 0.5},
        4.0,
    )


def test_the_snapshot_is_json_and_names_no_request_and_no_path() -> None:
    pages = page_map([0, 1], owner("request", "d", "secret-id"))
    text = json.dumps(board(pages, (trace(7),), **{"secret-id": handle(fp16=[1])}).json())
    assert "secret" not in text
    seen = json.loads(text)
    assert base64.b64decode(seen["map"]["owner_of"]) == np.array([0, 7], "<u2").tobytes()
    assert seen["map"]["kinds"][base64.b64decode(seen["map"]["kind_of"])[1]] == "fp16"
    [one] = seen["requests"]
    assert one["steps"] == [["waiting", 3.0], ["prefilling", 1.5]]
    assert (one["number"], one["ended"], one["stored_bytes"]) == (7, 1.0, 10)
    [worker] = seen["workers"]
    assert (worker["name"], worker["running"], worker["report_age_s"]) == ("d", 2, 0.5)


def test_without_a_pool_the_rest_is_there() -> None:
    seen = board(None).json()
    assert (seen["pool"], seen["map"]) == (None, None)
    assert seen["workers"]


def test_of_several_pools_the_one_with_the_map_is_shown() -> None:
    whole = board(page_map([0]))
    here = whole.status.pools[0]
    assert here is not None
    far = replace(here, arena="far", free_pages=1)
    for pools in ((far, here), (here, far), (None, here)):
        seen = replace(whole, status=replace(whole.status, pools=pools)).json()
        assert cast("dict[str, object]", seen["pool"])["free"] == here.free_pages
    unseen = replace(whole, pages=None, status=replace(whole.status, pools=(far, here))).json()
    assert unseen["pool"] is None


def test_a_full_snapshot_stays_below_a_quarter_of_a_mebibyte() -> None:
    """The largest snapshot: each page of another request, and as many traces as are kept."""
    owners = [owner("request", "d", f"chatcmpl-{'0' * 32}-{n}") for n in range(SHOWN_PAGES)]
    pages = page_map(list(range(1, SHOWN_PAGES + 1)), *owners, stride=1000)
    steps = tuple(("compressing", 1234.567) for _ in range(8))
    traces = tuple(
        RequestTrace(
            request=str(n), number=n, attempt=5, prompt_tokens=8192, max_tokens=8192, steps=steps
        )
        for n in range(10**6, 10**6 + 256)
    )
    assert len(json.dumps(board(pages, traces).json())) < 256 << 10

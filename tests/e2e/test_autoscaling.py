"""A stage grows with its load and shrinks while a stream is open."""

import time
from collections.abc import Callable
from typing import Any

import pytest

pytestmark = pytest.mark.e2e

DELAYS = {"upscale_delay_s": 1, "downscale_delay_s": 5}


def test_decode_workers_come_with_a_crowd_and_go_while_a_stream_is_open(
    start: Callable[..., Any],
) -> None:
    scaling = {"min_replicas": 1, "max_replicas": 2, **DELAYS}
    server = start(decode={"max_num_seqs": 4, "autoscaling": scaling})

    def decode_workers() -> float:
        return server.metrics("triptych_workers").get('stage="decode"', 0.0)

    crowds = list[Any]()
    deadline = time.monotonic() + 120
    while decode_workers() < 2:
        assert time.monotonic() < deadline
        crowds.append(server.crowd([f"Story {n}. Once upon a time" for n in range(10)], 60))
        crowds[-1].join()
    stream = server.crowd(["A long story. Once upon a time"], 3000)
    server.wait_until(lambda: decode_workers() == 1, 90)
    assert not stream.endings[0], "the stream ended before a worker left"
    assert stream.join() == {"length": 1}
    assert stream.chunks[0] >= 3000
    assert [set(crowd.endings) for crowd in crowds] == [{"length"}] * len(crowds)
    server.wait_until(lambda: server.metric("triptych_router_booked_bytes") == 0.0, 10)

"""Times of stages and the size of the cache, as gateways and dashboards of vLLM read them."""

from dataclasses import replace

import pytest
from prometheus_client.parser import text_string_to_metric_families

from triptych.deployments.http.metrics import CacheBlocks, IngressMetrics
from triptych.deployments.http.vllm_metrics import aliases
from triptych.deployments.monitoring.status import Status
from triptych.router import RouterSnapshot
from triptych.router.state.stage_times import StageTimes

IDLE = RouterSnapshot(
    requests={},
    booked_bytes={},
    capacity_bytes=0,
    blocked_reason="",
    oldest_waiting_s=0.0,
    counters={},
    workers=(),
)


def test_times_of_stages_are_histograms_summed_over_shards() -> None:
    times = StageTimes()
    for seconds in (0.004, 0.02, 9000.0):
        times.add("queue", seconds)
    one = Status(replace(IDLE, stage_times=times.snapshot()), (), ())
    text = IngressMetrics().exposition(Status.of([one, one]).gauges()).decode()
    found = {family.name: family for family in text_string_to_metric_families(text)}
    queue = found["triptych_request_queue_time_seconds"]
    assert queue.type == "histogram"
    counts = {sample.labels.get("le"): sample.value for sample in queue.samples}
    assert (counts["0.01"], counts["0.025"], counts["7680.0"], counts["+Inf"]) == (2, 4, 4, 6)
    assert queue.samples[-1].value == pytest.approx(2 * 9000.024)
    assert "# TYPE vllm:request_queue_time_seconds histogram" in aliases(text, "m")


def test_the_size_of_the_cache_is_told_in_blocks() -> None:
    text = IngressMetrics(cache=CacheBlocks(block_size=64, num_gpu_blocks=9)).exposition({})
    line = (
        'vllm:cache_config_info{model_name="m",engine="0",block_size="64",num_gpu_blocks="9"} 1.0'
    )
    assert line in aliases(text.decode(), "m")

"""Metrics of several ingress replicas behind one port: whoever is scraped tells those of all."""

import subprocess
import sys
from dataclasses import replace
from pathlib import Path

from prometheus_client.parser import text_string_to_metric_families as families_of

from triptych.deployments.http.metrics import CacheBlocks, IngressMetrics, LabelledSample
from triptych.deployments.replicas.shared_metrics import ENDED, SharedMetrics
from triptych.kvpool.pool.processes import this_process

BLOCKS = CacheBlocks(block_size=64, num_gpu_blocks=9)
OTHER = replace(this_process(), pid=1, space="another machine")
"""A process that counts as alive, as it cannot be seen from here."""
COUNT = """
import sys
from pathlib import Path
from triptych.deployments.http.metrics import IngressMetrics
from triptych.deployments.replicas.shared_metrics import SharedMetrics

shared, metrics = SharedMetrics(Path(sys.argv[1])), IngressMetrics(("diffkv",))
metrics.success.labels("stop").inc(5)
metrics.open.inc(3)
shared.write(metrics.samples())
print("counted", flush=True)
sys.stdin.read()
"""


def figures(metrics: IngressMetrics) -> dict[tuple[str, str], float]:
    """All numbers that a scrape of a replica gives, by name and labels."""
    text = metrics.exposition({"triptych_gauge": 1.0}).decode()
    return {
        (one.name, ",".join(f"{name}={label}" for name, label in sorted(one.labels.items()))): (
            one.value
        )
        for family in families_of(text)
        for one in family.samples
    }


def replica(path: Path) -> IngressMetrics:
    shared = SharedMetrics(path)
    return IngressMetrics(("diffkv",), BLOCKS, shared.others)


def test_a_scrape_adds_the_counts_of_the_other_replicas(tmp_path: Path) -> None:
    shared, theirs = SharedMetrics(tmp_path, OTHER), IngressMetrics(("diffkv",), BLOCKS)
    theirs.success.labels("stop").inc(2)
    theirs.rejections.labels("only_there").inc()
    theirs.first_token.observe(0.03)
    theirs.open.inc(4)
    shared.write(theirs.samples())
    own = replica(tmp_path)
    own.success.labels("stop").inc()
    own.first_token.observe(0.3)
    own.open.inc()
    found = figures(own)
    assert found["triptych_request_success_total", "finished_reason=stop"] == 3
    assert found["triptych_admission_rejections_total", "reason=only_there"] == 1
    assert found["triptych_num_requests_open", ""] == 5 == own.load
    assert own.in_progress == 1
    assert found["triptych_time_to_first_token_seconds_count", ""] == 2
    assert found["triptych_time_to_first_token_seconds_bucket", "le=0.04"] == 1
    assert found["triptych_time_to_first_token_seconds_bucket", "le=+Inf"] == 2
    assert found["triptych_cache_config_info", "block_size=64,num_gpu_blocks=9"] == 1
    assert found["triptych_gauge", ""] == 1
    assert figures(IngressMetrics(("diffkv",), BLOCKS)).keys() <= found.keys()


def test_counts_of_a_replica_that_died_stay_and_its_requests_do_not(tmp_path: Path) -> None:
    own = replica(tmp_path)
    with subprocess.Popen(
        [sys.executable, "-c", COUNT, str(tmp_path)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "counted\n"
        assert own.load == 3
        process.kill()
    success = "triptych_request_success_total", "finished_reason=stop"
    assert (own.load, figures(own)[success]) == (0, 5)
    for _ in range(2):  # whoever starts moves what is left of the dead into one file
        later = replica(tmp_path)
        assert (later.load, figures(later)[success], figures(own)[success]) == (0, 5, 5)
        assert {path.name for path in tmp_path.iterdir()} == {ENDED, "lock"}


def test_gathered_counts_add_up(tmp_path: Path) -> None:
    dead = replace(this_process(), started=1)
    for pid in (101, 102, 103):
        shared = SharedMetrics(tmp_path, replace(dead, pid=pid))
        sample = LabelledSample("f", "f_total", (("a", "b"),), is_gauge=False, value=2.0)
        shared.write([sample, LabelledSample("g", "g", (), is_gauge=True, value=7.0)])
    assert sum(one.value for one in SharedMetrics(tmp_path).others()) == 6
    assert len(SharedMetrics(tmp_path).others()) == 1

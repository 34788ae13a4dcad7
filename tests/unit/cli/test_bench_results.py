"""Result files: what is written is what vLLM's tools read, and what is read back is the same."""

import asyncio
import json
from pathlib import Path

import pytest

from tests.unit.cli.fake_openai import FakeOpenAI, serving
from triptych.cli.measure.bench import save_details, workload_fields
from triptych.cli.measure.bench_results import compare
from triptych.core.errors import ConfigError
from triptych.loadgen.measure import Level, ServeBenchmark, measure
from triptych.loadgen.report.gauges import Series, read_gauges
from triptych.loadgen.report.plot import curve, plot_all
from triptych.loadgen.report.results import read_results
from triptych.loadgen.report.sample import Chunk, Sample
from triptych.loadgen.report.stats import Slo, goodput_per_gb, most_at_once
from triptych.loadgen.run import Run
from triptych.loadgen.workload.openai_requests import Workload

WORKLOAD = Workload(model="fake", prompt_tokens=16, output_tokens=4)
VLLM_NAMES = set(
    """
date endpoint_type backend label model_id tokenizer_id num_prompts request_rate burstiness
max_concurrency duration completed failed total_input_tokens total_output_tokens
request_throughput request_goodput output_throughput total_token_throughput input_lens output_lens
ttfts itls latencies start_times errors max_concurrent_requests mean_ttft_ms median_ttft_ms
std_ttft_ms p99_ttft_ms mean_tpot_ms median_tpot_ms std_tpot_ms p99_tpot_ms mean_itl_ms
median_itl_ms std_itl_ms p99_itl_ms mean_e2el_ms median_e2el_ms std_e2el_ms p99_e2el_ms
""".split()  # noqa: SIM905
)
"""Of a result file of vLLM's `bench serve --save-result --save-detailed`."""


def measured(tmp_path: Path) -> list[Path]:
    async def run() -> list[Path]:
        fake = FakeOpenAI(token_s=0.002, fail_request=5, gauges={"triptych_pool_page_bytes": 10.0})
        async with serving(fake) as url:
            levels = (Level(requests=4, concurrency=2), Level(requests=3, rate_per_s=300.0))
            benchmark = ServeBenchmark(
                url=url, workload=WORKLOAD, levels=levels, slo=Slo(ttft_ms=1e5)
            )
            results = await measure(benchmark, lambda _: lambda _: None)
        about = workload_fields(results.workload, None)
        return save_details(tmp_path, "ours", results.rows, about)

    return asyncio.run(run())


def test_a_result_file_has_what_vllm_writes_and_is_read_back(tmp_path: Path) -> None:
    closed, opened = measured(tmp_path)
    data = json.loads(closed.read_text())
    assert VLLM_NAMES - data.keys() == set()
    assert (data["completed"], data["failed"]) == (3, 1)
    assert [len(data[name]) for name in ("ttfts", "itls", "start_times", "errors")] == [4] * 4
    assert sum(1 for error in data["errors"] if error) == 1
    assert (data["request_rate"], json.loads(opened.read_text())["request_rate"]) == ("inf", 300.0)
    (result,) = read_results(closed)
    assert (result.label, result.level, result.rate_per_s) == ("ours", "c=2", None)
    assert result.requests is not None
    assert list(result.requests.prompt_tokens) == [16] * 3
    assert [len(gaps) for gaps in result.requests.gaps_s] == [3] * 3
    assert read_results(opened)[0].level == "300/s"


def test_a_comparison_is_a_ratio_of_medians_with_its_spread(tmp_path: Path) -> None:
    def write(name: str, *throughputs: float) -> Path:
        rows = [{"max_concurrency": 2, "request_throughput": value} for value in throughputs]
        path = tmp_path / name
        path.write_text(json.dumps({"rows": rows}), encoding="utf-8")
        return path

    base, other = write("a.json", 1.0, 2.0, 4.0), write("b.json", 4.0)
    (row,) = compare(read_results(base), read_results(other))
    assert (row["base"], row["other"], row["ratio"]) == (2.0, 4.0, 2.0)
    assert (row["lowest"], row["highest"]) == (1.0, 4.0)


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"rows": []}', '{"rows": [1]}'])
def test_what_is_no_result_file_is_named(tmp_path: Path, text: str) -> None:
    path = tmp_path / "x.json"
    path.write_text(text, encoding="utf-8")
    with pytest.raises(ConfigError, match=r"x\.json"):
        read_results(path)


def test_a_mean_over_time_counts_each_look_for_as_long_as_it_was_the_latest() -> None:
    series = Series()
    for at_s, pages, waiting in ((0.0, 10.0, 0.0), (1.0, 30.0, 4.0), (4.0, 0.0, 0.0)):
        text = (
            "# TYPE triptych_pool_page_bytes gauge\ntriptych_pool_page_bytes 100\n"
            "# TYPE triptych_pool_pages_in_requests gauge\n"
            f"triptych_pool_pages_in_requests {pages}\n"
            "# TYPE triptych_router_requests gauge\n"
            f'triptych_router_requests{{state="waiting"}} {waiting}\n'
        )
        series.add(at_s, read_gauges(text))
    figures = series.figures()
    assert figures["peak_kv_bytes"] == 3000.0
    assert figures["mean_kv_bytes"] == pytest.approx((1 * 1000 + 3 * 3000) / 4)
    done = Sample(0.0, 1.0, (Chunk(1.0),), 1, 1)
    # 3 requests waited on average; 2 ended in 4 s: each waited 6 s.
    assert series.seconds_per_request(Run((done, done), 4.0)) == {"waiting": pytest.approx(6.0)}
    assert goodput_per_gb({"request_goodput": 2.0, "mean_kv_bytes": 5e8}) == {
        "goodput_per_gb_kv": 4.0
    }


def test_the_share_of_time_in_steps_is_a_mean_over_workers_of_a_kind() -> None:
    series = Series()
    for at_s, seconds in (
        (10.0, (5.0, 0.0, 1.0)),
        (11.0, (5.5, 0.0, 1.0)),
        (14.0, (7.0, 2.0, 2.0)),
    ):
        lines = [
            f'triptych_workers_busy_seconds{{worker="{worker}"}} {value}\n'
            for worker, value in zip(("decode-1a", "decode-2b", "prefill-3c"), seconds, strict=True)
        ]
        text = "# TYPE triptych_workers_busy_seconds gauge\n" + "".join(lines)
        series.add(at_s, read_gauges(text))
    assert series.busy_share() == {"decode": pytest.approx(0.5), "prefill": pytest.approx(0.25)}
    assert Series().busy_share() == {}


def test_a_server_without_our_gauges_has_no_series() -> None:
    assert read_gauges("# TYPE vllm:x gauge\nvllm:x 1\n") == {}
    assert Series().figures() == {}


def test_the_busiest_moment_counts_who_was_under_way() -> None:
    spans = [(0.0, 2.0), (1.0, 3.0), (2.0, 4.0)]
    assert most_at_once([Sample(start, end) for start, end in spans]) == 2


def test_pictures_are_drawn_of_what_the_results_have(tmp_path: Path) -> None:
    results = [result for path in measured(tmp_path) for result in read_results(path)]
    paths = plot_all(results, tmp_path / "out", "b")
    kinds = {path.name: path.read_bytes()[:4] for path in paths}
    assert {"b-latency.png", "b-rates.png", "b-memory.png"} <= kinds.keys()
    assert set(kinds.values()) == {b"\x89PNG"}


def test_a_curve_has_the_median_of_its_runs_and_their_spread(tmp_path: Path) -> None:
    rows = [
        {"label": "a", "request_rate": rate, "request_throughput": value}
        for rate, value in ((2.0, 5.0), (1.0, 1.0), (1.0, 3.0), (1.0, 2.0))
    ]
    path = tmp_path / "x.json"
    path.write_text(json.dumps({"rows": rows}), encoding="utf-8")
    assert curve(read_results(path), "request_throughput") == {
        "a": ([1.0, 2.0], [2.0, 5.0], [1.0, 5.0], [3.0, 5.0])
    }

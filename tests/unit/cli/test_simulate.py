"""``triptych simulate`` as a user calls it."""

import json
from pathlib import Path

import pytest

from tests.unit.cli.conftest import Run
from triptych.loadgen.report.results import read_results
from triptych.loadgen.workload.simulated import weighted


def test_a_simulation_writes_the_figures_of_a_benchmark_and_the_time_of_decisions(
    run: Run, tmp_path: Path
) -> None:
    path = tmp_path / "s.json"
    code, out, _ = run(
        "simulate", "--replicas", "10", "--requests", "60", "--policy",
        "dynamic,static:p1c1d8", "--slo-ttft-ms", "2000", "--json", str(path), "--detailed",
    )  # fmt: skip
    assert code == 0
    assert "simulated" in out
    data = json.loads(path.read_text())
    assert data["simulated"] is True
    assert 0 < data["decision_ms"]["p50"] <= data["decision_ms"]["p99"]
    dynamic, static = read_results(path)
    assert (dynamic.label, static.label) == ("dynamic", "static:p1c1d8")
    assert dynamic.simulated
    for name in ("mean_ttft_ms", "p99_tpot_ms", "mean_itl_ms", "request_goodput", "mean_kv_bytes"):
        assert dynamic.figures[name] > 0
    assert dynamic.figures["completed"] == 60
    assert dynamic.requests is not None
    assert len(dynamic.requests.ttft_s) == 60
    code, out, _ = run("bench", "compare", str(path), str(path), "--json")
    assert code == 0
    assert json.loads(out)


def test_shards_are_compared_in_one_run(run: Run, tmp_path: Path) -> None:
    path = tmp_path / "c.json"
    options = ["--prefill", "2", "--compress", "2", "--decode", "2", "--prefix-mib", "50"]
    code, _, _ = run(
        "simulate", *options, "--requests", "40", "--shards", "1,2", "--json", str(path)
    )
    assert code == 0
    one, two = json.loads(path.read_text())["rows"]
    assert [row["label"] for row in (one, two)] == ["greedy_by_memory", "greedy_by_memory+2shards"]
    assert (one["shard_requests"], one["shard_choices"]) == ([40], {})
    assert sum(two["shard_requests"]) == sum(two["shard_choices"].values()) == 40
    assert two["shard_balance"] > one["shard_balance"] == 1
    assert two["router_cpu_s"] > 0


def test_roles_are_compared_in_one_run(run: Run, tmp_path: Path) -> None:
    path = tmp_path / "r.json"
    options = ["--colocated", "3", "--own-cores", "--roles", "both,dynamic", "--load-factor", "0.4"]
    code, _, _ = run("simulate", *options, "--requests", "60", "--json", str(path))
    assert code == 0
    both, switch = json.loads(path.read_text())["rows"]
    assert [row["label"] for row in (both, switch)] == [
        "greedy_by_memory",
        "greedy_by_memory+dynamic",
    ]
    assert "role_changes" not in both["counters"]
    assert switch["counters"]["role_changes"] > 0


def test_zombie_reclaim_on_and_off_are_compared_in_one_run(run: Run, tmp_path: Path) -> None:
    path, options = tmp_path / "z.json", ("--zombie-reclaim", "on,off", "--requests", "60")
    code, _, _ = run("simulate", *options, "--load-factor", "0.5", "--json", str(path))
    assert code == 0
    on, off = json.loads(path.read_text())["rows"]
    assert [row["label"] for row in (on, off)] == [
        "greedy_by_memory",
        "greedy_by_memory+no_reclaim",
    ]
    assert on["completed"] == off["completed"] == 60
    assert off["mean_held_kv_bytes"] > 1.5 * on["mean_held_kv_bytes"] > 0


def test_requests_without_max_tokens_book_more_as_they_grow(run: Run, tmp_path: Path) -> None:
    path, options = tmp_path / "s.json", ("--workload", "chat", "--requests", "20")
    small = ("--max-model-len", "4096", "--capacity-mib", "150", "--json", str(path))
    code, _, _ = run("simulate", *options, *small)
    [row] = json.loads(path.read_text())["rows"]
    assert (code, row["completed"]) == (0, 20)
    assert row["counters"]["growth:booked"] > 20


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (["--policy", "gredy_by_memory"], "greedy_by_memory"),
        (["--policy", "static:p2c2"], "static:p2c2d8"),
        (["--placement", "dualmop"], "did you mean 'dualmap'"),
        (["--policy", "static:p1c1d8", "--slots", "4"], "max_num_seqs=4"),
        (["--replicas", "2"], "at least 3"),
        (["--replicas", "9", "--decode", "3"], "no other counts"),
        (["--rate", "1", "--concurrency", "2"], "one of them"),
        (["--workload", "chats"], "conversations"),
        (["--trace", "none.csv"], "none.csv"),
        (["--costs", "none.json"], "none.json"),
        (["--rate", "quick"], "numbers"),
        (["--shards", "1,3", "--prefill", "2"], "prefill=2: expected a multiple of the shards (3)"),
        (["--roles", "dynamic"], "--roles='dynamic': expected --colocated workers"),
        (["--colocated", "2", "--roles", "turns"], "both, dynamic or both,dynamic"),
        (["--colocated", "2", "--decode", "3"], "no other counts"),
        (["--zombie-reclaim", "of"], "--zombie-reclaim='of': expected on, off or on,off"),
        (["--shard-overload", "1"], "router.shard_overload=1.0: expected > 1"),
    ],
)
def test_what_makes_no_sense_is_exit_code_2_before_anything_starts(
    run: Run, options: list[str], says: str
) -> None:
    code, _, err = run("simulate", "--requests", "5", *options)
    assert code == 2
    assert says in err


def test_a_fit_reads_measured_files_and_its_costs_are_read_back(run: Run, tmp_path: Path) -> None:
    measured, costs = tmp_path / "m.json", tmp_path / "c.json"
    lists = {
        "input_lens": [100] * 4, "output_lens": [5] * 4, "ttfts": [0.2] * 4,
        "itls": [[0.05] * 4] * 4, "start_times": [0.0, 1.0, 2.0, 3.0],
    }  # fmt: skip
    flat = {"label": "m", "request_rate": 1.0, "request_throughput": 1.1, **lists}
    measured.write_text(json.dumps(flat))
    code, out, err = run(
        "simulate", "fit", str(measured), "--held-out", str(measured), "--json", str(costs)
    )
    assert (code, "held out" in out) == (0, True), err
    data = json.loads(costs.read_text())
    assert data["held_out_errors"]["mean_ttft_s"] < 0.3
    code, _, _ = run("simulate", "--requests", "5", "--costs", str(costs))
    assert code == 0
    foretold = tmp_path / "f.json"
    code, out, _ = run(
        "simulate", "fit", "--costs", str(costs), "--held-out", str(measured),
        "--policy", "static:p4c4d8", "--json", str(foretold),
    )  # fmt: skip
    assert (code, "fitted to" in out) == (0, False)
    other = json.loads(foretold.read_text())
    assert other["costs"] == data["costs"]  # as they were
    late, soon = (one["held_out"][0]["predicted"]["mean_ttft_s"] for one in (other, data))
    assert late > soon + 0.4  # four requests that come one by one wait for a batch
    code, _, err = run("simulate", "fit", str(measured), "--policy", "static:p4")
    assert (code, "static:p2c2d8" in err) == (2, True)
    code, _, err = run("simulate", "fit", "--held-out", str(measured))
    assert (code, "nothing to fit to" in err) == (2, True)
    bare = tmp_path / "bare.json"
    bare.write_text(json.dumps({"request_throughput": 1.0}))
    code, _, err = run("simulate", "fit", str(bare))
    assert (code, "save-dir" in err) == (2, True)


def test_gaps_with_counts_become_a_list_that_is_not_too_long() -> None:
    assert weighted({2.0: 1, 1.0: 3}) == [1.0, 1.0, 1.0, 2.0]
    many = weighted({1.0: 300_000, 3.0: 100_000})
    assert len(many) == 200_000
    assert many.count(3.0) == 50_000


def test_images_have_workers_of_their_own_or_those_of_prefill(run: Run, tmp_path: Path) -> None:
    path = tmp_path / "i.json"
    asked = ("simulate", "--workload", "image-chat", "--requests", "4", "--image-tokens", "30")
    for options, stages in (((), {"encode", "prefill"}), (("--encode", "0"), {"encode+prefill"})):
        code, _, _ = run(*asked, *options, "--json", str(path))
        assert code == 0
        data = json.loads(path.read_text())
        assert data["rows"][0]["completed"] == 4
        assert set(data["rows"][0]["busy_seconds"]) == {*stages, "compress", "decode"}
    two = ("--prefill", "2", "--compress", "2", "--decode", "2", "--shards", "1,2")
    code, _, err = run(*asked, *two)
    assert (code, "encode=1: expected a multiple of the shards (2)" in err) == (2, True)

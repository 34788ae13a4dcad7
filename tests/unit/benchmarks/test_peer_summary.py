"""Medians over the turns that count, ratios round by round, and the result file."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks.peers import results
from benchmarks.peers.measure import Conditions, derived
from benchmarks.peers.plot import plot
from benchmarks.peers.rounds import Measured, Plan
from benchmarks.peers.summary import FIGURES, Spread, ratios, summarize
from benchmarks.peers.tables import ratio_table, summary_table
from triptych.core.errors import ConfigError

OURS, THEIRS = "triptych-colocated", "llama"
PLAN = Plan(workloads=("512/64/4",), servers=(THEIRS, OURS), rounds=3)
CONDITIONS = Conditions(["llama"], ["colocated"], seed=0, requests=None)


def measured(server: str, number: int, rate: float, other_cores: float = 0.0) -> Measured:
    figures = dict.fromkeys(FIGURES, 1.0) | {"request_throughput": rate}
    return Measured(
        workload="512/64/4",
        round=number,
        server=server,
        attempt=1,
        figures=figures | {"other_cores": other_cores},
    )


ROWS = [
    *(measured(THEIRS, number, rate) for number, rate in enumerate((1.0, 2.0, 4.0), 1)),
    *(measured(OURS, number, rate) for number, rate in enumerate((2.0, 2.0, 2.0), 1)),
]


def test_medians_and_spread() -> None:
    theirs, _ = summarize(PLAN, ROWS)
    assert theirs.figures["request_throughput"] == Spread(2.0, 1.0, 4.0)
    assert (theirs.rounds, theirs.disturbed, theirs.failed) == (3, 0, 0)


def test_disturbed_turns_are_counted_and_left_out() -> None:
    rows = [*ROWS[1:], measured(THEIRS, 1, 100.0, other_cores=1.0)]
    theirs, _ = summarize(PLAN, rows)
    assert theirs.figures["request_throughput"] == Spread(3.0, 2.0, 4.0)
    assert (theirs.rounds, theirs.disturbed) == (2, 1)


def test_ratios_are_those_of_single_rounds() -> None:
    (ratio,) = ratios(PLAN, ROWS)
    assert (ratio.triptych, ratio.peer, ratio.rounds) == (OURS, THEIRS, 3)
    assert ratio.figures["request_throughput"] == Spread(1.0, 0.5, 2.0)


def test_a_ratio_needs_both_servers_of_its_round() -> None:
    rows = [row for row in ROWS if (row.server, row.round) != (OURS, 1)]
    (ratio,) = ratios(PLAN, rows)
    assert ratio.rounds == 2
    assert ratio.figures["request_throughput"] == Spread(0.75, 0.5, 1.0)


def test_the_busy_loop_is_no_other_process() -> None:
    figures = {"other_cores": 1.1, "duration": 10.0, "server_cpu_s": 30.0, "completed": 12.0}
    assert derived(figures, busy_s=10.0) == pytest.approx(
        {"other_cores": 0.1, "cpu_s_per_request": 2.5}
    )


def test_the_file_is_read_back(tmp_path: Path) -> None:
    path = tmp_path / "peers.json"
    results.write(path, {}, CONDITIONS, PLAN, ROWS)
    assert results.read(path, CONDITIONS) == ROWS
    assert json.loads(path.read_text())["rows"][0]["disturbed"] is False


def test_a_file_of_other_conditions_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "peers.json"
    results.write(path, {}, CONDITIONS, PLAN, ROWS)
    with pytest.raises(ConfigError, match="another --out"):
        results.read(path, replace(CONDITIONS, seed=1))


def test_tables_and_plot_take_what_a_server_lacks(tmp_path: Path) -> None:
    rows = [*ROWS, measured("vllm", 1, 1.0, other_cores=1.0)]
    plan = Plan(workloads=PLAN.workloads, servers=(*PLAN.servers, "vllm"), rounds=3)
    found = summarize(plan, rows)
    assert summary_table(found).row_count == 3
    assert ratio_table(ratios(plan, rows)).row_count == 1
    plot(found, tmp_path / "peers.png")
    assert (tmp_path / "peers.png").stat().st_size > 0

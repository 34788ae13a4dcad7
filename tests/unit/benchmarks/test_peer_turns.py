"""Turns of servers without a model: they are started, measured, stopped, and not measured twice."""

import socket
import sys
from dataclasses import replace
from pathlib import Path

import psutil
import pytest

from benchmarks.peers import results
from benchmarks.peers.comparison import Comparison, run
from benchmarks.peers.measure import Conditions
from benchmarks.peers.peer import Peer, ServerNeeds
from benchmarks.peers.rounds import Plan
from benchmarks.peers.servers import Fleet
from benchmarks.peers.summary import summarize

ROOT = Path(__file__).parents[3]
SCRIPT = Path(__file__).with_name("echo_server.py")
CONDITIONS = Conditions([], [], seed=0, requests=4)
PLAN = Plan(workloads=("16/8/2",), servers=("first", "second"), rounds=1, most_other_cores=99.0)

pytestmark = pytest.mark.slow


def echo(name: str, kind: str = "whole") -> Peer:
    def command(needs: ServerNeeds) -> list[str]:
        return [sys.executable, str(SCRIPT), str(needs.port), kind]

    return Peer(
        name=name,
        command=command,
        prepare=lambda: None,
        variables={"PYTHONPATH": str(ROOT)},
        start_timeout_s=60.0,
    )


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return found.getsockname()[1]


def compared(folder: Path, *servers: Peer, plan: Plan = PLAN) -> Comparison:
    """A comparison after all its turns."""
    path = folder / "peers.json"
    comparison = Comparison(
        path=path,
        plan=plan,
        conditions=CONDITIONS,
        servers={server.name: server for server in servers},
        ports={server.name: free_port() for server in servers},
        rows=results.read(path, CONDITIONS),
    )
    run(comparison, Fleet(folder / "logs", restart=True))
    return comparison


def test_turns_are_measured_once(tmp_path: Path) -> None:
    found = compared(tmp_path, echo("first"), echo("second"))
    assert [row.turn.server for row in found.rows] == ["first", "second"]
    for row in found.rows:
        assert not row.errors
        assert row.figures["completed"] == CONDITIONS.requests
        assert row.figures["total_input_tokens"] == 4 * 16
        assert row.figures["total_output_tokens"] == 4 * 8
        assert row.figures["peak_pss_bytes"] > 1e6
    again = compared(tmp_path, echo("first"), echo("second"))
    assert again.rows == found.rows
    assert not [one for one in psutil.Process().children() if str(SCRIPT) in one.cmdline()]


def test_a_server_that_does_not_start_is_skipped(tmp_path: Path) -> None:
    def command(needs: ServerNeeds) -> list[str]:
        return [sys.executable, "-c", f"{needs.port} / 0"]

    broken = replace(echo("first"), command=command)
    found = compared(tmp_path, broken, echo("second"))
    assert [row.turn.server for row in found.rows] == ["second"]
    assert [one.server for one in summarize(found.plan, found.rows)] == ["second"]


def test_a_server_that_answers_too_little_is_skipped(tmp_path: Path) -> None:
    found = compared(tmp_path, echo("first", "short"), echo("second"))
    assert [row.turn.server for row in found.rows] == ["second"]


def test_a_busy_loop_runs_beside_a_turn(tmp_path: Path) -> None:
    plan = replace(PLAN, workloads=("16/8/2+busy",), servers=("first",))
    (row,) = compared(tmp_path, echo("first"), plan=plan).rows
    assert not row.errors

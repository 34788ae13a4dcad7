"""Thread teams: reduced where threads wait for cores, enlarged where cores are idle."""

import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from triptych.workers.core_scheduler import SharedCores
from triptych.workers.thread_team import (
    FIRST_REST_S,
    MAX_REST_S,
    WINDOW_S,
    ThreadTeam,
    Usage,
    idle_cores,
)


def step(wall_s: float, cores: float, switches_per_s: float) -> Usage:
    """What a step used that was given so many cores."""
    switches = round(switches_per_s * wall_s)
    return Usage(wall_s=wall_s, cpu_s=cores * wall_s, switches=switches)


@pytest.mark.parametrize(
    ("threads", "cores", "given"),
    [
        (2, 1.95, 2),
        (2, 1.6, 2),  # our own ingress, router and clients, which never take a whole core
        (2, 1.4, 1),
        (2, 0.5, 1),
        (4, 3.8, 4),
        (4, 3.4, 3),
        (4, 1.0, 1),
        (8, 7.4, 7),
        (1, 0.3, 1),
    ],
)
def test_a_team_gets_as_many_threads_as_it_was_given_cores(
    threads: int, cores: float, given: int
) -> None:
    team = ThreadTeam(threads=threads).after(step(WINDOW_S, cores, 100), now_s=5.0)
    assert team.threads == given
    if given < threads:
        assert team.enlarge_at_s == 5.0 + FIRST_REST_S


def test_a_team_that_waits_for_a_disk_keeps_its_threads() -> None:
    assert ThreadTeam(threads=2).after(step(WINDOW_S, 0.5, 5), now_s=0.0).threads == 2


def test_short_steps_are_judged_together() -> None:
    team, steps = ThreadTeam(threads=2), 0
    while team.threads == 2:
        team, steps = team.after(step(0.01, 1.0, 200), now_s=0.0), steps + 1
    assert steps == round(WINDOW_S / 0.01)


def test_a_long_step_does_not_keep_a_team_small_for_ever() -> None:
    assert ThreadTeam(threads=2).after(step(2, 0.5, 100), now_s=1.0).enlarge_at_s == 3.0
    assert ThreadTeam(threads=2).after(step(60, 0.5, 100), now_s=1.0).enlarge_at_s == 1 + MAX_REST_S


def test_a_team_that_is_reduced_again_and_again_rests_longer() -> None:
    team, rests = ThreadTeam(threads=2), list[float]()
    for _ in range(8):
        team = team.after(step(0.3, 1.0, 100), now_s=0.0).enlarged(2, 1, now_s=MAX_REST_S)
        rests.append(team.rest_s)
    assert rests == [0.5, 1, 2, 4, 8, 16, 30, 30]
    for _ in range(70):
        team = team.after(step(0.5, 2.0, 100), now_s=0.0)
    assert (team.threads, team.rest_s) == (2, 0.0)


def test_a_team_is_enlarged_after_its_rest_if_a_core_is_idle_and_later_in_any_case() -> None:
    team = ThreadTeam(threads=2).after(step(0.3, 1.0, 100), now_s=1.0)
    assert team.enlarged(4, 3, now_s=1.4).threads == 1
    assert team.enlarged(4, 3, now_s=1.5).threads == 4
    assert team.enlarged(4, 2, now_s=1.5).threads == 3
    assert team.enlarged(2, 0, now_s=31.4).threads == 1
    assert team.enlarged(2, 0, now_s=31.5).threads == 2


@given(
    st.integers(1, 64),
    st.lists(
        st.tuples(st.floats(0, 20), st.floats(0, 64), st.integers(0, 5000), st.integers(0, 64))
    ),
)
def test_a_team_never_leaves_its_bounds(
    most: int, steps: list[tuple[float, float, int, int]]
) -> None:
    team, now_s = ThreadTeam(threads=most), 0.0
    for wall_s, cores, switches, idle in steps:
        used = Usage(wall_s=wall_s, cpu_s=cores * wall_s, switches=switches)
        now_s += wall_s
        before, team = team, team.after(used, now_s)
        assert 1 <= team.threads <= before.threads
        team = team.enlarged(most, idle, now_s)
        assert 1 <= team.threads <= most


def test_idle_cores_are_those_that_run_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("os.cpu_count", lambda: 8)
    (tmp_path / "loadavg").write_text("2.91 1.04 0.56 3/768 23123\n")
    assert idle_cores(loadavg=tmp_path / "loadavg") == 5
    assert idle_cores(1, tmp_path / "loadavg") == 6
    (tmp_path / "loadavg").write_text("2.91 1.04 0.56 20/768 23123\n")
    assert idle_cores(loadavg=tmp_path / "loadavg") == 0
    assert idle_cores(loadavg=tmp_path / "none") == 7


def test_a_step_beside_busy_programs_has_fewer_threads(tmp_path: Path) -> None:
    """Two real programs that never sleep, and real products of torch."""
    threads = torch.get_num_threads()
    busy = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(2)]
    try:
        cores, product = SharedCores(tmp_path, cores=2), torch.randn(300, 300)
        until = time.monotonic() + 60
        while torch.get_num_threads() == 2 and time.monotonic() < until:
            with cores.step(lambda: True):
                for _ in range(100):
                    torch.mm(product, product)
        assert torch.get_num_threads() == 1
        with SharedCores(tmp_path, cores=2).step(lambda: True):  # another worker of the machine
            assert torch.get_num_threads() == 1
    finally:
        for program in busy:
            program.kill()
            program.wait()
        torch.set_num_threads(threads)

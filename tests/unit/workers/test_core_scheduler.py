"""Turns on the cores, with real processes."""

import math
import os
import signal
import subprocess
import sys
import threading
import time
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from triptych.core.config.machine import usable_cores
from triptych.workers.core_scheduler import CoreUse, DedicatedCores, SharedCores
from triptych.workers.thread_team import ThreadTeam

WORKER = """
import sys, time
from pathlib import Path
from triptych.workers.core_scheduler import SharedCores
from triptych.workers.thread_team import ThreadTeam

turns = SharedCores(Path(sys.argv[1]), cores=1)
print("ready", flush=True)
sys.stdin.readline()
for _ in range(int(sys.argv[2])):
    with turns.step(lambda: True):
        print(time.monotonic(), flush=True)
        time.sleep(float(sys.argv[3]))
        print(time.monotonic(), flush=True)
"""


@pytest.fixture(autouse=True)
def keep_threads() -> object:
    threads = torch.get_num_threads()
    yield
    torch.set_num_threads(threads)


def worker(directory: Path, steps: int, step_s: float) -> "subprocess.Popen[str]":
    process = subprocess.Popen(
        [sys.executable, "-c", WORKER, str(directory), str(steps), str(step_s)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    return process


def go(process: "subprocess.Popen[str]") -> None:
    assert process.stdin is not None
    process.stdin.write("go\n")
    process.stdin.flush()


def test_steps_of_two_workers_do_not_overlap_and_alternate(tmp_path: Path) -> None:
    workers = [worker(tmp_path, steps=10, step_s=0.02) for _ in range(2)]
    for process in workers:
        go(process)
    times = [[float(line) for line in p.communicate(timeout=60)[0].split()] for p in workers]
    steps = sorted(
        (start, end, who)
        for who, marks in enumerate(times)
        for start, end in zip(marks[::2], marks[1::2], strict=True)
    )
    assert len(steps) == 20
    assert all(one[1] <= two[0] for one, two in pairwise(steps))
    together = [who for start, _, who in steps if start < min(t[-1] for t in times)]
    repeats = sum(a == b for a, b in pairwise(together))
    assert repeats <= 4


def test_a_worker_that_is_killed_in_its_step_does_not_keep_the_turn(tmp_path: Path) -> None:
    stuck = worker(tmp_path, steps=1, step_s=600)
    go(stuck)
    assert stuck.stdout is not None
    stuck.stdout.readline()
    stuck.send_signal(signal.SIGKILL)
    stuck.communicate()
    started = time.monotonic()
    with SharedCores(tmp_path, cores=1).step(lambda: True):
        pass
    assert time.monotonic() - started < 5


def test_a_small_step_leaves_a_core_and_the_next_one_has_all(tmp_path: Path) -> None:
    cores, threads = SharedCores(tmp_path, cores=3), list[int]()
    for use in (CoreUse.TEAM, CoreUse.SMALL, CoreUse.TEAM):
        with cores.step(lambda: True, use):
            threads.append(torch.get_num_threads())
    assert threads == [3, 2, 3]
    alone = SharedCores(tmp_path / "alone", cores=1)
    with alone.step(lambda: True, CoreUse.SMALL):
        assert torch.get_num_threads() == 1


def test_decode_alone_has_all_of_two_cores_if_it_divides_its_steps(tmp_path: Path) -> None:
    decode = SharedCores(tmp_path, cores=2, is_decode_only=True)
    prompts, threads = SharedCores(tmp_path, cores=2), list[int]()
    for use in (CoreUse.TEAM, CoreUse.DIVIDED):
        with decode.step(lambda: False, use):
            threads.append(torch.get_num_threads())
    prompts.set_working(has_more=True, has_prompts=True)
    with decode.step(lambda: True, CoreUse.DIVIDED):
        threads.append(torch.get_num_threads())
    assert threads == [1, 2, 1]


def test_cores_are_divided_while_prompts_and_answers_are_computed(tmp_path: Path) -> None:
    prompts = SharedCores(tmp_path, cores=3)
    decode = SharedCores(tmp_path, cores=3, is_decode_only=True)
    threads = list[int]()
    with prompts.step(lambda: True):
        threads.append(torch.get_num_threads())
    decode.set_working(has_more=True, has_prompts=False)
    with prompts.step(lambda: True):
        threads.append(torch.get_num_threads())
        with decode.step(lambda: False):  # it does not wait: it has a core of its own
            threads.append(torch.get_num_threads())
    decode.set_working(has_more=False, has_prompts=False)
    with prompts.step(lambda: True):
        threads.append(torch.get_num_threads())
    assert threads == [3, 2, 1, 3]


@pytest.mark.parametrize("case", ["prompts wait", "none wait", "few requests", "divided", "late"])
def test_a_large_decode_step_pauses_while_prompts_wait(
    tmp_path: Path, case: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    prompts = SharedCores(tmp_path, cores=2)
    decode = SharedCores(tmp_path, cores=2, is_decode_only=True)
    prompts.set_working(has_more=False, has_prompts=case != "none wait")
    pauses = list[float]()
    clock = SimpleNamespace(sleep=pauses.append, monotonic=time.monotonic)
    monkeypatch.setattr("triptych.workers.core_scheduler.time", clock)
    with decode.step(lambda: False):
        until = time.monotonic() + 0.03
        while time.monotonic() < until:
            pass
    uses = {"few requests": CoreUse.SMALL, "divided": CoreUse.DIVIDED}
    use = uses.get(case, CoreUse.TEAM)
    with decode.step(lambda: case == "late", use):
        pass
    assert bool(pauses) == (case == "prompts wait")


def test_an_answer_begins_after_the_step_that_has_its_cores(tmp_path: Path) -> None:
    prompts = SharedCores(tmp_path, cores=2)
    decode = SharedCores(tmp_path, cores=2, is_decode_only=True)
    ended = list[str]()

    def answer() -> None:
        with decode.step(lambda: True):
            ended.append("answer")

    other = threading.Thread(target=answer)
    with prompts.step(lambda: True):
        other.start()
        other.join(timeout=0.2)
        assert not ended
        ended.append("prompt")
    other.join(timeout=60)
    assert ended == ["prompt", "answer"]


def test_own_cores_sets_the_threads_once() -> None:
    with DedicatedCores(1).step(lambda: True):
        assert torch.get_num_threads() == 1


@pytest.mark.parametrize(
    ("files", "cores"),
    [
        ({"cpu.max": "300000 100000\n"}, 3),
        ({"cpu.max": "250000 100000\n"}, 2),
        ({"cpu.max": "10000 100000\n"}, 1),
        ({"cpu.max": "max 100000\n"}, 16),
        ({"cpu/cpu.cfs_quota_us": "400000\n", "cpu/cpu.cfs_period_us": "100000\n"}, 4),
        ({"cpu/cpu.cfs_quota_us": "-1\n", "cpu/cpu.cfs_period_us": "100000\n"}, 16),
        ({"cpu.max": "nonsense"}, 16),
        ({}, 16),
    ],
)
def test_a_container_uses_the_cores_that_it_has_time_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, files: dict[str, str], cores: int
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(16)))
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    assert usable_cores(tmp_path) == cores


READER = """
import sys, time
from pathlib import Path
from triptych.workers.core_scheduler import SharedCores
from triptych.workers.thread_team import ThreadTeam

turns = SharedCores(Path(sys.argv[1]), cores=1)
turns.set_working(has_more=True, has_prompts=True)
print("reads", flush=True)
time.sleep(600)
"""


def test_who_can_wait_lets_others_read_and_goes_on_if_the_reader_dies(tmp_path: Path) -> None:
    turns, looks = SharedCores(tmp_path, cores=1, is_decode_only=True), 0

    def is_urgent() -> bool:
        nonlocal looks
        looks += 1
        return looks == 5

    command = [sys.executable, "-c", READER, str(tmp_path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as reader:
        assert reader.stdout is not None
        assert reader.stdout.readline() == "reads\n"
        with turns.step(is_urgent):
            assert looks == 5  # it waited until it was
        reader.send_signal(signal.SIGKILL)
        with turns.step(lambda: False):
            assert reader.wait(60) == -signal.SIGKILL


@pytest.mark.parametrize("case", ["prompts wait", "none wait", "late", "many requests"])
def test_decode_lends_its_core_to_chunks_but_for_one_step_after_each(
    tmp_path: Path, case: str
) -> None:
    prompts = SharedCores(tmp_path, cores=2)
    decode = SharedCores(tmp_path, cores=2, is_decode_only=True)
    prompts.set_working(has_more=False, has_prompts=case != "none wait")
    chunks = list[int]()
    use = CoreUse.TEAM if case == "many requests" else CoreUse.SMALL

    def answer() -> None:
        with decode.step(lambda: case == "late", use):
            assert torch.get_num_threads() == 1
        decode.set_working(has_more=True, has_prompts=False)

    def chunk(wait_s: float) -> None:
        with prompts.step(lambda: True):
            chunks.append(torch.get_num_threads())
            time.sleep(wait_s)

    answer()
    chunk(0.0)
    other = threading.Thread(target=chunk, args=(0.3,))
    other.start()
    while len(chunks) < 2:
        time.sleep(0.01)
    answer()
    other.join(timeout=60)
    chunk(0.0)
    answer()
    chunk(0.0)
    lends = case == "prompts wait"
    assert chunks == ([2, 2, 1, 2] if lends else [1, 1, 1, 1])


def test_answers_do_not_wait_for_a_chunk_that_leaves_them_their_core(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    prompts = SharedCores(tmp_path, cores=2)
    decode = SharedCores(tmp_path, cores=2, is_decode_only=True)
    reduced = ThreadTeam(threads=1, enlarge_at_s=math.inf)
    monkeypatch.setattr(prompts, "_read_team", lambda: reduced)
    with prompts.step(lambda: True):
        assert torch.get_num_threads() == 1
        with decode.step(lambda: False, CoreUse.SMALL):  # would wait for ever
            assert torch.get_num_threads() == 1


@pytest.mark.parametrize("lends", [True, False])
def test_a_core_that_decode_lends_counts_as_idle(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *, lends: bool
) -> None:
    prompts = SharedCores(tmp_path, cores=2)
    decode = SharedCores(tmp_path, cores=2, is_decode_only=True)
    prompts.set_working(has_more=False, has_prompts=True)
    with decode.step(lambda: not lends, CoreUse.SMALL):
        pass
    decode.set_working(has_more=True, has_prompts=False)
    seen = list[int]()

    def counted(lent: int) -> int:
        seen.append(lent)
        return lent

    monkeypatch.setattr("triptych.workers.core_scheduler.idle_cores", counted)
    rested = ThreadTeam(threads=1, enlarge_at_s=time.monotonic())
    monkeypatch.setattr(prompts, "_read_team", lambda: rested)
    with prompts.step(lambda: True):
        assert torch.get_num_threads() == 1 + lends
    decode.set_working(has_more=False, has_prompts=False)
    with prompts.step(lambda: True):
        pass
    assert seen == [int(lends), 0]

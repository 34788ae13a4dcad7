"""Telling a living process from a dead one and from a later one with the same pid."""

import subprocess
import sys
from dataclasses import replace

from triptych.kvpool.pool.processes import ProcessKey, is_alive, this_process

TELL = (
    "from triptych.kvpool.pool.processes import this_process as t; p = t(); print(p.pid, p.started)"
)


def test_this_process_lives() -> None:
    assert is_alive(this_process())


def test_a_later_process_with_the_same_pid_is_another_one() -> None:
    me = this_process()
    assert not is_alive(replace(me, started=me.started - 1))


def test_a_zombie_is_dead_before_anybody_waits_for_it() -> None:
    with subprocess.Popen([sys.executable, "-c", TELL], stdout=subprocess.PIPE, text=True) as child:
        assert child.stdout
        pid, started = map(int, child.stdout.read().split())  # until it closes its output
        key = ProcessKey(pid, started, this_process().space)
        while is_alive(key):
            pass
    assert not is_alive(key)


def test_what_cannot_be_seen_from_here_counts_as_alive() -> None:
    assert is_alive(ProcessKey(2**22 + 1, 1, "another machine/pid:[1]"))
    assert not is_alive(replace(this_process(), pid=2**22 + 1))

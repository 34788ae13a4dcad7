"""The loop of a worker: whose turn it is, and what it does in it."""

import time
from collections.abc import Callable, Generator, Iterable, Sequence
from contextlib import contextmanager
from threading import Event

import pytest
from numba.core.compiler_lock import global_compiler_lock

from triptych.core.messages import Compress, Message, Send, Stage
from triptych.workers.core_scheduler import CoreUse
from triptych.workers.loop import StageLoop

OTHERS_S = 0.05
STEPS = {False: 40, True: 400}
"""Of an engine that is in time, and of one that is late: more than others' time is enough for."""


class BusyCores:
    """Others compute for a while before each turn."""

    def __init__(self, others_s: float) -> None:
        self.others_s, self.turns = others_s, 0
        self.has_prompts = list[bool]()

    @contextmanager
    def step(
        self,
        is_urgent: Callable[[], bool],
        _use: CoreUse = CoreUse.TEAM,
    ) -> Generator[None]:
        is_urgent()
        time.sleep(self.others_s)
        self.turns += 1
        yield

    def set_working(self, *, has_more: bool, has_prompts: bool) -> None:
        self.has_prompts.append(has_prompts)


class Recorder:
    """An engine that does nothing, and remembers when."""

    def __init__(self, stage: Stage, steps: int, *, is_late: bool) -> None:
        self.stage, self.left, self._is_late = stage, 0, is_late
        self._steps, self.steps, self.done = steps, 0, Event()
        self.heard, self.held = 0, list[str]()
        self.on_message: Callable[[Message], None] = lambda _: None

    def accept(self, message: Message) -> Iterable[Send]:
        self.heard += 1
        self.left = self.left or self._steps
        self.on_message(message)
        return ()

    def has_work(self) -> bool:
        return self.left > 0

    def wait_s(self) -> float | None:
        return None

    def is_late(self) -> bool:
        return self._is_late

    def core_use(self) -> CoreUse:
        return CoreUse.TEAM

    def step(self) -> Iterable[Send]:
        time.sleep(0.001)
        self.left -= 1
        self.steps += 1
        if not self.left:
            self.done.set()
        return ()

    def requests(self) -> list[str]:
        return self.held

    def cancel(self, requests: Sequence[str]) -> None:
        self.left, self.held = 0, []

    def abandon(self) -> None:
        self.left = 0


def run(engine: Recorder, cores: BusyCores) -> StageLoop:
    loop = StageLoop("worker", [engine], lambda _: None, cores)  # type: ignore[arg-type]
    loop.start()
    return loop


def test_messages_that_never_end_do_not_keep_an_engine_from_stepping() -> None:
    engine, cores = Recorder("compress", steps=5, is_late=False), BusyCores(0.0)
    loop = run(engine, cores)
    engine.on_message = loop.post  # for each one that is taken there is another one
    loop.post(Compress(items=()))
    assert engine.done.wait(10)
    engine.on_message = lambda _: None
    loop.stop()
    assert engine.steps >= 5


def test_who_is_late_steps_again_but_not_longer_than_others_did() -> None:
    turns = dict[bool, int]()
    for is_late in (False, True):
        engine, cores = (
            Recorder("decode", steps=STEPS[is_late], is_late=is_late),
            BusyCores(OTHERS_S),
        )
        loop = run(engine, cores)
        loop.post(Compress(items=()))
        assert engine.done.wait(20)
        loop.stop()
        assert engine.steps == STEPS[is_late]
        turns[is_late] = cores.turns
    assert turns[False] >= STEPS[False]
    assert 4 <= turns[True] <= 300


def test_what_came_is_heard_before_the_step_of_the_same_turn() -> None:
    engine, cores = Recorder("prefill", steps=3, is_late=False), BusyCores(OTHERS_S)
    loop = run(engine, cores)
    for _ in range(20):
        loop.post(Compress(items=()))
    assert engine.done.wait(10)
    loop.stop()
    assert engine.heard == 20
    assert cores.turns <= 6


@pytest.mark.parametrize("stage", ["prefill", "compress", "decode"])
def test_prompts_without_work_still_count_as_waiting(stage: Stage) -> None:
    """One waits for its compressor: decode does as it does while prompts have work."""
    engine, cores = Recorder(stage, steps=1, is_late=False), BusyCores(0.0)
    engine.held = ["waits"]
    loop = run(engine, cores)
    loop.post(Compress(items=()))
    assert engine.done.wait(10)
    loop.stop()
    waits = cores.has_prompts[0]
    assert waits is (stage != "decode")
    assert not cores.has_prompts[-1]


class Compiling(Recorder):
    """Holds numba's compiler lock in its steps, as the first call of a kernel does."""

    def __init__(self) -> None:
        super().__init__("prefill", steps=1, is_late=False)
        self.compiled, self.goes_on = Event(), Event()

    def step(self) -> Iterable[Send]:
        with global_compiler_lock, global_compiler_lock:
            self.compiled.set()
            self.goes_on.wait(10)
        time.sleep(0.1)
        return super().step()


def test_a_step_does_not_grow_old_while_it_compiles_kernels() -> None:
    engine = Compiling()
    loop = run(engine, BusyCores(0.0))
    loop.post(Compress(items=()))
    assert engine.compiled.wait(10)
    before_s = loop.step_age_s
    time.sleep(0.5)
    assert loop.step_age_s < before_s + 0.25
    engine.goes_on.set()
    assert engine.done.wait(10)
    loop.stop()
    report = loop.report(0)
    assert 0.1 <= report.longest_step_s < report.busy_s - 0.25

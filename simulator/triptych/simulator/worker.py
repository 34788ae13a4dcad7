"""A worker process in virtual time: a loop that takes messages and steps its engines."""

from bisect import bisect_right
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from math import inf

from triptych.core.messages import Message, Report, Send, Stage
from triptych.simulator.clock import Clock
from triptych.simulator.engines import SimulatedEngine
from triptych.simulator.link import SimulatedLink
from triptych.simulator.work import StepOutput, Work

Deliver = Callable[["SimulatedWorker", Sequence[Send], StepOutput | None], None]
Began = Callable[[Sequence[str]], None]
"""Called with the requests whose prefill begins in a step."""
Wrote = Callable[["SimulatedWorker", Sequence[float], int], None]
"""Called with the ends of steps that only wrote a token for each of so many requests."""


class Turns:
    """The cores of one machine: each step uses all of them, in order of waiting time.

    Who is not late waits while there are prompts to be read.
    """

    are_shared, are_idle = True, False

    def __init__(self, clock: Clock, stretch: float = 1.0) -> None:
        self._clock, self.stretch = clock, stretch
        """Slowdown of a step because other processes use some of the cores."""
        self._waiting = deque[Callable[[], None]]()
        self._patient = dict[Callable[[], None], float]()
        """When they are late."""
        self._reading = set[str]()
        self._taken = False

    def take(self, go: Callable[[], None], due: float = -inf) -> None:
        """Call ``go`` when the cores are free; until ``due`` prefill of others may go first."""
        if self._reading and due > self._clock.now:
            self._patient[go] = due
            if due < inf:
                self._clock.after(due - self._clock.now, self._look, go)
        else:
            self._patient.pop(go, None)
            self._enqueue(go)

    def lets_read(self, go: Callable[[], None]) -> bool:
        """Whether it still waits for prefill of others."""
        return go in self._patient

    def read(self, worker: str, has_more: bool) -> None:
        """Set whether a worker has prompts to prefill."""
        if has_more:
            self._reading.add(worker)
            return
        self._reading.discard(worker)
        if not self._reading:
            patient, self._patient = self._patient, {}
            for go in patient:
                self._enqueue(go)

    def leave(self) -> None:
        """Release the cores for the next step."""
        if self._waiting:
            self._waiting.popleft()()
        else:
            self._taken = False

    def _look(self, go: Callable[[], None]) -> None:
        if self._patient.get(go, inf) <= self._clock.now:
            del self._patient[go]
            self._enqueue(go)

    def _enqueue(self, go: Callable[[], None]) -> None:
        if self._taken:
            self._waiting.append(go)
        else:
            self._taken = True
            go()


class OwnCores:
    """A core for each worker of a machine; if there are fewer, running steps share them."""

    are_shared = False
    """Whether a step may have to wait for others."""

    def __init__(self, free_cores: float | None = None) -> None:
        self._free, self._busy = free_cores, 0
        self.are_idle = free_cores is None
        """Whether a step takes as long as it would alone."""

    @property
    def stretch(self) -> float:
        """Slowdown of a step by the steps that run when it begins."""
        return 1.0 if self._free is None else max(1.0, self._busy / self._free)

    def take(self, go: Callable[[], None], _due: float = -inf) -> None:
        self._busy += 1
        go()

    def lets_read(self, _go: Callable[[], None]) -> bool:
        return False

    def read(self, worker: str, has_more: bool) -> None:
        """Prefill delays no other worker here."""

    def leave(self) -> None:
        self._busy -= 1


@dataclass(eq=False, slots=True)
class QuietSteps:
    """Steps of a decode worker that change nothing for others: they are one event of the clock."""

    seconds: list[float]
    ends: list[float]
    done: int = 0
    """Steps that are accounted for."""


class SimulatedWorker:
    """Takes all received messages, then steps each engine with work, in a loop.

    A decode worker with cores of its own knows what its steps do until a request ends, asks for
    pages, or a message arrives. It does these steps as one, at the same times.
    """

    def __init__(
        self,
        address: str,
        clock: Clock,
        engines: Sequence[SimulatedEngine],
        cores: Turns | OwnCores,
        deliver: Deliver,
        began: Began,
        wrote: Wrote,
        link: SimulatedLink | None = None,
    ) -> None:
        """``link``: over which pages of other machines come; None: they come at once."""
        self.address, self.busy_s, self.link = address, 0.0, link
        self._clock, self._engines, self._cores, self._deliver = clock, engines, cores, deliver
        self._began, self._wrote = began, wrote
        self._inbox = deque[Message]()
        self._turn = 0
        """Index of the engine that is stepped next in this round."""
        self._next = engines[0]
        """The engine that is stepped once the cores are free."""
        self._is_working = False
        self._waits_since = dict[Stage, float]()
        """Since when each stage has waited for a turn."""
        self._turn_until = 0.0
        stages = [engine.stage for engine in engines]
        self._is_reader, self._only_writes = stages[-1] == "prefill", stages == ["decode"]
        self._may_foresee = self._only_writes and cores.are_idle
        self._quiet: QuietSteps | None = None

    def post(self, messages: Sequence[Message]) -> None:
        """A frame has arrived."""
        self._inbox.extend(messages)
        if not self._is_working:
            self._is_working = True
            self._go_on()
        elif self._quiet is not None:
            self._cut_short(self._quiet)
        elif self._cores.lets_read(self._begin):
            self._take_messages()
            self._take_turn()

    def report(self) -> Report:
        self.catch_up()
        return Report(
            name=self.address,
            running=0,
            waiting=0,
            pages_held=0,
            busy_s=self.busy_s,
            link_bytes_s=self.link.meter.bytes_s if self.link else 0.0,
        )

    def _go_on(self) -> None:
        idle = 0
        while idle < len(self._engines) or self._inbox:
            if self._turn == 0 and self._inbox:
                self._take_messages()
                idle = 0
            engine = self._engines[self._turn]
            self._turn = (self._turn + 1) % len(self._engines)
            if engine.has_work():
                self._next = engine
                self._waits_since.setdefault(engine.stage, self._clock.now)
                self._take_turn()
                return
            idle += 1
        self._turn = 0
        self._is_working = False

    def _take_turn(self) -> None:
        engine = self._next
        can_wait = self._cores.are_shared and self._only_writes and engine.has_work()
        self._cores.take(self._begin, engine.due if can_wait else -inf)

    def _take_messages(self) -> None:
        while self._inbox:
            message = self._inbox.popleft()
            for engine in self._engines:
                work = engine.accept(message, self._clock.now)
                if work is not None:
                    if work.sends:
                        self._deliver(self, work.sends, None)
                    break
            else:
                raise TypeError(f"{self.address}: no stage takes {type(message).__name__}")

    def _begin(self) -> None:
        """The cores are free: a turn begins."""
        now, stage = self._clock.now, self._next.stage
        self._turn_until = now + (now - self._waits_since.get(stage, now))
        if not (self._may_foresee and self._foresee(now)):
            self._step()

    def _foresee(self, now: float) -> bool:
        """Begin all steps that only write tokens; False if there are not several of them."""
        seconds = self._next.quiet_steps()
        if len(seconds) < 2:
            return False
        steps = QuietSteps(seconds, [*accumulate(seconds, initial=now)][1:])
        self._quiet = steps
        self._clock.at(steps.ends[-1], self._end_quiet, steps)
        return True

    def _cut_short(self, steps: QuietSteps) -> None:
        """A message has arrived: it is taken after the step that runs."""
        left = bisect_right(steps.ends, self._clock.now) + 1
        if left < len(steps.ends):
            del steps.ends[left:], steps.seconds[left:]
            self.catch_up()
            self._quiet = QuietSteps(steps.seconds, steps.ends, steps.done)
            self._clock.at(steps.ends[-1], self._end_quiet, self._quiet)

    def catch_up(self) -> None:
        """Account for the quiet steps that have ended."""
        steps = self._quiet
        if steps is None:
            return
        before, after = steps.done, bisect_right(steps.ends, self._clock.now)
        if after > before:
            steps.done = after
            for seconds in steps.seconds[before:after]:
                self.busy_s += seconds
            self._wrote(self, steps.ends[before:after], self._next.skip(after - before))

    def _end_quiet(self, steps: QuietSteps) -> None:
        if steps is not self._quiet:  # a message arrived, and the last of them is another one
            return
        self.catch_up()
        self._quiet = None
        self._cores.leave()
        self._waits_since[self._next.stage] = self._clock.now
        self._go_on()

    def _step(self) -> None:
        work = self._next.step()
        if work.began:
            self._began(work.began)
        seconds = work.seconds * self._cores.stretch
        self._clock.after(seconds, self._end, work, seconds)

    def _end(self, work: Work, seconds: float) -> None:
        self.busy_s += seconds
        engine, now = self._next, self._clock.now
        goes_on = now < self._turn_until and engine.has_work() and engine.due < now
        if not goes_on:
            if self._is_reader and engine.stage == "prefill":
                self._cores.read(self.address, engine.has_work())
            self._cores.leave()
        self._deliver(self, work.sends, work.output)
        if goes_on:
            self._step()
            return
        if engine.has_work():
            self._waits_since[engine.stage] = now
        else:
            self._waits_since.pop(engine.stage, None)
        self._go_on()

"""The scheduler in random histories of a world whose workers die, lag and repeat themselves.

The machine asks after every event whether the ledger promised at least what is really held, and
at the end whether anything was left behind.
"""

from collections.abc import Sequence
from math import inf
from random import Random
from typing import ClassVar, Literal

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from tests.effort import examples
from tests.unit.router.fake_world import (
    CAPACITY,
    IN_PARTS,
    INGRESSES,
    LEASE_S,
    LOWERABLE,
    PLAN,
    REPEATABLE,
    WITH_CACHE,
    FakeWorker,
    FifoWorld,
    GreedyWorld,
    SharingWorld,
    UrgentWorld,
)
from triptych.core.config import RouterConfig
from triptych.core.messages import (
    Cancel,
    Preempt,
    Preempted,
    Register,
    Request,
    Sampling,
    Submit,
)
from triptych.core.pages import PagePlan
from triptych.router import Scheduler, Timeouts
from triptych.router.models.overcommit import AHEAD
from triptych.router.state.cluster_state import worker_loads
from triptych.router.state.request_table import State
from triptych.router.state.shared_prompts import IN_WORK


class RouterMachine(RuleBasedStateMachine):
    """Random events in random order; then everything is let run to its end."""

    policy: ClassVar[str] = "greedy_by_memory"
    answers_cancel: ClassVar[bool] = True
    addresses: ClassVar[tuple[str, ...]] = ("p0", "p1", "c0", "c1", "d0", "d1")
    roles: ClassVar[Literal["both", "dynamic"]] = "both"
    priorities: ClassVar[tuple[int, ...]] = (0, 0, 0)
    plan: ClassVar[PagePlan] = PLAN
    booking: ClassVar[Literal["forecast", "bounds"]] = "bounds"
    times: ClassVar[int] = 1
    """Answers are so many times as long as the rules draw."""

    @initialize(seed=st.integers(0, 1 << 16))
    def begin(self, seed: int) -> None:
        config = RouterConfig(
            batch_policy=self.policy,
            max_overtake_s=GreedyWorld.max_overtake_s,
            max_queued_requests=8,
            prefill_batch_tokens=300,
            roles=self.roles,
            booking=self.booking,
        )
        timeouts = Timeouts(
            report_bound_s=1000.0,
            grace_s=20.0,
            cancel_timeout_s=1e6 if self.answers_cancel else 1.0,
            reclaim_s=LEASE_S,
            silent_s=inf,
        )
        kind = GreedyWorld if self.policy in ("greedy_by_memory", "dynamic") else FifoWorld
        kind = SharingWorld if self.plan.prefix_bytes else kind
        kind = UrgentWorld if any(self.priorities) else kind
        router = Scheduler(config, self.plan, CAPACITY, timeouts)
        self.forecast(router, Random(seed))
        self.world = kind(router, self.plan, answers_cancel=self.answers_cancel)
        for address in self.addresses:
            self.world.start(address)
        for address in INGRESSES:
            self.hello_ingress(address)

    def forecast(self, router: Scheduler, lies: Random) -> None:
        """Have the router forecast something else than what it learns."""

    def hello_ingress(self, address: str) -> None:
        self.world.starts += 1
        self.world.ingresses.add(address)
        name = f"{address}#{self.world.starts}"
        self.world.tell(Register(name=name, address=address), address)

    def pick(self, index: int) -> FakeWorker | None:
        living = list(self.world.workers.values())
        return living[index % len(living)] if living else None

    # ---------------------------------------------------------------- events

    @rule(
        prompt=st.integers(1, 250),
        new=st.integers(1, 60),
        ingress=st.sampled_from(INGRESSES),
        count=st.integers(1, 2),
        urgency=st.integers(0, 2),
    )
    def submit(self, prompt: int, new: int, ingress: str, count: int, urgency: int) -> None:
        for _ in range(count):
            self.ask((1,) * prompt, new, ingress, self.priorities[urgency])

    def ask(self, prompt: tuple[int, ...], new: int, ingress: str, priority: int) -> None:
        if ingress not in self.world.ingresses:
            return
        name = f"r{len(self.world.requests)}"
        request = Request(
            id=name,
            prompt=prompt,
            sampling=Sampling(max_tokens=self.times * new),
            reply_to=ingress,
            priority=priority,
            floor="low" if len(self.world.requests) % 4 else "high",
        )
        self.world.requests[name] = request
        self.world.arrived[name] = self.world.now
        self.world.waiting.append(name)
        self.world.tell(Submit(request=request), ingress)

    @rule(seed=st.integers(0, 1 << 16), events=st.integers(1, 30))
    def work_a_little(self, seed: int, events: int) -> None:
        self.flow(seed, events)

    @rule(seed=st.integers(0, 1 << 16), events=st.integers(50, 300))
    def work_a_lot(self, seed: int, events: int) -> None:
        self.flow(seed, events)

    def flow(self, seed: int, events: int) -> None:
        """Workers work and the router hears of it, in random order."""
        order = Random(seed)
        for _ in range(events):
            worker = self.pick(order.randrange(99))
            if worker is None:
                return
            if order.random() < 0.5:
                self.world.step(worker)
            elif worker.outbox:
                self.world.tell(worker.outbox.popleft(), worker.address)

    @rule(index=st.integers(0, 99))
    def cancel(self, index: int) -> None:
        """The client goes away; its answer may be on its way already."""
        if self.world.requests:
            name = list(self.world.requests)[index % len(self.world.requests)]
            if name not in self.world.outcomes:
                self.world.end(name, "cancelled")
                self.world.tell(Cancel(requests=(name,)), self.world.requests[name].reply_to)

    @rule(index=st.integers(0, 9), last_words=st.integers(0, 3), is_noticed=st.booleans())
    def kill(self, index: int, last_words: int, is_noticed: bool) -> None:
        """A worker dies; some of its last words arrive after the news of its death."""
        worker = self.pick(index)
        if worker is not None:
            self.world.kill(worker.address)
            if is_noticed:
                self.world.notice()
                for message in list(worker.outbox)[:last_words]:
                    self.world.tell(message, worker.address)

    @rule(steps=st.integers(0, 60))
    @precondition(lambda self: self.world.requests)
    def kill_while_it_decodes(self, steps: int) -> None:
        """Go on until somebody decodes, and a little further."""
        for _ in range(200):
            busy = [one for one in self.world.workers.values() if one.running]
            if busy and steps <= 0:
                self.world.kill(busy[0].address)
                self.world.notice()
                return
            steps -= bool(busy)
            for worker in list(self.world.workers.values()):
                self.world.step(worker)
                if worker.outbox:
                    self.world.tell(worker.outbox.popleft(), worker.address)

    @rule(index=st.integers(0, 9), steps=st.integers(0, 40))
    @precondition(lambda self: self.world.requests)
    def take_back(self, index: int, steps: int) -> None:
        """Have a running request suspended, whether or not that makes anything more even."""
        for _ in range(steps):
            for worker in list(self.world.workers.values()):
                self.world.step(worker)
                if worker.outbox:
                    self.world.tell(worker.outbox.popleft(), worker.address)
        running = [
            (worker, name) for worker in self.world.workers.values() for name in worker.running
        ]
        if running:
            worker, name = running[index % len(running)]
            worker.inbox.append(Preempt(requests=(name,)))

    @rule(index=st.integers(0, 9))
    def restart(self, index: int) -> None:
        missing = [address for address in self.addresses if address not in self.world.workers]
        if missing:
            self.world.start(missing[index % len(missing)])

    @rule(address=st.sampled_from(INGRESSES))
    def kill_or_restart_ingress(self, address: str) -> None:
        if address not in self.world.ingresses:
            self.hello_ingress(address)
            return
        self.world.ingresses.discard(address)
        for name, request in self.world.requests.items():
            if request.reply_to == address and name not in self.world.outcomes:
                self.world.end(name, "cancelled")
        self.world.deliver(self.world.router.lost(address, self.world.now))

    @rule(index=st.integers(0, 9999))
    @precondition(lambda self: self.world.record_report)
    def repeat(self, index: int) -> None:
        """A message of a stage comes a second time."""
        place = index % len(self.world.record_report)
        sender, message = self.world.record_report[place]
        if not isinstance(message, REPEATABLE):
            return
        # A worker that hands a request back a second time has sent other messages about it since.
        later = (m for _, m in self.world.record_report[place + 1 :])
        names = (getattr(m, "request", "") for m in later)
        if not (isinstance(message, Preempted) and message.request in names):
            self.world.deliver(self.world.router.on(message, sender, self.world.now))

    @rule(seconds=st.sampled_from([0.1, 0.5, 1.5, 3.0, 5.0]))
    def wait(self, seconds: float) -> None:
        self.world.now += seconds
        self.world.reclaim()
        self.world.deliver(self.world.router.tick(self.world.now))

    # ---------------------------------------------------------------- what must hold

    @invariant()
    def no_more_is_booked_than_there_is(self) -> None:
        booked = self.world.router.snapshot(self.world.now).booked_bytes
        assert 0 <= sum(booked.values()) <= CAPACITY

    @invariant()
    def the_roster_has_counted_what_the_requests_say(self) -> None:
        """Each load, the free slots and the requests without one, counted anew from scratch."""
        cluster, now = self.world.router._cluster, self.world.now
        cluster.load_index.refresh(now)
        loads = worker_loads(cluster, now)
        assert {load.address: load for load in cluster.load_index.loads()} == loads
        assert cluster.load_index.open_slots == sum(load.free_slots for load in loads.values())
        assert cluster.load_index.needs_slot == sum(
            entry.state not in (State.WAITING, State.LEAVING) and not entry.placement.decode_worker
            for entry in cluster.requests
        )
        waiting = [
            entry.id
            for entry in cluster.requests.in_state(State.WAITING)
            if entry.placement.waits_for is None
        ]
        queue = [one.id for one in cluster.requests.queue.at(now).in_order()]
        if any(self.priorities) or self.booking == "forecast":
            queue, waiting = sorted(queue), sorted(waiting)
        assert queue == waiting

    @invariant()
    def a_request_waits_for_a_prompt_only_while_another_one_computes_it(self) -> None:
        requests, shared = self.world.router._cluster.requests, self.world.router._progress.shared
        waiting = {entry.id: entry for entry in requests if entry.placement.waits_for is not None}
        assert shared._waiting == waiting
        for entry in waiting.values():
            assert entry.state is State.WAITING
            assert requests[entry.placement.waits_for.leader].state in IN_WORK
        assert all(requests[name].state in IN_WORK for name in shared._claims)
        assert {one.id for one in shared._computing.values()} <= set(shared._claims)
        assert {one.id for one in shared._blocks.values()} <= set(shared._claims)
        assert set(shared._equal) <= set(shared._claims)

    @invariant()
    def no_more_is_held_than_is_booked(self) -> None:
        snapshot = self.world.router.snapshot(self.world.now)
        booked = sum(snapshot.booked_bytes.values())
        if self.answers_cancel and not self.world.unnoticed:
            assert self.world.bytes_held <= booked
        assert snapshot.held_bytes <= booked <= snapshot.bound_bytes

    @invariant()
    def sums_of_the_ledger_are_those_of_its_requests(self) -> None:
        ledger = self.world.router._cluster.ledger
        names = list(ledger._accounts)
        assert ledger.held_bytes == sum(map(ledger.held_of, names))
        assert ledger.bound_bytes == sum(map(ledger.bound_of, names))
        assert sum(ledger.arenas.values()) == sum(map(ledger.booked_by, names))

    @invariant()
    def no_request_fails_for_memory(self) -> None:
        counters = self.world.router.snapshot(self.world.now).counters
        assert not counters.get("estimate_too_low", 0)

    @invariant()
    def nobody_hears_two_endings(self) -> None:
        """But a worker may die between its last token and the news that it was the last."""
        for outcomes in self.world.outcomes.values():
            is_repeated = outcomes[-2:] == ["finished", "failed worker_lost"]
            record_report = outcomes[:-1] if is_repeated else outcomes
            assert len(record_report) == 1 or record_report == ["cancelled", "finished"]

    @invariant()
    def every_request_is_counted_once(self) -> None:
        snapshot = self.world.router.snapshot(self.world.now)
        counters, states = snapshot.counters, snapshot.requests
        alive = sum(count for state, count in states.items() if state != "leaving")
        ended = sum(counters.get(how, 0) for how in ("finished", "failed", "cancelled"))
        assert counters.get("submitted", 0) == ended + alive

    def teardown(self) -> None:
        """Let everything run to its end: nobody hangs, and nothing is left behind."""
        if not hasattr(self, "world"):
            return
        world = self.world
        world.notice()
        for address in self.addresses:
            if address not in world.workers:
                world.start(address)
        for _ in range(50):
            rounds = iter(range(2000))
            while self._run_all():
                assert next(rounds, None) is not None, "they work for ever"
            world.now += 1.0
            world.reclaim()
            world.deliver(world.router.tick(world.now))
        assert set(world.outcomes) == set(world.requests)
        self.nobody_hears_two_endings()
        snapshot = world.router.snapshot(world.now)
        assert snapshot.booked_bytes == {}
        assert not any(snapshot.requests.values())
        assert world.bytes_held == 0

    def _run_all(self) -> bool:
        has_worked = False
        for worker in list(self.world.workers.values()):
            has_worked |= self.world.step(worker)
            if worker.outbox:
                self.world.tell(worker.outbox.popleft(), worker.address)
                has_worked = True
        return has_worked


class FifoMachine(RouterMachine):
    policy = "fifo"


class StaticMachine(RouterMachine):
    """Batches of fixed size, in order of arrival."""

    policy = "static:p2c2d2"


class DynamicMachine(RouterMachine):
    policy = "dynamic"


class UrgentMachine(RouterMachine):
    """Some requests are more urgent than others, which are set aside for them."""

    priorities = (0, 0, -3)


class SilentMachine(RouterMachine):
    """Workers that obey ``Cancel`` without a word."""

    answers_cancel = False


class ColocatedMachine(RouterMachine):
    """One process has all three stages."""

    addresses = ("all0",)


class PartsMachine(RouterMachine):
    """Prompts are read two layers at a time, and encoded meanwhile."""

    plan = IN_PARTS


class ColocatedPartsMachine(ColocatedMachine):
    """The same in one process."""

    plan = IN_PARTS


class SilentPartsMachine(SilentMachine):
    """The same with workers that obey ``Cancel`` without a word."""

    plan = IN_PARTS


class RolesMachine(RouterMachine):
    """Three processes with all three stages; who reads and who writes follows the load."""

    addresses = ("all0", "all1", "all2")
    roles = "dynamic"


class ForecastMachine(RouterMachine):
    """Bookings follow forecasts, and answers are often longer."""

    booking = "forecast"
    times = 5


class LyingMachine(ForecastMachine):
    """Forecasts are anything: that all answers end at once or never, pages of any size."""

    def forecast(self, router: Scheduler, lies: Random) -> None:
        bookings = router._growth.bookings

        def survival(_tenant: str, _written: int, _limit: int, ahead: Sequence[int]) -> list[float]:
            return [lies.choice((0.0, lies.random(), 1.0)) for _ in ahead]

        bookings.lengths.survival = survival  # type: ignore[method-assign]
        bookings.ratios.at = lambda *_: (lies.uniform(0, 2), lies.uniform(0, 1))  # type: ignore


class OvercommittingMachine(ForecastMachine):
    """Forecasts say that nothing will be needed: as much starts as is free."""

    def forecast(self, router: Scheduler, lies: Random) -> None:
        bookings = router._growth.bookings
        bookings.lengths.survival = lambda *_: [0.0] * len(AHEAD)  # type: ignore
        bookings.ratios.at = lambda *_: (0.0, 0.0)  # type: ignore


class LoweringMachine(OvercommittingMachine):
    """Requests have high and low tokens, so some are lowered while memory is short."""

    plan = LOWERABLE
    times = 20


class LyingLoweringMachine(LyingMachine):
    plan = LOWERABLE
    times = 20


class ForecastUrgentMachine(OvercommittingMachine):
    priorities = (0, 0, -3)


class ForecastColocatedPartsMachine(OvercommittingMachine):
    addresses = ("all0",)
    plan = IN_PARTS


class ForecastSilentMachine(LyingMachine):
    answers_cancel = False


class SharingMachine(RouterMachine):
    """Prompts begin alike, and a request waits for blocks that another one computes."""

    addresses = ("p0", "c0", "c1", "d0", "d1")
    plan = WITH_CACHE

    @rule(
        common=st.integers(20, 150),
        ends=st.lists(st.integers(0, 12), min_size=2, max_size=5),
        new=st.integers(1, 60),
        ingress=st.sampled_from(INGRESSES),
    )
    def submit_alike(self, common: int, ends: list[int], new: int, ingress: str) -> None:
        """Several at once; those with equal ends are equal."""
        beginning = (1000 + len(self.world.requests),) * common
        for end in ends:
            self.ask(beginning + (end,) * end, new, ingress, 0)


class SharingUrgentMachine(SharingMachine):
    priorities = (0, 0, -3)


class SharingDynamicMachine(SharingMachine):
    policy = "dynamic"


class SharingLyingMachine(SharingMachine, LyingMachine):
    addresses = ("p0", "c0", "d0", "d1")


class SharingColocatedMachine(SharingMachine, OvercommittingMachine):
    addresses = ("all0", "all1")


LIMITS = settings(
    max_examples=examples(60),
    stateful_step_count=50,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much],
)
TestRouter = RouterMachine.TestCase
TestRouter.settings = LIMITS
TestFifo = FifoMachine.TestCase
TestFifo.settings = LIMITS
TestStatic = StaticMachine.TestCase
TestStatic.settings = LIMITS
TestDynamic = DynamicMachine.TestCase
TestDynamic.settings = LIMITS
TestUrgent = UrgentMachine.TestCase
TestUrgent.settings = LIMITS
TestSilentWorkers = SilentMachine.TestCase
TestSilentWorkers.settings = LIMITS
TestColocated = ColocatedMachine.TestCase
TestColocated.settings = LIMITS
TestParts = PartsMachine.TestCase
TestParts.settings = LIMITS
TestColocatedParts = ColocatedPartsMachine.TestCase
TestColocatedParts.settings = LIMITS
TestSilentParts = SilentPartsMachine.TestCase
TestSilentParts.settings = LIMITS
TestRoles = RolesMachine.TestCase
TestRoles.settings = LIMITS
TestForecast = ForecastMachine.TestCase
TestForecast.settings = LIMITS
TestLying = LyingMachine.TestCase
TestLying.settings = LIMITS
TestOvercommitting = OvercommittingMachine.TestCase
TestOvercommitting.settings = LIMITS
TestLowering = LoweringMachine.TestCase
TestLowering.settings = LIMITS
TestLyingLowering = LyingLoweringMachine.TestCase
TestLyingLowering.settings = LIMITS
TestForecastUrgent = ForecastUrgentMachine.TestCase
TestForecastUrgent.settings = LIMITS
TestForecastColocatedParts = ForecastColocatedPartsMachine.TestCase
TestForecastColocatedParts.settings = LIMITS
TestForecastSilent = ForecastSilentMachine.TestCase
TestForecastSilent.settings = LIMITS
TestSharing = SharingMachine.TestCase
TestSharing.settings = LIMITS
TestSharingUrgent = SharingUrgentMachine.TestCase
TestSharingUrgent.settings = LIMITS
TestSharingLying = SharingLyingMachine.TestCase
TestSharingLying.settings = LIMITS
TestSharingColocated = SharingColocatedMachine.TestCase
TestSharingColocated.settings = LIMITS
TestSharingDynamic = SharingDynamicMachine.TestCase
TestSharingDynamic.settings = LIMITS

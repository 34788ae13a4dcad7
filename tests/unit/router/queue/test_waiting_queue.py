"""The waiting line: tenants in turns, priorities, and patience that nobody overtakes."""

from dataclasses import dataclass, field
from math import inf

import pytest
from hypothesis import given
from hypothesis import strategies as st

from triptych.router.policies.batching import BatchPolicy, fcfs, greedy_by_memory
from triptych.router.queue.fair_share import MOST_IDLE, FairShare
from triptych.router.queue.waiting_queue import ListedQueue, WaitingQueue, due_s
from triptych.router.snapshot import Budget, Waiting

PATIENCE_S, AGEING_S = 5.0, 10.0
WEIGHTS = {"a": 1.0, "b": 2.0, "c": 0.5}
POLICIES = (greedy_by_memory, fcfs)


@dataclass
class Written:
    """The same line with everything written down, and nothing kept."""

    waiting: list[tuple[Waiting, float, float]] = field(
        default_factory=list[tuple[Waiting, float, float]]
    )
    """Each with when it came and when it loses patience."""
    used: dict[str, float] = field(default_factory=dict[str, float])
    hold_s: float = 1.0

    def at(self, now: float) -> ListedQueue:
        return ListedQueue(
            [
                Waiting(one.id, one.bytes, now - arrived, due - now, one.priority, one.tenant)
                for one, arrived, due in self.waiting
            ],
            self.used,
            WEIGHTS,
            self.hold_s,
        )


events = st.lists(
    st.tuples(
        st.integers(1, 9),  # bytes
        st.booleans(),  # was in work before
        st.sampled_from("abc"),
        st.integers(-1, 1),  # priority
        st.one_of(st.none(), st.integers(0, 40)),  # who starts
        st.floats(-3, 9),  # what is charged then
    ),
    max_size=40,
)


@given(events=events, look_s=st.floats(0, 60))
def test_a_kept_line_reads_like_one_that_was_written_down(
    events: list[tuple[int, bool, str, int, int | None, float]], look_s: float
) -> None:
    kept, written = WaitingQueue(), Written()
    for number, (size, in_front, tenant, priority, gone, charge) in enumerate(events):
        arrived, name = float(number), f"r{number}"
        due = due_s(arrived, priority, max_overtake_s=PATIENCE_S, ageing_s=AGEING_S)
        kept.add(
            name,
            size,
            arrived,
            in_front=in_front,
            due=due,
            priority=priority,
            tenant=tenant,
            weight=WEIGHTS[tenant],
        )
        one = Waiting(name, size, 0.0, priority=priority, tenant=tenant)
        entry = (one, arrived, -inf if in_front else due)
        written.waiting.insert(0 if in_front else len(written.waiting), entry)
        leaving = next((one for one, _, _ in written.waiting if one.id == f"r{gone}"), None)
        if leaving is not None:
            kept.discard(leaving.id)
            kept.accounts.serve(leaving.tenant, charge)
            kept.accounts.learn(abs(charge))
            written.waiting = [entry for entry in written.waiting if entry[0] != leaving]
    written.hold_s = kept.accounts.hold_s
    written.used = {one.tenant: kept.accounts.used(one.tenant) for one, _, _ in written.waiting}
    now, plain = kept.at(look_s), written.at(look_s)
    assert len(now) == len(plain)
    assert list(now.in_order()) == list(plain.in_order())
    assert list(now.smallest_first()) == list(plain.smallest_first())


arrivals = st.lists(
    st.tuples(
        st.floats(0, 4),  # seconds since the one before
        st.integers(1, 60),  # bytes
        st.integers(-2, 2),  # priority
        st.sampled_from("abc"),
    ),
    min_size=1,
    max_size=40,
)


@dataclass
class Service:
    """Starts who is chosen, one round a second, and notes who overtook whom."""

    choose: BatchPolicy
    queue: WaitingQueue = field(default_factory=WaitingQueue)
    arrived: dict[str, tuple[float, int, str]] = field(
        default_factory=dict[str, tuple[float, int, str]]
    )
    started: list[tuple[float, str]] = field(default_factory=list[tuple[float, str]])

    def add(self, name: str, now: float, size: int, priority: int, tenant: str) -> None:
        self.arrived[name] = (now, priority, tenant)
        due = due_s(now, priority, max_overtake_s=PATIENCE_S, ageing_s=AGEING_S)
        weight = WEIGHTS[tenant]
        self.queue.add(name, size, now, due=due, priority=priority, tenant=tenant, weight=weight)

    def serve(self, now: float, free: int, most: int = 2) -> list[Waiting]:
        chosen = self.choose(self.queue.at(now), Budget(free_bytes=free, max_requests=most))
        for one in chosen:
            self.queue.discard(one.id)
            self.queue.accounts.serve(one.tenant, float(one.bytes))
            self.started.append((now, one.id))
        return chosen


@pytest.mark.parametrize("choose", POLICIES)
@given(arrivals=arrivals, free=st.integers(10, 100))
def test_nothing_of_its_tenant_overtakes_a_request_beyond_its_ageing_bound(
    choose: BatchPolicy, arrivals: list[tuple[float, int, int, str]], free: int
) -> None:
    """It may come ``ageing_s`` later for each step of priority between them, and no later."""
    service, now = Service(choose), 0.0
    for number, (gap_s, size, priority, tenant) in enumerate(arrivals):
        now += gap_s
        service.add(f"r{number}", now, size, priority, tenant)
        service.serve(now, free)
    for _ in range(200):
        now += 1.0
        service.serve(now, max(free, 60))
    assert len(service.queue) == 0
    for place, (when, name) in enumerate(service.started):
        arrived, priority, tenant = service.arrived[name]
        for earlier in [one for one in service.started[:place] if one[0] < when]:
            then, other = earlier
            other_arrived, other_priority, other_tenant = service.arrived[other]
            waited_then = then > arrived + PATIENCE_S + priority * AGEING_S
            if other_tenant == tenant and waited_then and arrived < then:  # it was there
                later_s = (other_arrived - arrived) + (other_priority - priority) * AGEING_S
                assert later_s <= 1e-9  # equal but for rounding: then the first to come is first


@pytest.mark.parametrize("choose", POLICIES)
@given(
    sizes=st.lists(st.tuples(st.integers(1, 50), st.sampled_from("abc")), max_size=60),
    most=st.integers(1, 4),
)
def test_while_two_tenants_wait_neither_gets_ahead_by_more_than_a_request_of_each(
    choose: BatchPolicy, sizes: list[tuple[int, str]], most: int
) -> None:
    service = Service(choose)
    for number, (size, tenant) in enumerate(sizes):
        service.add(f"r{number}", 0.0, size, 0, tenant)
    backlog = {name: [size for size, tenant in sizes if tenant == name] for name in WEIGHTS}
    got = dict.fromkeys(WEIGHTS, 0.0)
    left = {name: len(own) for name, own in backlog.items()}
    largest = {name: max(own, default=0) / WEIGHTS[name] for name, own in backlog.items()}
    while len(service.queue):
        for one in service.serve(0.0, 10**6, most):
            waiting = [name for name, count in left.items() if count]
            got[one.tenant] += one.bytes / WEIGHTS[one.tenant]
            left[one.tenant] -= 1
            for other in waiting:
                assert got[one.tenant] - got[other] <= largest[one.tenant] + 1e-6


def test_a_tenant_that_comes_back_neither_saved_up_nor_pays_for_quiet_times() -> None:
    service = Service(fcfs)
    for number in range(50):
        service.add(f"a{number}", 0.0, 10, 0, "a")
        service.serve(0.0, 100, 1)
    for number in range(4):
        service.add(f"a{50 + number}", 0.0, 10, 0, "a")
        service.add(f"c{number}", 0.0, 10, 0, "c")
    tenants = [one.tenant for _ in range(3) for one in service.serve(0.0, 100, 1)]
    assert sorted(tenants) == ["a", "a", "c"]  # c has half the weight


def test_accounts_of_made_up_tenants_do_not_pile_up() -> None:
    accounts = FairShare()
    for number in range(2 * MOST_IDLE):
        name = f"t{number}"
        accounts.open(name, 1.0, waits_already=False)
        accounts.serve(name, 5.0 + number)
        accounts.close(name)
    assert len(accounts) <= MOST_IDLE + 1


def test_a_lower_priority_goes_first_and_does_not_for_ever() -> None:
    service = Service(greedy_by_memory)
    service.add("batch", 0.0, 5, 1, "a")
    service.add("urgent", 0.0, 50, -1, "a")
    assert [one.id for one in service.serve(1.0, 100, 1)] == ["urgent"]
    for second in range(2, 16):
        service.add(f"u{second}", float(second), 50, 0, "a")
        [started] = service.serve(float(second), 100, 1)
        assert started.id != "batch"
    service.add("too late", 16.0, 50, 0, "a")
    service.add("later", 16.0, 50, 0, "a")
    assert [one.id for one in service.serve(16.5, 100, 1)] == ["batch"]

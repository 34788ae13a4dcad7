"""The waiting queue, sorted in each of the orders that policies use."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from heapq import heappop, heappush
from math import inf
from typing import Any, Protocol

from triptych.router.queue.fair_share import FairShare, in_turns
from triptych.router.queue.sorted_index import SortedIndex
from triptych.router.snapshot import Waiting


class QueueView(Protocol):
    """The waiting requests as a policy sees them. Each order is a lazy iterator.

    In every order tenants take turns by fair queueing, and the overdue requests of a tenant come
    before its others, so no policy can starve a request.
    """

    def __len__(self) -> int: ...

    def in_order(self) -> Iterator[Waiting]:
        """By priority, then by arrival; retried attempts at the front."""
        ...

    def smallest_first(self) -> Iterator[Waiting]:
        """By priority, then by bytes, the smallest first; equal ones by arrival."""
        ...


def due_s(arrived: float, priority: int, *, max_overtake_s: float, ageing_s: float) -> float:
    """When a request becomes overdue: from then on no request of its tenant overtakes it.

    Each step of ``priority`` (lower is sooner) counts as ``ageing_s`` of waiting. So no request
    overtakes one that arrived ``ageing_s`` earlier for each step between them. A request with an
    SLO becomes overdue sooner (``passes.slo_admission``).

    >>> due_s(100.0, 2, max_overtake_s=5.0, ageing_s=10.0)
    125.0
    """
    return arrived + max_overtake_s + priority * ageing_s


def of_one_tenant(waiting: Sequence[Waiting], key: Callable[[Waiting], Any]) -> list[Waiting]:
    """The order within a tenant: overdue requests first, then the others by ``key``."""
    late = sorted((one for one in waiting if one.slack_s < 0), key=lambda one: one.slack_s)
    return [*late, *sorted((one for one in waiting if one.slack_s >= 0), key=key)]


@dataclass(frozen=True, slots=True)
class ListedQueue:
    """A queue from a list: the specification of each order."""

    waiting: Sequence[Waiting]
    """In order of arrival."""
    used: Mapping[str, float] = field(default_factory=dict[str, float])
    """Use of each tenant, per weight; 0 for missing ones."""
    weights: Mapping[str, float] = field(default_factory=dict[str, float])
    """Weight of each tenant; 1 for missing ones."""
    hold_s: float = 1.0
    """Assumed time that a request holds its bytes."""

    def __len__(self) -> int:
        return len(self.waiting)

    def in_order(self) -> Iterator[Waiting]:
        return self._by(lambda one: one.priority)

    def smallest_first(self) -> Iterator[Waiting]:
        return self._by(lambda one: (one.priority, one.bytes))

    def _by(self, key: Callable[[Waiting], Any]) -> Iterator[Waiting]:
        of_tenant = dict[str, list[Waiting]]()
        for one in self.waiting:
            of_tenant.setdefault(one.tenant, []).append(one)
        queues = {name: of_one_tenant(own, key) for name, own in of_tenant.items()}
        used = {name: self.used.get(name, 0.0) for name in queues}
        return in_turns(used, queues, self._price)

    def _price(self, tenant: str, one: Waiting) -> float:
        return one.bytes * self.hold_s / self.weights.get(tenant, 1.0)


@dataclass(slots=True)
class Place:
    """One request in the queue."""

    bytes: int
    arrived: float
    number: int
    """Sequence number of its arrival; negative for retried attempts."""
    priority: int
    tenant: str
    due: float
    """When it becomes overdue."""


@dataclass(slots=True)
class Lane:
    """The waiting requests of one tenant, in each order."""

    by_due: SortedIndex[tuple[float, int]] = field(default_factory=SortedIndex[tuple[float, int]])
    by_place: SortedIndex[tuple[int, int]] = field(default_factory=SortedIndex[tuple[int, int]])
    by_bytes: SortedIndex[tuple[int, int, int]] = field(
        default_factory=SortedIndex[tuple[int, int, int]]
    )

    def put(self, name: str, place: Place) -> None:
        self.by_due.put(name, (place.due, place.number))
        self.by_place.put(name, (place.priority, place.number))
        self.by_bytes.put(name, (place.priority, place.bytes, place.number))

    def discard(self, name: str) -> None:
        for order in (self.by_due, self.by_place, self.by_bytes):
            order.discard(name)


Order = Callable[[Lane], Iterator[str]]


@dataclass
class WaitingQueue:
    """The waiting queue: all orders are kept up to date as requests come and go."""

    accounts: FairShare = field(default_factory=FairShare)
    """Use of each tenant."""
    _places: dict[str, Place] = field(default_factory=dict[str, Place])
    _deferred: dict[str, Place] = field(default_factory=dict[str, Place])
    """Places of requests that cannot start at present, in none of the orders."""
    _by_age: SortedIndex[tuple[float, int]] = field(default_factory=SortedIndex[tuple[float, int]])
    _lanes: dict[str, Lane] = field(default_factory=dict[str, Lane])
    _turns: SortedIndex[float] = field(default_factory=SortedIndex[float])
    """Tenants with waiting requests: the one with least use is next."""
    _came: int = 0
    changes: int = 0
    """Counts the requests that were put in or taken out."""

    def __post_init__(self) -> None:
        self.accounts.on_change = self._rank

    def __len__(self) -> int:
        return len(self._places)

    def __contains__(self, name: str) -> bool:
        return name in self._places

    def add(
        self,
        name: str,
        size: int,
        arrived: float,
        *,
        in_front: bool = False,
        due: float = inf,
        priority: int = 0,
        tenant: str = "",
        weight: float = 1.0,
    ) -> None:
        """Add a request that needs ``size`` bytes.

        ``in_front``: a retried attempt, overdue at once; the newest comes first.
        """
        self._came += 1
        number = -self._came if in_front else self._came
        place = Place(size, arrived, number, priority, tenant, -inf if in_front else due)
        self.accounts.open(tenant, weight, waits_already=tenant in self._lanes)
        self._put(name, place)

    def discard(self, name: str) -> None:
        """Remove a request, if it waits; its tenant's account stays open."""
        self._deferred.pop(name, None)
        self._take_out(name)

    def defer(self, name: str) -> None:
        """Take a request out of all orders until ``restore``: it cannot start before that."""
        place = self._take_out(name)
        if place is not None:
            self._deferred[name] = place

    def restore(self, name: str) -> None:
        """Put a deferred request back to its place, if it was not removed."""
        place = self._deferred.pop(name, None)
        if place is not None:
            self._put(name, place)

    def _put(self, name: str, place: Place) -> None:
        self.changes += 1
        self._places[name] = place
        self._by_age.put(name, (place.arrived, place.number))
        lane = self._lanes.get(place.tenant)
        if lane is None:
            lane = self._lanes[place.tenant] = Lane()
        lane.put(name, place)
        self._rank(place.tenant)

    def _take_out(self, name: str) -> Place | None:
        place = self._places.pop(name, None)
        if place is None:
            return None
        self.changes += 1
        self._by_age.discard(name)
        lane = self._lanes[place.tenant]
        lane.discard(name)
        if not len(lane.by_due):
            del self._lanes[place.tenant]
            self._turns.discard(place.tenant)
        return place

    def ahead_of(self, tenant: str, due: float) -> int:
        """Number of requests that probably start before one of ``tenant`` with this ``due``.

        Those of the tenant that are due sooner, and as many of each other waiting tenant.
        """
        lane = self._lanes.get(tenant)
        own = lane.by_due.count_below((due, self._came + 1)) if lane else 0
        others = len(self._lanes) - (tenant in self._lanes)
        return min(len(self), own + others * (own + 1))

    def displaceable(self, tenant: str, weight: float) -> Iterator[str]:
        """Requests that may leave to make room for one of ``tenant``, the first one first.

        They are those of the tenant with the most requests per weight: its least urgent ones, and
        of these the newest first. None if ``tenant`` would then have more per weight than that one.
        """
        if not self._lanes:
            return
        shares = {
            name: len(lane.by_due) / self.accounts.weight(name)
            for name, lane in self._lanes.items()
        }
        largest = max(shares, key=lambda name: (shares[name], name))
        lane, own = self._lanes[largest], self._lanes.get(tenant)
        count = len(own.by_due) if own else 0
        rest = (len(lane.by_due) - 1) / self.accounts.weight(largest)
        if largest != tenant and rest >= (count + 1) / weight:
            yield from reversed(lane.by_place)

    def older(self, name: str) -> int:
        """Number of waiting requests that arrived before a waiting one."""
        return self._by_age.place(name)

    def oldest_arrival(self) -> float | None:
        """Arrival of the oldest waiting request; None if none waits."""
        name = self._by_age.first()
        return None if name is None else self._places[name].arrived

    def at(self, now: float) -> "QueueNow":
        """The queue as a policy sees it, valid until it changes."""
        return QueueNow(self, now)

    def read(self, order: Order, now: float) -> Iterator[Waiting]:
        """All waiting requests; ``order`` sorts those of a tenant that are not overdue."""
        if len(self._lanes) == 1:
            [lane] = self._lanes.values()
            return self._read_lane(lane, order, now)
        return self._in_turns(order, now)

    def _in_turns(self, order: Order, now: float) -> Iterator[Waiting]:
        """As ``fair_share.in_turns``, without visiting tenants whose turn does not come."""
        price = self.accounts.price
        turns = list[tuple[float, str, Iterator[Waiting]]]()
        rest = iter(self._turns)
        following = next(rest, None)
        while turns or following is not None:
            if following is not None:
                used = self._turns.key(following)
                if not turns or (used, following) < turns[0][:2]:
                    lane = self._read_lane(self._lanes[following], order, now)
                    heappush(turns, (used, following, lane))
                    following = next(rest, None)
                    continue
            spent, tenant, lane = heappop(turns)
            one = next(lane, None)
            if one is not None:
                yield one
                heappush(turns, (spent + price(tenant, one.bytes), tenant, lane))

    def _read_lane(self, lane: Lane, order: Order, now: float) -> Iterator[Waiting]:
        late = 0
        for name in lane.by_due:
            if self._places[name].due >= now:
                break
            late += 1
            yield self._waiting(name, now)
        if late == len(lane.by_due):
            return
        for name in order(lane):
            if self._places[name].due >= now:
                yield self._waiting(name, now)

    def _waiting(self, name: str, now: float) -> Waiting:
        place = self._places[name]
        return Waiting(
            id=name,
            bytes=place.bytes,
            waited_s=now - place.arrived,
            slack_s=place.due - now,
            priority=place.priority,
            tenant=place.tenant,
        )

    def _rank(self, tenant: str) -> None:
        if tenant in self._lanes:
            self._turns.put(tenant, self.accounts.used(tenant))


@dataclass(frozen=True, slots=True)
class QueueNow:
    """The waiting queue at one moment."""

    queue: WaitingQueue
    now: float

    def __len__(self) -> int:
        return len(self.queue)

    def in_order(self) -> Iterator[Waiting]:
        return self.queue.read(lambda lane: iter(lane.by_place), self.now)

    def smallest_first(self) -> Iterator[Waiting]:
        return self.queue.read(lambda lane: iter(lane.by_bytes), self.now)

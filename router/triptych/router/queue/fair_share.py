"""Fair queueing between tenants, weighted, by the byte-seconds that their requests hold."""

from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

T = TypeVar("T")

FIRST_HOLD_S = 1.0
"""Assumed time that a request holds its bytes, until the first one has ended."""
LEARNING = 0.05
"""Weight of the newest request in the mean time that requests hold their bytes."""
MOST_IDLE = 1024
"""Accounts that are kept of tenants without requests."""


def in_turns(
    used: Mapping[str, float],
    queues: Mapping[str, Sequence[T]],
    price: Callable[[str, T], float],
) -> Iterator[T]:
    """Merge the queues of tenants: the one with least use is next and is charged for its request.

    ``used`` and ``price`` are per unit of weight; ties go by name. So while two tenants wait, their
    use per weight differs by at most a request of each. This is the specification; ``WaitingQueue``
    does the same without visiting all tenants.

    Source: start-time fair queueing (Goyal, Vin and Cheng 1996); for LLM serving VTC (Sheng et
    al., OSDI 2024), which counts tokens where we count bytes held times seconds
    """
    spent = {name: used[name] for name, queue in queues.items() if queue}
    taken = dict.fromkeys(spent, 0)
    while spent:
        name = min(spent, key=lambda one: (spent[one], one))
        one = queues[name][taken[name]]
        yield one
        taken[name] += 1
        spent[name] += price(name, one)
        if taken[name] == len(queues[name]):
            del spent[name]


@dataclass(slots=True)
class Account:
    """Use of one tenant."""

    weight: float = 1.0
    used: float = 0.0
    """Byte seconds, divided by the weight."""
    requests: int = 0
    """Number of its requests in the router."""


@dataclass
class FairShare:
    """Accounts of all tenants with requests, and of some without.

    A request is charged when it starts, by its bytes and the mean holding time; the account is
    corrected at its end. A tenant that returns after a pause is set to the present level: idle time
    saves no credit, and use without competition is not charged later.
    """

    on_change: Callable[[str], None] = lambda _tenant: None
    """Called with each tenant whose account changed."""
    hold_s: float = FIRST_HOLD_S
    """Mean time from start to end of a request."""
    _accounts: dict[str, Account] = field(default_factory=dict[str, Account])
    _idle: OrderedDict[str, None] = field(default_factory=OrderedDict[str, None])
    _level: float = 0.0
    """Use of the tenant that was served last, before it was charged."""

    def __len__(self) -> int:
        return len(self._accounts)

    def used(self, tenant: str) -> float:
        """Byte seconds per weight."""
        return self._accounts[tenant].used

    def weight(self, tenant: str) -> float:
        return self._accounts[tenant].weight

    def price(self, tenant: str, size: int) -> float:
        """Expected increase of ``used`` for ``size`` bytes."""
        return size * self.hold_s / self._accounts[tenant].weight

    def open(self, tenant: str, weight: float, *, waits_already: bool) -> None:
        """A request of the tenant arrived; ``waits_already``: others of it are waiting."""
        account = self._accounts.setdefault(tenant, Account())
        self._idle.pop(tenant, None)
        account.requests += 1
        account.weight = weight
        if not waits_already:
            account.used = max(account.used, self._level)

    def close(self, tenant: str) -> None:
        """A request of the tenant ended."""
        account = self._accounts[tenant]
        account.requests -= 1
        if account.requests:
            return
        self._idle[tenant] = None
        if account.used <= self._level:
            self._forget(tenant)
        elif len(self._idle) > MOST_IDLE:
            self._forget(next(iter(self._idle)))

    def serve(self, tenant: str, byte_s: float) -> None:
        """A waiting request starts and is charged in advance."""
        self._level = max(self._level, self._accounts[tenant].used)
        self.charge(tenant, byte_s)

    def charge(self, tenant: str, byte_s: float) -> None:
        """Add use, or refund what was charged and not used."""
        if byte_s:
            account = self._accounts[tenant]
            account.used += byte_s / account.weight
            self.on_change(tenant)

    def learn(self, hold_s: float) -> None:
        """Update the mean holding time."""
        self.hold_s += LEARNING * (hold_s - self.hold_s)

    def _forget(self, tenant: str) -> None:
        self._idle.pop(tenant)
        del self._accounts[tenant]

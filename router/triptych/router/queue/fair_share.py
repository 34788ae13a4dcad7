"""How much of the server each tenant has had, and whose turn it is."""

from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

T = TypeVar("T")

FIRST_HOLD_S = 1.0
"""What a request is taken to hold its bytes for, until one has ended."""
LEARNING = 0.05
"""Weight of the newest request in the mean time that requests hold their bytes."""
MOST_IDLE = 1024
"""Tenants without any request whose accounts are kept; without a key file names cost nothing."""


def in_turns(
    used: Mapping[str, float],
    queues: Mapping[str, Sequence[T]],
    price: Callable[[str, T], float],
) -> Iterator[T]:
    """Merge the lines of tenants: whoever has used least is next, and pays for what is taken.

    ``used`` and ``price`` are per unit of weight; equal ones go by name. So while two tenants
    wait, what one of them gets per weight is ahead of the other's by no more than a request of
    each. This is the written rule; ``WaitingQueue`` does the same without looking at all tenants.

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
    """What one tenant has had."""

    weight: float = 1.0
    used: float = 0.0
    """Byte seconds, divided by the weight."""
    requests: int = 0
    """Its requests in the router."""


@dataclass
class FairShare:
    """Accounts of all tenants with requests, and of some without.

    A request is charged when it starts, by its bytes and the mean time that others held theirs; at
    its end the account is put right. Whoever comes back after a pause is set to where the others
    are: nobody saves up, and nobody pays for what they used while nobody else waited.
    """

    on_change: Callable[[str], None] = lambda _tenant: None
    """Told of each tenant whose account changed."""
    hold_s: float = FIRST_HOLD_S
    """Mean time from start to end of a request."""
    _accounts: dict[str, Account] = field(default_factory=dict[str, Account])
    _idle: OrderedDict[str, None] = field(default_factory=OrderedDict[str, None])
    _level: float = 0.0
    """Where whoever was served last stood before."""

    def __len__(self) -> int:
        return len(self._accounts)

    def used(self, tenant: str) -> float:
        """Byte seconds per weight."""
        return self._accounts[tenant].used

    def price(self, tenant: str, size: int) -> float:
        """What ``size`` bytes will probably add to ``used``."""
        return size * self.hold_s / self._accounts[tenant].weight

    def open(self, tenant: str, weight: float, *, waits_already: bool) -> None:
        """A request of this tenant came; ``waits_already``: it has others in the line."""
        account = self._accounts.setdefault(tenant, Account())
        self._idle.pop(tenant, None)
        account.requests += 1
        account.weight = weight
        if not waits_already:
            account.used = max(account.used, self._level)

    def close(self, tenant: str) -> None:
        """A request of this tenant is gone."""
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
        """A waiting request starts, and is charged in advance."""
        self._level = max(self._level, self._accounts[tenant].used)
        self.charge(tenant, byte_s)

    def charge(self, tenant: str, byte_s: float) -> None:
        """Add what was used, or take back what was charged and not used."""
        if byte_s:
            account = self._accounts[tenant]
            account.used += byte_s / account.weight
            self.on_change(tenant)

    def learn(self, hold_s: float) -> None:
        """A request has held bytes for so long."""
        self.hold_s += LEARNING * (hold_s - self.hold_s)

    def _forget(self, tenant: str) -> None:
        self._idle.pop(tenant)
        del self._accounts[tenant]

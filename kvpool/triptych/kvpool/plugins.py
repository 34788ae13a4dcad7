"""Tables of the pool's policies."""

from collections.abc import Callable

from triptych.core.registry import Registry
from triptych.kvpool.eviction import EvictionPolicy

EVICTION_POLICIES = Registry[Callable[[], EvictionPolicy]](
    kind="eviction_policies",
    builtin={
        "cost": "triptych.kvpool.eviction:CostPolicy",
        "lru": "triptych.kvpool.eviction:LruPolicy",
    },
)

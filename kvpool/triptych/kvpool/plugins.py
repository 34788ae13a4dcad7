"""Tables of the pool's policies."""

from collections.abc import Callable

from triptych.core.registry import Registry
from triptych.kvpool.prefix.eviction import EvictionPolicy

EVICTION_POLICIES = Registry[Callable[[], EvictionPolicy]](
    kind="eviction_policies",
    builtin={
        "cost": "triptych.kvpool.prefix.eviction:CostPolicy",
        "lru": "triptych.kvpool.prefix.eviction:LruPolicy",
    },
)

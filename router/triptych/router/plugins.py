"""Plug-in tables of batch and placement policies."""

from triptych.core.config import RouterConfig
from triptych.core.errors import ConfigError
from triptych.core.registry import Registry
from triptych.router.policies.batch_gates import STATIC, Schedule, static_schedule
from triptych.router.policies.batching import BatchPolicy
from triptych.router.policies.placement import PlacementPolicy

BATCH_POLICIES = Registry[BatchPolicy](
    kind="batch_policies",
    builtin={
        "greedy_by_memory": "triptych.router.policies.batching:greedy_by_memory",
        "fcfs": "triptych.router.policies.batching:fcfs",
        "fifo": "triptych.router.policies.batching:fcfs",  # an alias
        "dynamic": "triptych.router.policies.batch_gates:DYNAMIC",
    },
)
PLACEMENT_POLICIES = Registry[PlacementPolicy](
    kind="placement_policies",
    builtin={
        "least_bytes": "triptych.router.policies.placement:least_bytes",
        "power_of_two": "triptych.router.policies.placement:power_of_two",
        "prefix_affinity": "triptych.router.policies.placement:prefix_affinity",
        "dualmap": "triptych.router.policies.placement:dualmap",
        "single_hash": "triptych.router.policies.placement:single_hash",
    },
)


def check_policies(config: RouterConfig, decode_slots: int | None = None) -> None:
    """Raise ConfigError if a configured policy does not exist or does not fit the decode slots."""
    schedule_named(config.batch_policy, decode_slots)
    try:
        PLACEMENT_POLICIES.load(config.placement)
    except ConfigError as error:
        raise ConfigError(f"router.placement={config.placement!r}: {error}") from error


def schedule_named(name: str, decode_slots: int | None = None) -> Schedule:
    """The schedule that a name stands for: in the table, or ``static:p<X>c<Y>d<Z>``.

    ``decode_slots``: requests that a decode worker runs at a time, if that is to be checked.

    Raises: ConfigError if there is none, or if its batches do not fit
    """
    if name.startswith(STATIC):
        schedule = static_schedule(name)
    else:
        found = BATCH_POLICIES.load(name)
        schedule = found if isinstance(found, Schedule) else Schedule(choose=found)
    if decode_slots is not None:
        schedule.check(decode_slots, name)
    return schedule

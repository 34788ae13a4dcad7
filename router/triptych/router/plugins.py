"""Tables of the router's policies."""

from triptych.core.registry import Registry
from triptych.router.batching import BatchPolicy
from triptych.router.schedule import STATIC, Schedule, static_schedule

BATCH_POLICIES = Registry[BatchPolicy](
    kind="batch_policies",
    builtin={
        "greedy_by_memory": "triptych.router.batching:greedy_by_memory",
        "fifo": "triptych.router.batching:fifo",
        "fcfs": "triptych.router.batching:fifo",
        "dynamic": "triptych.router.dynamic:DYNAMIC",
    },
)


def schedule_named(name: str, decode_slots: int | None = None) -> Schedule:
    """The schedule of a policy's name: one of the table, or ``static:p<X>c<Y>d<Z>``.

    ``decode_slots``: what a decode worker holds at once, if that is to be checked.

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

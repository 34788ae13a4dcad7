"""Tables of the router's policies."""

from triptych.core.registry import Registry
from triptych.router.batching import BatchPolicy

BATCH_POLICIES = Registry[BatchPolicy](
    kind="batch_policies",
    builtin={
        "greedy_by_memory": "triptych.router.batching:greedy_by_memory",
        "fifo": "triptych.router.batching:fifo",
    },
)

"""The schedule that FastCache calls dynamic: greedy by memory, in batches that follow the load."""

from triptych.router.policies.batch_gates import Gate, Schedule
from triptych.router.policies.batching import greedy_by_memory

DYNAMIC = Schedule(
    choose=greedy_by_memory,
    prefill=Gate(most=1),
    compress=Gate(most=1),
    is_adaptive=True,
)
"""A worker that has nothing to do gets a batch at once, so at a low rate nobody waits for others.

Source: FastCache, section 3.3 (dynamic multi-stage batching)
"""

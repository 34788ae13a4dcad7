"""Whose chunk is next, over random arrivals."""

from dataclasses import dataclass

from hypothesis import given
from hypothesis import strategies as st

from triptych.workers.prefill.chunk_scheduler import OVERTAKE_FACTOR, ChunkScheduler

CHUNK = 16


@dataclass
class Prompt:
    number: int
    tokens: int
    came: int
    due: float
    left: int


@given(st.lists(st.tuples(st.integers(0, 3), st.integers(1, 200)), min_size=1, max_size=25))
def test_nobody_is_overtaken_by_who_came_after_it_was_due(arrivals: list[tuple[int, int]]) -> None:
    """Each arrival: steps before it, and its tokens."""
    chunks, queue, read = ChunkScheduler(), list[Prompt](), list[Prompt]()

    def step() -> None:
        left = CHUNK
        for prompt in chunks.in_order(queue):
            count = min(left, prompt.left)
            prompt.left, left = prompt.left - count, left - count
            if count and not prompt.left:
                read.append(prompt)
                queue.remove(prompt)
        if left < CHUNK:
            chunks.note(CHUNK - left, 0.1)
            assert left == 0 or not queue  # no token of a chunk is wasted while anybody waits

    for number, (steps, tokens) in enumerate(arrivals):
        for _ in range(steps):
            step()
        queue.append(Prompt(number, tokens, chunks.read_tokens, chunks.due(tokens), tokens))
    while queue:
        step()
    places = {prompt.number: place for place, prompt in enumerate(read)}
    for one in read:
        for other in read:
            if other.number > one.number and places[other.number] < places[one.number]:
                assert other.tokens < one.tokens  # only shorter ones overtake,
                assert other.came < one.came + OVERTAKE_FACTOR * one.tokens  # and not for ever


def test_a_limit_makes_a_prompt_urgent_once_it_is_known_what_a_token_takes() -> None:
    chunks = ChunkScheduler()
    assert chunks.due(1000, ttft_s=1.0) == 2000
    chunks.note(100, 1.0)  # 10 ms each
    assert chunks.due(1000, ttft_s=1.0) == 200
    assert chunks.due(10, ttft_s=1.0) == 120

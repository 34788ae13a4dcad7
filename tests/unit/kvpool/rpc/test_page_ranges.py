"""Page ids as runs: exact for our own bytes, careful with anybody else's."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from triptych.core.errors import MessageError
from triptych.kvpool.rpc import page_ranges

LIMIT = 300


@given(hnp.arrays(np.int32, st.integers(0, LIMIT), elements=st.integers(0, LIMIT - 1)))
def test_round_trip_keeps_ids_and_order(ids: np.ndarray) -> None:
    back = page_ranges.unpack(page_ranges.pack(ids), LIMIT)
    assert back.dtype == np.int32
    assert back.tolist() == ids.tolist()


@given(st.lists(st.tuples(st.integers(0, 250), st.integers(1, 50)), max_size=6))
def test_eight_bytes_per_run(pieces: list[tuple[int, int]]) -> None:
    ids = np.concatenate([np.arange(0), *(np.arange(s, s + n) for s, n in pieces)])
    assert len(page_ranges.pack(ids.astype(np.int32))) <= 8 * len(pieces)


def test_consecutive_pages_of_a_request_take_eight_bytes() -> None:
    assert page_ranges.pack(np.arange(100, 3700, dtype=np.int32)) == bytes.fromhex(
        "64000000100e0000"
    )


@given(st.binary(max_size=64))
def test_any_bytes_are_ids_below_the_limit_or_an_error(raw: bytes) -> None:
    try:
        ids = page_ranges.unpack(raw, LIMIT)
    except MessageError:
        return
    assert ids.size <= LIMIT
    assert np.all((ids >= 0) & (ids < LIMIT))


@pytest.mark.parametrize(
    "pairs",
    [
        [(-1, 2)],
        [(0, 0)],
        [(5, -3)],
        [(LIMIT, 1)],
        [(LIMIT - 1, 2)],
        [(2**31 - 1, 2**31 - 1)],
        [(0, LIMIT), (0, 1)],
        [(0, LIMIT)] * 1000,
    ],
)
def test_runs_outside_the_arena_are_refused(pairs: list[tuple[int, int]]) -> None:
    with pytest.raises(MessageError):
        page_ranges.unpack(np.array(pairs, "<i4").tobytes(), LIMIT)


def test_half_a_run_is_refused() -> None:
    with pytest.raises(MessageError, match="7 bytes"):
        page_ranges.unpack(b"\0" * 7, LIMIT)

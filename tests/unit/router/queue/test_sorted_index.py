"""The order is that of all names sorted, whenever it is read."""

from hypothesis import given
from hypothesis import strategies as st

from triptych.router.queue.sorted_index import SortedIndex

NAMES = st.sampled_from([f"n{number}" for number in range(40)])
CHANGES = st.tuples(NAMES, st.integers(0, 9) | st.none())


@given(st.lists(st.lists(CHANGES, max_size=30)))
def test_the_order_is_renewed_when_it_is_read(rounds: list[list[tuple[str, int | None]]]) -> None:
    index, keys = SortedIndex[int](), dict[str, int]()
    for changes in rounds:
        for name, key in changes:
            if key is None:
                index.discard(name)
                keys.pop(name, None)
            else:
                index.put(name, key)
                keys[name] = key
            assert len(index) == len(keys)
            assert (name in index) == (name in keys)
        ordered = sorted(keys, key=lambda name: (keys[name], name))
        assert list(index) == ordered
        assert list(reversed(index)) == ordered[::-1]
        assert index.first() == next(iter(ordered), None)
        assert [index.place(name) for name in ordered] == list(range(len(ordered)))
        assert index.count_below(5) == sum(key < 5 for key in keys.values())


def test_names_that_come_and_go_unread_leave_nothing() -> None:
    index = SortedIndex[int]()
    for number in range(100):
        index.put(f"n{number}", number)
        index.discard(f"n{number}")
    assert not index._changed

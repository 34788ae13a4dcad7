"""Kept orders against the written rules, over random fleets."""

from itertools import count

from hypothesis import given
from hypothesis import strategies as st

from tests.unit.router.rules import choose_compressor, choose_decode, choose_prefill
from triptych.core.messages import Register, Request, Sampling, Stage
from triptych.router.models.latency_forecast import LatencyForecast
from triptych.router.models.memory_estimate import RequestBytes
from triptych.router.passes.placement_view import Placer
from triptych.router.policies.placement import least_bytes
from triptych.router.policies.prefix_map import PrefixMap
from triptych.router.queue.sorted_index import SortedIndex
from triptych.router.snapshot import Role, WorkerLoad
from triptych.router.state.load_index import LoadIndex
from triptych.router.state.request_table import Entry, Placement, State

ARENAS = ("a", "b", "c")
CAPACITY = 100
SIZES = RequestBytes(1, 1, 1, 1, 1)
STAGES: list[tuple[Stage, ...]] = [
    ("prefill",),
    ("compress",),
    ("decode",),
    ("prefill", "compress", "decode"),
]

hellos = st.tuples(st.sampled_from(STAGES), st.sampled_from(ARENAS), st.integers(1, 3))
moves = st.tuples(
    st.integers(0, 7), st.sampled_from([*State]), st.integers(0, 9), st.integers(-1, 9),
    st.integers(1, 40),
)  # fmt: skip
bookings = st.fixed_dictionaries({arena: st.integers(0, CAPACITY) for arena in ARENAS})


def build(
    workers: list[tuple[tuple[Stage, ...], str, int]],
    requests: list[tuple[int, State, int, int, int]],
    booked: dict[str, int],
    silent: set[int],
    roles: dict[int, Role],
) -> LoadIndex:
    load_index = LoadIndex(10.0, lambda arena: booked[arena], long_tokens=25)
    for number, (stages, arena, slots) in enumerate(workers):
        # Names in another order than addresses: ties go by name.
        registration = Register(
            name=f"n{99 - number}", address=f"w{number}", stages=stages,
            max_requests=slots if "decode" in stages else 0, arena=arena,
        )  # fmt: skip
        load_index.join(registration)
    numbers = range(len(workers))
    for number in sorted(numbers, key=lambda number: number not in silent):
        load_index.record_report(f"w{number}", 0.0 if number in silent else 5.0)
    able = {f"w{number}" for number, (stages, _, _) in enumerate(workers) if len(stages) > 1}
    named = {f"w{number}": role for number, role in roles.items()}
    entries = dict[int, Entry]()
    for name, state, at, decode, tokens in requests:
        request = Request(id=f"r{name}", prompt=(0,) * tokens, sampling=Sampling(), reply_to="x")
        entry = entries.setdefault(name, Entry(request, SIZES, 0.0, 0.0))
        entry.state, entry.worker = state, f"w{at}"
        entry.placement.decode_worker = f"w{decode}" if decode >= 0 else ""
        entry.stage = STAGES[at % 3][0]
        load_index.count(entry)
    load_index.assign({name: role for name, role in named.items() if name in able})
    load_index.refresh(11.0)
    return load_index


def address(load: WorkerLoad | None) -> str | None:
    return load and load.address


@given(
    workers=st.lists(hellos, max_size=8),
    requests=st.lists(moves, max_size=12),
    booked=bookings,
    silent=st.sets(st.integers(0, 7)),
    roles=st.dictionaries(st.integers(0, 7), st.sampled_from(["both", "prefill", "decode"])),
    tokens=st.integers(1, 60),
    needs=st.integers(0, CAPACITY),
)
def test_whoever_is_next_is_whom_the_rules_choose(
    workers: list[tuple[tuple[Stage, ...], str, int]],
    requests: list[tuple[int, State, int, int, int]],
    booked: dict[str, int],
    silent: set[int],
    roles: dict[int, Role],
    tokens: int,
    needs: int,
) -> None:
    load_index = build(workers, requests, booked, silent, roles)
    loads = list(load_index.loads())

    def free(arena: str) -> int:
        return CAPACITY - booked[arena]

    def fits(arena: str) -> bool:
        return needs <= free(arena)

    assert {load.address for load in loads if load.is_full} == {
        f"w{number}" for number in silent if number < len(workers)
    }
    chosen = choose_prefill(loads, tokens=tokens, limit_tokens=50, fits=fits)
    placer = Placer(least_bytes, load_index, LatencyForecast(), lambda _: 64, PrefixMap(0), 1.0)
    prompt = Request(id="new", prompt=(0,) * tokens, sampling=Sampling(), reply_to="x")
    choice = placer.choose(placer.snapshot(placer.prompt(prompt), 50, fits, 11.0))
    assert (choice and choice.worker) == address(chosen)
    for holder in ("", "w0", "w3"):
        assert load_index.compressor(holder) == address(choose_compressor(loads, holder=holder))
        for arena in ("a", "b"):
            chosen = choose_compressor(loads, holder=holder, arenas=[arena])
            assert load_index.compressor(holder, arena) == address(chosen)
            there = any(one.arena == arena and "compress" in one.stages for one in loads)
            assert load_index.has_compressor(arena) == there
    assert load_index.decode(set(), fits) == address(
        choose_decode(loads, free_bytes=free, fits=fits)
    )

    def fits_at_home(arena: str) -> bool:  # what it has booked in "a" counts there
        return needs - (30 if arena == "a" else 0) <= free(arena)

    assert load_index.decode({"a"}, fits_at_home) == address(
        choose_decode(loads, free_bytes=free, fits=fits_at_home)
    )
    assert load_index.open_slots == sum(load.free_slots for load in loads)
    assert load_index.used_bytes == sum(booked[arena] for arena in {load.arena for load in loads})


@given(st.lists(st.tuples(st.integers(0, 9), st.one_of(st.none(), st.integers(0, 5)))))
def test_a_ranking_is_sorted_whatever_happens(changes: list[tuple[int, int | None]]) -> None:
    ranking, plain = SortedIndex[int](), dict[str, int]()
    for name, key in changes:
        if key is None:
            ranking.discard(f"n{name}")
            plain.pop(f"n{name}", None)
        else:
            ranking.put(f"n{name}", key)
            plain[f"n{name}"] = key
        assert list(ranking) == sorted(plain, key=lambda one: (plain[one], one))
        assert len(ranking) == len(plain)


def test_a_worker_that_comes_back_counts_what_is_still_there() -> None:
    load_index, number = LoadIndex(10.0, lambda _: 0), count()
    registration = Register(name="n", address="w", stages=("decode",), max_requests=3, arena="a")
    request = Request(id=f"r{next(number)}", prompt=(0,), sampling=Sampling(), reply_to="x")
    entry = Entry(
        request,
        SIZES,
        0.0,
        0.0,
        state=State.DECODING,
        worker="w",
        placement=Placement(decode_worker="w"),
    )
    load_index.join(registration)
    load_index.record_report("w", 0.0)
    load_index.count(entry)
    assert (load_index.open_slots, load_index.decode_in("a")) == (2, "w")
    load_index.leave("w")
    assert (load_index.open_slots, load_index.decode_in("a"), list(load_index.loads())) == (
        0,
        None,
        [],
    )
    load_index.join(registration)
    load_index.record_report("w", 1.0)
    assert load_index.open_slots == 2
    load_index.forget(entry)
    assert load_index.open_slots == 3

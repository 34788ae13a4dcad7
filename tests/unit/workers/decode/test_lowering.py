"""High pages of a running request become low ones: which ones, and what a death on the way does."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.unit.workers.decode import test_resume
from tests.unit.workers.decode.test_resume import (
    CONTEXT,
    POLICIES,
    Client,
    Crash,
    Stages,
    crash_after,
    joining,
    run,
)
from triptych.core.messages import (
    ROUTER,
    Finished,
    Lower,
    Lowered,
    PageLimit,
    Preempt,
    Request,
    Sampling,
    Tokens,
)
from triptych.kernels.pages import segments
from triptych.router.models.booking import Booking, BookingModel
from triptych.router.models.memory_estimate import ByteModel
from triptych.workers.decode import checkpoint, decode_engine, handover, lowering, window
from triptych.workers.decode.decode_engine import DecodeEngine
from triptych.workers.decode.lowering import pages_to_lower

LOWERING = frozenset(
    str(Path(module.__file__ or ""))
    for module in (lowering, checkpoint, handover, decode_engine, window)
)
STEPS, EVERYTHING = 30, 10**6
POLICIES["kept"] = POLICIES["diffkv"] | {"alpha_low": 0.0, "alpha_high": 0.1}
POLICIES["at the bound"] = POLICIES["kept"] | {"high_window_tokens": 4}


@pytest.fixture(scope="module", params=["kept", "selected"])
def stages(request: pytest.FixtureRequest, tiny_model: Path) -> Stages:
    """``kept``: nothing is dropped, and most tokens are high."""
    return Stages.of(tiny_model, request.param)


def long_request(**more: object) -> Request:
    """A prompt with several high pages."""
    sampling = Sampling(max_tokens=60, temperature=0.7, seed=3, ignore_eos=True)
    prompt = tuple(np.random.default_rng(3).integers(2, 250, CONTEXT - 70).tolist())
    request = Request(id="r0", prompt=prompt, sampling=sampling, reply_to="client")
    return replace(request, **more)  # pyright: ignore[reportArgumentType]


def started(stages: Stages, client: Client, **more: object) -> tuple[str, DecodeEngine]:
    name, engine = stages.decoder()
    client.hear(engine.accept(stages.join(long_request(**more))) or ())
    for _ in range(STEPS):
        client.hear(engine.step())
    return name, engine


def lower(engine: DecodeEngine, pages: int = EVERYTHING) -> Lowered:
    """At once on a CPU; on a device in the next step, of which the request is no part."""
    [send] = engine.accept(Lower(request="r0", number=1, pages=pages)) or engine.step()
    assert isinstance(send.message, Lowered)
    return send.message


def positions(engine: DecodeEngine) -> list[list[list[int]]]:
    """Positions of the tokens in each head row of each table."""
    found = list[list[list[int]]]()
    for table in engine.tables:
        parts = segments(engine._memory.near, table.layout)
        rows = list[list[int]]()
        for at in np.ndindex(table.tokens.shape[0], table.tokens.shape[2]):
            count = int(table.tokens[at[0], 0, at[1]])
            pages = table.pages[at[0], 0, at[1], : table.layout.pages(count)]
            rows.append(parts.positions[pages.tolist()].flatten()[:count].tolist())
        found.append(rows)
    return found


def held_pages(stages: Stages) -> int:
    return stages.pool.stat().by_request["r0"]


@given(
    rows=st.lists(st.tuples(st.integers(0, 9), st.integers(0, 300)), min_size=1, max_size=8),
    wanted=st.integers(0, 60),
    room=st.integers(1, 40),
    more=st.integers(0, 40),
)
def test_the_fewest_pages_that_free_what_is_wanted_are_lowered_alike_in_all_rows(
    rows: list[tuple[int, int]], wanted: int, room: int, more: int
) -> None:
    cold, low = (np.array(column) for column in zip(*rows, strict=True))
    low_room = room + more

    def freed(lowered: np.ndarray) -> np.ndarray:
        return lowered - (-(-(low + lowered * room) // low_room) - -(-low // low_room))

    chosen = pages_to_lower(cold, low, wanted, room, low_room)
    assert np.all((chosen >= 0) & (chosen <= cold))
    assert freed(chosen).sum() >= min(wanted, freed(cold).sum())
    fewer = np.maximum(chosen - 1, 0)
    assert np.all((chosen == 0) | (freed(fewer) < freed(chosen)))
    level = freed(chosen).max()
    assert np.all(np.minimum(freed(cold), level) == freed(chosen))
    less = np.minimum(freed(cold), level - 1).sum()
    assert level == 0 or less < wanted


def test_tokens_move_from_high_to_low_and_their_pages_are_free(stages: Stages) -> None:
    client = Client()
    name, engine = started(stages, client)
    before, held = positions(engine), engine._running["r0"].num_pages
    answer = lower(engine)
    after = positions(engine)
    assert answer.freed > 0
    assert answer.pages == held_pages(stages) == held - answer.freed
    assert answer.tokens == CONTEXT - 70 + STEPS
    assert after[0] == before[0]  # sink and window
    young = answer.tokens - stages.plan.policy.high_window_tokens
    for was_high, was_low, high, low in zip(before[1], before[2], after[1], after[2], strict=True):
        assert low[: len(was_low)] == was_low
        assert sorted([*high, *low]) == sorted([*was_high, *was_low])
        assert all(position < young for position in low[len(was_low) :])
        assert set(high) <= set(was_high)
    moved = sum(map(len, after[2])) - sum(map(len, before[2]))
    rows = stages.plan.geometry.head_rows
    assert answer.lowered_tokens == -(-moved // rows)
    assert stages.pool.check() == []
    run(engine, client)
    assert len(client.answer("r0")) == 60
    assert engine._checkpoint.retirements.phase.tolist() == [0] * 3
    stages.pool.expel(name)
    assert stages.pool.stat().held_pages == 0


def test_the_response_tells_how_many_tokens_were_lowered(stages: Stages) -> None:
    _, engine = started(stages, Client())
    answer = lower(engine)
    [send] = engine.step()
    assert isinstance(send.message, Tokens)
    assert send.message.compression is not None
    assert send.message.compression.lowered_tokens == answer.lowered_tokens > 0
    [send] = engine.step()
    assert isinstance(send.message, Tokens)
    assert send.message.compression is None
    engine.cancel(["r0"])


def test_only_what_is_wanted_is_lowered_and_the_limit_follows(stages: Stages) -> None:
    _, engine = started(stages, Client())
    one = engine._running["r0"]
    engine.accept(PageLimit(request="r0", pages=one.num_pages + 50, tokens=400))
    first = lower(engine, pages=1)
    assert first.freed > 0
    assert one.limit == PageLimit(request="r0", pages=first.pages + 50, tokens=400)
    second = lower(engine)
    assert second.freed > 0
    assert second.lowered_tokens > first.lowered_tokens
    assert not lower(engine).freed
    engine.cancel(["r0"])
    assert stages.pool.stat().by_request == {}


@pytest.mark.parametrize("spare", [0, 1, 2])
def test_a_request_at_its_limit_is_lowered_row_after_row(stages: Stages, spare: int) -> None:
    """The pages that the first rows free are the low pages of the next ones."""
    _, engine = started(stages, Client())
    free = lower(engine).freed
    engine.cancel(["r0"])
    _, engine = started(stages, Client())
    one = engine._running["r0"]
    engine.accept(PageLimit(request="r0", pages=one.num_pages + spare, tokens=400))
    answer = lower(engine)
    assert answer.freed == free or not spare  # without a page, what fits into low pages there are
    assert one.limit is not None
    assert one.limit.pages == one.num_pages + spare
    if answer.freed:
        assert one.num_pages == answer.pages == held_pages(stages)
    engine.cancel(["r0"])
    assert stages.pool.stat().by_request == {}


def test_a_lowered_request_goes_on_alike_in_another_worker(stages: Stages) -> None:
    here, there = Client(), Client()
    for client in (here, there):
        name, engine = started(stages, client)
        lower(engine)
        if client is there:
            client.hear(engine.accept(Preempt(requests=("r0",))) or ())
            [offer] = client.suspended
            _, engine = stages.decoder()
            join = replace(joining(stages, offer), request=long_request())
            client.hear(engine.accept(join) or ())
        run(engine, client)
        stages.pool.expel(name)
    assert here.answer("r0") == there.answer("r0")


def test_a_worker_may_die_at_any_line_of_a_lowering(stages: Stages) -> None:
    """The next one goes on with or without it; no token is lost, none is wrong, no page is lost."""
    answers = dict[bool, list[int]]()
    for is_lowered in (False, True):
        client = Client()
        name, engine = started(stages, client)
        if is_lowered:
            lower(engine)
        run(engine, client)
        answers[is_lowered] = client.answer("r0")
        stages.pool.expel(name)
    _, engine = started(stages, Client())
    with crash_after(10**9, LOWERING) as count:
        lower(engine)
    engine.cancel(["r0"])
    seen = set[bool]()
    for lines in range(0, count[0], max(1, count[0] // 30)):
        client = Client()
        previous_worker, engine = started(stages, client)
        with pytest.raises(Crash), crash_after(lines, LOWERING):
            lower(engine)
        name, takeover = stages.decoder()
        resume = stages.resume(long_request(), previous_worker)
        client.hear(takeover.accept(resume) or ())
        is_lowered = bool(takeover._checkpoint.lowered.any())
        seen.add(is_lowered)
        run(takeover, client)
        assert client.answer("r0") == answers[is_lowered], f"died at line {lines}"
        assert stages.pool.check() == []
        for one in (previous_worker, name):
            stages.pool.expel(one)
        assert stages.pool.stat().held_pages == 0
    assert seen == {False, True}


def limited(stages: Stages, client: Client) -> tuple[str, DecodeEngine]:
    """A request with room for one page, so that it is lowered row after row."""
    name, engine = started(stages, client)
    one = engine._running["r0"]
    engine.accept(PageLimit(request="r0", pages=one.num_pages + 1, tokens=400))
    return name, engine


def sorted_positions(engine: DecodeEngine) -> list[list[int]]:
    """Positions of the high and low tokens of each head row."""
    return [sorted(high + low) for high, low in zip(*positions(engine)[1:3], strict=True)]


def test_a_worker_may_die_between_the_rounds_of_a_lowering(stages: Stages) -> None:
    """The next one goes on from the last round whose tables were recorded."""
    _, engine = limited(stages, Client())
    before = sorted_positions(engine)
    with crash_after(10**9, frozenset({str(Path(lowering.__file__ or ""))})) as count:
        lower(engine)
    every = engine._checkpoint.lowered_tokens(0)
    engine.cancel(["r0"])
    seen = set[int]()
    for lines in range(0, count[0], max(1, count[0] // 20)):
        client = Client()
        previous_worker, engine = limited(stages, client)
        with pytest.raises(Crash), crash_after(lines, frozenset({lowering.__file__ or ""})):
            lower(engine)
        name, takeover = stages.decoder()
        client.hear(takeover.accept(stages.resume(long_request(), previous_worker)) or ())
        assert sorted_positions(takeover) == before, f"died at line {lines}"
        seen.add(takeover._checkpoint.lowered_tokens(0))
        run(takeover, client)
        assert len(client.answer("r0")) == 60
        assert stages.pool.check() == []
        for one in (previous_worker, name):
            stages.pool.expel(one)
        assert stages.pool.stat().held_pages == 0
    assert {0, every} < seen


def test_a_device_that_dies_behind_the_host_leaves_a_request_as_it_was(
    stages: Stages, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The host has the new tables; the device has moved no token and recorded nothing."""
    client, other = Client(), Client()
    name, engine = started(stages, other)
    run(engine, other)
    stages.pool.expel(name)
    name, engine = started(stages, client)
    before = positions(engine)
    with monkeypatch.context() as patch:
        for queued in ("_move", "_record_tables", "_record_phase"):
            patch.setattr(lowering.Lowering, queued, lambda *_: None)
        patch.setattr(lowering.RequestLowerings, "settle", lambda _: [])
        engine.accept(Lower(request="r0", number=1, pages=EVERYTHING))
    assert positions(engine)[1] != before[1]
    after, takeover = stages.decoder()
    client.hear(takeover.accept(stages.resume(long_request(), name)) or ())
    assert positions(takeover) == before
    run(takeover, client)
    assert client.answer("r0") == other.answer("r0")
    for one in (name, after):
        stages.pool.expel(one)
    assert stages.pool.stat().held_pages == 0


def test_a_worker_keeps_a_request_within_its_bound_without_asking(
    tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """From a short prompt to the end of the context, with nearly all tokens high."""
    most, prompt = 512, 40
    monkeypatch.setattr(test_resume, "CONTEXT", most)
    stages = Stages.of(tiny_model, "at the bound")
    pages, page_bytes = ByteModel(stages.plan), stages.plan.page_bytes
    bookings = BookingModel(pages, stages.pool.capacity_pages * page_bytes, is_layerwise=False)
    bound = pages.estimate(prompt, most - prompt)
    booking = Booking(bound, prompt, most, tenant="", profile="")
    assert stages.plan.low is not None
    limit = bookings.lowered_bound(stages.plan.low, booking, 0) // page_bytes
    assert limit < bound.grown // page_bytes
    request = long_request(prompt=long_request().prompt[:prompt])
    request = replace(request, sampling=replace(request.sampling, max_tokens=most - prompt))
    _, engine = stages.decoder()
    engine.accept(PageLimit(request="r0", pages=limit, lowers=True))
    engine.accept(stages.join(request))
    one, told = engine._running["r0"], list[object]()
    while engine.has_work():
        told += [send.message for send in engine.step() if send.to == ROUTER]
        assert one.num_pages <= limit
    *lowered, finished = told
    assert finished == Finished(request="r0", tokens=most - prompt)
    assert lowered
    assert all(isinstance(message, Lowered) and not message.number for message in lowered)
    assert stages.pool.check() == []


def test_a_request_with_a_high_floor_has_no_low_token(stages: Stages) -> None:
    client = Client()
    name, engine = started(stages, client, floor="high")
    high, low = positions(engine)[1:3]
    stored = CONTEXT - 70 + STEPS
    recent = len(positions(engine)[0][0])
    assert all(row == [] for row in low)
    assert all(len(row) == stored - recent for row in high)
    run(engine, client)
    stages.pool.expel(name)


def test_what_does_not_run_or_has_no_low_class_is_not_lowered(tiny_model: Path) -> None:
    engine = Stages.of(tiny_model, "uniform").engines["decode"]
    assert lower(engine) == Lowered(request="r0", number=1)
    engine = Stages.of(tiny_model, "diffkv").engines["decode"]
    assert lower(engine) == Lowered(request="r0", number=1)

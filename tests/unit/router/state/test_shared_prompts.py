"""Requests that share a prompt: which one computes it, and how long the others wait."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.unit.router.driver import MODEL, Driver, handle, request, started
from triptych.core.errors import PoolExhausted
from triptych.core.messages import (
    Cancel,
    Compress,
    Encode,
    Finished,
    Message,
    Prefill,
    Prefilled,
    Request,
    Send,
    Slo,
    failed,
)
from triptych.router.state.shared_prompts import (
    LEAST_WAIT_S,
    MOST_WAITS,
    UNMEASURED_S,
    waits,
)

BLOCK = MODEL.plan.block_tokens
PLAN = replace(MODEL.plan, prefix_bytes=1 << 24)
WORKERS = ("P", "C", "D", "E")


def asks(
    name: str,
    common: int = 2 * BLOCK,
    own: int = 10,
    *,
    end: str = "",
    new: int = 10,
    **more: object,
) -> Request:
    """A request with ``common`` equal tokens, then ``own`` tokens that depend on ``end``."""
    ends = {"": 3, "a": 4, "b": 5, "c": 6}
    prompt = (1,) * common + (ends[end],) * own
    fields = {"prompt": prompt, **more}
    return replace(request(name, max_tokens=new), **fields)  # type: ignore[arg-type]


def driver(**settings: object) -> Driver:
    return Driver(*WORKERS, slots=8, plan=PLAN, **settings)  # type: ignore[arg-type]


def prefills(sends: list[Send]) -> list[str]:
    return [send.to for send in sends if isinstance(send.message, Prefill)]


def kinds(sends: list[Send], kind: type[Message]) -> int:
    return sum(isinstance(send.message, kind) for send in sends)


def publish(one: Driver, name: str) -> list[Send]:
    """Take a request from prefill to the moment when its blocks are cached."""
    one.prefilled(name)
    return one.planned(name)


def waiting(one: Driver, name: str) -> str:
    found = one.router.explain(name, one.now)
    return found.waits_for if found else ""


# -------------------------------------------------------------------- equal prompts


def test_equal_prompts_go_to_the_worker_that_computes_them_and_add_no_load() -> None:
    one = Driver("P", "C", "D", "E", slots=8, plan=PLAN, prefill_batch_tokens=276)
    assert started(one.submit(asks("a"))) == ["a"]
    sends = [send for name in "bcde" for send in one.submit(asks(name))]
    assert started(sends) == list("bcde"), "the worker has no room for another such prompt"
    assert set(prefills(sends)) == {"P"}
    (load,) = (w for w in one.router.snapshot(one.now).workers if "prefill" in w.stages)
    assert load.queue_tokens == asks("a").known_tokens + 4
    assert one.count("placement:equal_prompt") == 4
    for name in "abcde":
        one.prefilled(name)
    assert one.count("shared_prompt:tokens") == 4 * asks("a").known_tokens


def test_equal_prompts_go_to_their_worker_although_another_one_is_idle() -> None:
    one = Driver("all0", "all1", slots=8, plan=PLAN)
    first = prefills(one.submit(asks("a")))
    assert prefills(one.submit(asks("b"))) == first
    assert prefills(one.submit(asks("x", end="a"))) != first


@pytest.mark.parametrize(
    "other",
    [
        {"cache_salt": "another"},
        {"cached_at_most": 0},
        {"prompt": (1,) * (2 * BLOCK) + (3,) * 9, "output_tokens": (3,)},
    ],
)
def test_what_the_cache_would_not_share_is_not_computed_together(other: dict[str, object]) -> None:
    one = driver()
    one.submit(asks("a"))
    one.submit(asks("b", **other))
    assert one.count("placement:equal_prompt") == 0


def test_a_scored_prompt_is_computed_for_itself() -> None:
    one, scored = driver(), asks("a")
    scored = replace(scored, sampling=replace(scored.sampling, prompt_logprobs=0))
    one.submit(scored)
    assert started(one.submit(asks("b"))) == ["b"]
    assert started(one.submit(replace(scored, id="c"))) == ["c"]
    assert one.count("placement:equal_prompt") == 0


def test_an_equal_prompt_that_comes_after_prefill_waits_for_the_blocks() -> None:
    one = driver()
    one.submit(asks("a"))
    one.prefilled("a")
    assert started(one.submit(asks("b"))) == []
    assert waiting(one, "b") == "a"
    assert started(one.planned("a")) == ["b"]


def test_when_the_request_that_computes_is_cancelled_an_equal_one_does_it() -> None:
    one = driver()
    for name in "abc":
        one.submit(asks(name))
    one.submit(asks("x", end="a"))
    assert waiting(one, "x") == "a"
    one.on(Cancel(requests=("a",)), "in")
    assert waiting(one, "x") == "b"
    (load,) = (w for w in one.router.snapshot(one.now).workers if "prefill" in w.stages)
    assert load.queue_tokens == 2 * asks("a").known_tokens + 1, (
        "a is leaving; b computes, for c too"
    )
    assert started(one.submit(asks("d"))) == ["d"]
    assert one.count("placement:equal_prompt") == 3
    one.prefilled("b")
    assert started(one.planned("b")) == ["x"]


# -------------------------------------------------------------------- blocks


def test_a_request_waits_until_the_blocks_of_its_beginning_are_cached() -> None:
    one = driver()
    one.submit(asks("a", end="a"))
    assert started(one.submit(asks("b", end="b"))) == []
    found = one.router.explain("b", one.now)
    assert found is not None
    assert (found.state, found.blocked_reason, found.waits_for) == ("waiting", "shared_prompt", "a")
    (trace,) = one.router.decisions("b")
    assert [(step.step, step.reason, step.chosen) for step in trace.decisions] == [
        ("wait", "shared_prompt", "a")
    ]
    assert started(one.prefilled("a")) == []
    assert started(one.planned("a")) == ["b"]
    hit = Prefilled(request="b", first_token=7, handle=handle("b", "raw"), cached_tokens=2 * BLOCK)
    one.on(hit, "P")
    assert one.count("shared_prompt:tokens") == 2 * BLOCK
    assert one.count("shared_prompt:published") == one.count("wait:shared_prompt") == 1


def test_others_go_on_meanwhile() -> None:
    one = driver()
    one.submit(asks("a", end="a"))
    one.submit(asks("b", end="b"))
    assert started(one.submit(replace(asks("x"), prompt=(9,) * 20))) == ["x"]


def test_cached_blocks_are_not_waited_for() -> None:
    """A system prompt that everybody has: the next request computes an end of its own."""
    one = driver()
    one.submit(asks("a", end="a"))
    publish(one, "a")
    assert started(one.submit(asks("b", end="b"))) == ["b"]
    assert started(one.submit(asks("c", end="c"))) == ["c"]


def test_a_beginning_shorter_than_a_block_is_not_waited_for() -> None:
    one = driver()
    one.submit(asks("a", common=BLOCK - 1, own=BLOCK, end="a"))
    assert started(one.submit(asks("b", common=BLOCK - 1, own=BLOCK, end="b"))) == ["b"]


def test_nobody_waits_for_a_request_that_publishes_nothing() -> None:
    """It ends with the token that prefill samples, so no compressor sees its prompt."""
    one = driver()
    one.submit(asks("a", end="a", new=1))
    assert started(one.submit(asks("b", end="b"))) == ["b"]


def test_another_idle_worker_is_sooner_than_a_long_queue() -> None:
    """The second worker computes two blocks sooner than the first one all of its prompt."""
    one = Driver("all0", "all1", slots=8, plan=PLAN)
    one.submit(asks("a", own=5 * BLOCK, end="a"))
    assert started(one.submit(asks("b", end="b"))) == ["b"]


@pytest.mark.parametrize("how", ["cancelled", "failed", "lost"])
def test_the_first_that_waited_computes_when_the_other_one_ends(how: str) -> None:
    one = driver()
    one.submit(asks("a", end="a"))
    one.submit(asks("b", end="b"))
    one.submit(asks("c", end="c"))
    if how == "cancelled":
        sends = one.on(Cancel(requests=("a",)), "in")
    elif how == "failed":
        error = failed("a", PoolExhausted(1, 0))
        sends = one.on(Finished(request="a", tokens=0, error=error), "P")
    else:
        one.router.lost("P", one.now)
        sends = one.register("P", 2)
    assert started(sends) == ["b"]
    assert waiting(one, "c") == "b"
    assert one.count("shared_prompt:lost") == 2


def test_a_wait_ends_after_its_limit_and_does_not_begin_again() -> None:
    one = driver()
    one.submit(asks("a", end="a"))
    one.submit(asks("b", end="b"))
    assert started(one.tick(UNMEASURED_S - 0.1)) == []
    one.report("P")
    assert started(one.tick(0.2)) == ["b"]
    assert one.count("shared_prompt:timeout") == 1
    assert waiting(one, "b") == ""


def test_the_limit_is_the_time_to_compute_the_blocks() -> None:
    one = driver()
    one.submit(replace(asks("z"), prompt=(8,) * 100))
    one.now += 1.0
    one.report("P")
    publish(one, "z")  # 100 tokens a second
    one.submit(asks("a", end="a"))
    one.submit(asks("b", end="b"))
    limit_s = (asks("a").known_tokens + 2 * BLOCK) / 100
    assert LEAST_WAIT_S < limit_s < UNMEASURED_S
    assert started(one.tick(limit_s - 0.1)) == []
    one.report("P")
    assert started(one.tick(0.2)) == ["b"]


def test_a_request_does_not_wait_beyond_its_slo() -> None:
    one = driver()
    one.submit(asks("a", end="a"))
    one.submit(asks("b", end="b", slo=Slo(ttft_s=2.0)))
    assert waiting(one, "b") == "a"
    assert started(one.tick(1.6)) == ["b"]
    one.submit(asks("c", end="c", slo=Slo(ttft_s=0.4)))
    assert waiting(one, "c") == ""


def test_a_request_that_waits_may_be_cancelled() -> None:
    one = driver()
    one.submit(asks("a", end="a"))
    one.submit(asks("b", end="b"))
    one.on(Cancel(requests=("b",)), "in")
    assert one.state("b") is None
    assert started(publish(one, "a")) == []


def test_a_request_waits_for_few_others_in_turn() -> None:
    one, names = driver(), "abcdef"
    for number, name in enumerate(names):
        one.submit(replace(asks(name), prompt=(1,) * 2 * BLOCK + (number,) * 10))
    leaders = list[str]()
    while leader := waiting(one, "f"):
        leaders.append(leader)
        one.on(Cancel(requests=(leader,)), "in")
    assert leaders == list("abc")
    assert len(leaders) == MOST_WAITS


def test_blocks_of_another_arena_are_not_waited_for() -> None:
    one = Driver("all0", "all1", slots=8, plan=PLAN, arenas={"all0": "x", "all1": "y"})
    one.submit(asks("a", end="a"))
    assert started(one.submit(asks("b", end="b"))) == ["b"]


def test_the_baselines_of_the_paper_share_nothing() -> None:
    one = Driver(*WORKERS, slots=8, plan=PLAN, batch_policy="static:p1c1d8")
    one.submit(asks("a", end="a"))
    one.submit(asks("b", end="b"))
    assert kinds(publish(one, "a"), Encode) == 1
    assert (waiting(one, "b"), one.count("wait:shared_prompt")) == ("", 0)


def test_without_a_prefix_cache_nobody_waits() -> None:
    one = Driver(*WORKERS, slots=8)
    one.submit(asks("a", end="a"))
    assert started(one.submit(asks("b", end="b"))) == ["b"]
    assert kinds(one.prefilled("a"), Compress) == 1


@given(left=st.floats(0, 1e6), queue=st.integers(0, 10**6), shared=st.integers(0, 10**6))
def test_a_wait_is_never_longer_than_computing(left: float, queue: int, shared: int) -> None:
    if waits(left_tokens=left, queue_tokens=queue, shared_tokens=shared):
        assert left <= queue + shared
        assert shared > 0

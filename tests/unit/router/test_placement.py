"""Placement over made-up snapshots."""

from triptych.core.messages import Stage
from triptych.router.placement import choose_compressor, choose_decode, choose_prefill
from triptych.router.snapshot import WorkerLoad

ALL: tuple[Stage, ...] = ("prefill", "compress", "decode")


def load(
    name: str,
    *,
    stages: tuple[Stage, ...] = ALL,
    is_full: bool = False,
    queue_tokens: int = 0,
    compress_tokens: int = 0,
    free_slots: int = 1,
    arena: str = "cpu",
) -> WorkerLoad:
    return WorkerLoad(
        name=name,
        address=f"at-{name}",
        arena=arena,
        stages=stages,
        is_full=is_full,
        queue_tokens=queue_tokens,
        compress_tokens=compress_tokens,
        free_slots=0 if is_full else free_slots,
    )


def prefill_name(*loads: WorkerLoad, tokens: int = 10, limit: int = 100) -> str | None:
    chosen = choose_prefill(loads, tokens=tokens, limit_tokens=limit, fits=lambda _: True)
    return chosen and chosen.name


def decode_name(*loads: WorkerLoad, free: dict[str, int], needs: int = 10) -> str | None:
    chosen = choose_decode(
        loads, free_bytes=free.__getitem__, fits=lambda arena: free[arena] >= needs
    )
    return chosen and chosen.name


def test_prefill_goes_to_the_worker_with_the_fewest_tokens() -> None:
    assert prefill_name(load("a", queue_tokens=50), load("b", queue_tokens=20)) == "b"


def test_a_tie_goes_to_the_first_name_whatever_the_order() -> None:
    assert prefill_name(load("b"), load("a")) == prefill_name(load("a"), load("b")) == "a"


def test_prefill_takes_no_more_tokens_than_its_limit() -> None:
    assert prefill_name(load("a", queue_tokens=91)) is None
    assert prefill_name(load("a", queue_tokens=90)) == "a"


def test_an_idle_worker_takes_a_prompt_that_is_longer_than_the_limit() -> None:
    assert prefill_name(load("a"), tokens=500) == "a"
    assert prefill_name(load("a", queue_tokens=1), tokens=500) is None


def test_a_full_worker_takes_nothing() -> None:
    assert prefill_name(load("a", is_full=True)) is None
    assert choose_compressor([load("a", is_full=True)], holder="") is None
    assert decode_name(load("a", is_full=True), free={"cpu": 99}) is None


def test_a_worker_takes_only_the_work_of_its_stages() -> None:
    assert prefill_name(load("a", stages=("decode",))) is None
    assert choose_compressor([load("a", stages=("prefill",))], holder="") is None


def test_compression_stays_where_the_pages_are_before_it_looks_at_queues() -> None:
    loads = [load("a", compress_tokens=0), load("b", compress_tokens=70)]
    chosen = choose_compressor(loads, holder="at-b")
    assert chosen is not None
    assert chosen.name == "b"


def test_compression_else_goes_to_the_shortest_queue() -> None:
    chosen = choose_compressor([load("a", compress_tokens=9), load("b")], holder="elsewhere")
    assert chosen is not None
    assert chosen.name == "b"


def test_decode_goes_to_the_arena_with_most_free_bytes() -> None:
    loads = load("a", arena="gpu0", free_slots=9), load("b", arena="gpu1", free_slots=1)
    assert decode_name(*loads, free={"gpu0": 50, "gpu1": 60}) == "b"


def test_decode_in_one_arena_goes_to_the_worker_with_most_free_slots() -> None:
    assert decode_name(load("a", free_slots=1), load("b", free_slots=2), free={"cpu": 50}) == "b"


def test_decode_needs_a_slot_and_the_bytes() -> None:
    assert decode_name(load("a", free_slots=0), free={"cpu": 50}) is None
    assert decode_name(load("a"), free={"cpu": 5}) is None

"""A second request with the same prefix: what it saves, and that its answer stays the same."""

import random
import time
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from triptych.core.config import AppConfig
from triptych.core.layout import Geometry
from triptych.core.messages import Prefix, Request, Sampling, pack_tokens
from triptych.core.pages import PagePlan
from triptych.kernels import load_tokens, store_tokens
from triptych.kernels.pages import segments
from triptych.kvpool import LocalPool, PrefixSettings
from triptych.workers.device import CPU
from triptych.workers.kv.device_pages import DevicePages
from triptych.workers.kv.prefix_cache import PrefixStore, RawPages
from triptych.workers.local import Completion, LocalServer
from triptych.workers.prefill.prefix_restore import POLL_EVERY_S, PrefixRestore

VOCAB = 258
FP16_BLOCK_TOKENS = 30
"""With chunks of one block, a chunk sees the same past in 16-bit pages, cached or not: so answers
of a policy that keeps 16 bits must be the same to the last bit."""
POLICIES = {
    "fp16": {"policy": "uniform:fp16"},
    "k8v8": {"policy": "uniform:k8v8"},
    "diffkv": {"policy": "diffkv", "high_format": "k8v8", "low_format": "k8v4"},
}


def config(policy: str, **pool: object) -> AppConfig:
    return AppConfig.from_mapping(
        {
            "model": {"name": "tiny", "dtype": "float32"},
            "pool": {"kv_cache_memory_bytes": 16 << 20, **pool},
            "compressor": {"profile": "none", "recent_window_tokens": 20, **POLICIES[policy]},
            "prefill": {"max_num_batched_tokens": FP16_BLOCK_TOKENS},
        }
    )


def prompt(tokens: int, seed: int = 0) -> list[int]:
    generator = random.Random(tokens * 1000 + seed)
    return [generator.randrange(2, VOCAB) for _ in range(tokens)]


def ask(server: LocalServer, tokens: list[int], salt: str = "", **more: object) -> Completion:
    sampling = Sampling(temperature=0.0, max_tokens=24, ignore_eos=True, logprobs=0)
    request: Request = server.request(tokens, replace(sampling, **more))
    (answer,) = server.complete([replace(request, cache_salt=salt)])
    assert answer.error is None
    return answer


def check(server: LocalServer) -> None:
    """Nothing is held but what is kept for later, once that is done, and all books agree."""
    give_up_s = time.monotonic() + 30
    while (ledger := server.pool.stat()).held_pages != ledger.prefix_pages:
        assert time.monotonic() < give_up_s, ledger
        time.sleep(0.002)
    assert server.pool.check() == []
    assert ledger.extent_pages == 0
    assert server.pool.allocated_pages == 0


def difference(one: Completion, other: Completion) -> float:
    """Of the log probabilities that the tokens have which both drew, and of the first that
    differs."""
    pairs = list(zip(one.tokens, other.tokens, strict=True))
    same = next((i for i, (a, b) in enumerate(pairs) if a != b), len(pairs))
    assert same > 0
    logprobs = zip(one.logprobs[:same], other.logprobs[:same], strict=True)
    return max(abs(a.logprob - b.logprob) for a, b in logprobs)


@pytest.mark.parametrize("policy", POLICIES)
def test_a_prefix_is_computed_once_and_the_answer_stays(tiny_model: Path, policy: str) -> None:
    shared, tails = prompt(130), [prompt(count, seed=5) for count in (1, 17, 40)]
    with LocalServer(config(policy, prefix_bytes=0), tiny_model) as server:
        plain = [ask(server, [*shared, *tail]) for tail in tails]
        assert [answer.cached_tokens for answer in plain] == [0, 0, 0]
        assert server.pool.stat().held_pages == 0
    with LocalServer(config(policy), tiny_model) as server:
        size = server.plan.block_tokens
        ask(server, shared)
        answers = [ask(server, [*shared, *tail]) for tail in tails]
        assert all(130 // size * size <= a.cached_tokens < 131 + 40 for a in answers)
        check(server)
    for one, other in zip(plain, answers, strict=True):
        if policy == "fp16":
            assert (one.tokens, one.logprobs) == (other.tokens, other.logprobs)
        assert difference(one, other) < 0.5


def test_a_conversation_goes_on_from_what_was_said(tiny_model: Path) -> None:
    turns, cached = prompt(60), list[int]()
    with LocalServer(config("fp16", keep_answers="always"), tiny_model) as server:
        for turn in range(4):
            answer = ask(server, turns)
            cached.append(answer.cached_tokens)
            check(server)
            turns = [*turns, *answer.tokens, *prompt(20, seed=turn)]
        size = server.plan.block_tokens
    assert cached == [0, *((60 + 44 * turn + 23) // size * size for turn in range(3))]


@pytest.mark.parametrize("extra", [0, 1])
def test_a_prompt_that_is_known_whole_still_computes_a_token(tiny_model: Path, extra: int) -> None:
    with LocalServer(config("fp16"), tiny_model) as server:
        size = server.plan.block_tokens
        assert size == FP16_BLOCK_TOKENS
        asked = prompt(3 * size + extra)
        first, second = ask(server, asked), ask(server, asked)
        check(server)
    assert second.cached_tokens == (3 if extra else 2) * size
    assert (first.tokens, first.logprobs) == (second.tokens, second.logprobs)


def test_only_equal_salts_share(tiny_model: Path) -> None:
    with LocalServer(config("k8v8"), tiny_model) as server:
        cached = [ask(server, prompt(100), salt).cached_tokens > 0 for salt in "abab"]
        check(server)
    assert cached == [False, False, True, True]


def test_a_full_cache_makes_room_and_no_request_fails(tiny_model: Path) -> None:
    settings = config("k8v8", kv_cache_memory_bytes=4 << 20, prefix_bytes=200_000)
    with LocalServer(settings, tiny_model) as s:
        for seed in range(8):
            ask(s, prompt(200, seed=seed))
            check(s)
        ledger = s.pool.stat()
        assert ledger.prefix.evictions > 0
        assert ledger.prefix.bytes <= 200_000
        assert ask(s, prompt(200, seed=7)).cached_tokens > 0


def test_requests_that_come_together_publish_once(tiny_model: Path) -> None:
    with LocalServer(config("diffkv"), tiny_model) as server:
        sampling = Sampling(temperature=0.0, max_tokens=8, ignore_eos=True)
        server.complete([server.request(prompt(150), sampling) for _ in range(5)])
        blocks = server.pool.stat().prefix.blocks
        assert blocks == 150 // server.plan.block_tokens
        check(server)


def test_requests_have_the_memory_of_prefixes_before_they_wait(tiny_model: Path) -> None:
    """What is set aside for requests has room for one of them; the rest is full of prefixes."""
    counts = Counter[str]()
    settings = config("k8v8", kv_cache_memory_bytes=1_000_000, prefix_bytes=700_000)
    sampling = Sampling(temperature=0.0, max_tokens=24, ignore_eos=True)
    with LocalServer(settings, tiny_model) as server:
        for seed in range(9):
            ask(server, prompt(200, seed=seed))
        full = server.pool.stat().prefix
        answers = server.complete(
            [server.request(prompt(200, seed=seed), sampling) for seed in range(9, 13)]
        )
        assert all(answer.error is None for answer in answers)
        counts.update(server.counters)
        check(server)
        lent = server.pool.stat().prefix
    assert (full.borrowed_bytes, full.evictions) == (0, 0)
    assert counts["memory_asked"] > 0
    assert lent.borrowed_bytes > 0
    assert lent.evictions > 0
    assert lent.bytes + lent.borrowed_bytes <= 700_000


# ------------------------------------------------------------------ the disk below


@pytest.fixture
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """What this model computes in a millisecond, a busy machine may read more slowly."""
    restore = PrefixStore.restore

    def wait(*asked: Any) -> float:
        return 1e3 * restore(*asked)

    monkeypatch.setattr(PrefixStore, "restore", wait)


@pytest.mark.usefixtures("patient")
@pytest.mark.parametrize("policy", POLICIES)
def test_a_prefix_outlives_its_server(tiny_model: Path, tmp_path: Path, policy: str) -> None:
    settings = config(policy, disk_path=str(tmp_path / "tier"), disk_bytes=1 << 24)
    asked = prompt(130)
    with LocalServer(settings, tiny_model) as server:
        ask(server, asked)
        again = ask(server, asked)
        check(server)
    with LocalServer(settings, tiny_model) as server:
        found = ask(server, asked)
        check(server)
        assert server.pool.stat().disk.loaded == len(asked) // server.plan.block_tokens
        assert ask(server, asked, salt="other").cached_tokens == 0
    assert (found.tokens, found.logprobs) == (again.tokens, again.logprobs)
    assert found.cached_tokens == again.cached_tokens > 0


@pytest.mark.usefixtures("patient")
def test_a_cache_that_is_too_small_lives_on_on_disk(tiny_model: Path, tmp_path: Path) -> None:
    """Prompts come together: some are read while others wait for the disk."""
    disk = {"disk_path": str(tmp_path / "tier"), "disk_bytes": 1 << 24}
    settings = config("k8v8", kv_cache_memory_bytes=4 << 20, prefix_bytes=200_000, **disk)
    sampling = Sampling(temperature=0.0, max_tokens=8, ignore_eos=True)
    prompts = [prompt(200, seed=seed) for seed in range(4)]
    with LocalServer(settings, tiny_model) as server:
        for tokens in prompts:
            server.complete([server.request(tokens, sampling)])
        assert server.pool.stat().prefix.evictions > 0
        for _ in range(3):
            answers = server.complete(
                [server.request(tokens, sampling) for tokens in [*prompts, prompt(50)]]
            )
            assert all(answer.error is None for answer in answers)
            check(server)
        assert server.pool.stat().disk.loaded > 0


def test_nobody_waits_longer_than_computing_takes() -> None:
    store, now = SlowDisk(), [0.0]
    restores = PrefixRestore(store, clock=lambda: now[0])  # type: ignore[arg-type]
    first, second = (
        Request(id=name, prompt=(1, 2), sampling=Sampling(), reply_to="") for name in ("a", "b")
    )
    restores.start(first)
    store.left = 0.0
    restores.start(second)
    assert not restores.poll("a")
    assert restores.poll("b")
    assert restores.wait_s == pytest.approx(POLL_EVERY_S)
    store.left = 5.0
    now[0] = 4.9
    assert restores.is_ready("a")
    assert not restores.poll("a")
    assert not restores.is_ready("a")
    now[0] = 5.0
    assert restores.poll("a")
    assert restores.wait_s is None
    assert store.asked == 3


class SlowDisk:
    """Says how long it would take to compute what is coming."""

    left, asked = 5.0, 0

    def of_method(self, _name: str) -> "SlowDisk":
        return self

    def restore(self, request: Request) -> float:
        self.asked += 1
        return self.left


# ------------------------------------------------------------------ the store alone


def filled_store(
    policy: str, sink_tokens: int, windows: tuple[int, ...] = ()
) -> tuple[PrefixStore, np.ndarray, int]:
    """A store, and raw pages of a prompt of three blocks and a bit."""
    settings = {"compressor": {"profile": "none", "sink_tokens": sink_tokens, **POLICIES[policy]}}
    plan = PagePlan.of(AppConfig.from_mapping(settings), Geometry(2, 2, 32, windows=windows))
    plan = replace(plan, prefix_bytes=1 << 20)
    rows, count = plan.geometry.head_rows, 3 * plan.block_tokens + 5
    limits = PrefixSettings(
        block_tokens=plan.block_tokens, total_bytes=1 << 20, tenant_bytes=1 << 20
    )
    pool = LocalPool(2000, plan.page_bytes, "w", limits)
    raw = pool.allocate(rows * plan.raw.pages(count)).reshape(rows, -1)
    store = PrefixStore(pool, plan, "weights", "float32")
    token = torch.arange(count)
    torch.manual_seed(3)
    store_tokens(
        torch.from_numpy(pool.arena.data),
        plan.raw,
        torch.randn(count, rows, 32),
        torch.randn(count, rows, 32),
        torch.from_numpy(raw).T[token // plan.raw.tokens].contiguous(),
        (token % plan.raw.tokens).int()[:, None].repeat(1, rows),
        token.int(),
    )
    return store, raw, count


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("sink_tokens", [0, 1, 500])
def test_what_is_published_comes_back(policy: str, sink_tokens: int) -> None:
    store, raw, count = filled_store(policy, sink_tokens)
    plan, rows = store.plan, len(raw)
    arena = torch.from_numpy(store.pool.arena.data)
    tokens = tuple(range(count))
    mean = torch.rand(rows, count)
    prefix = Prefix(tokens=pack_tokens(tokens), cache_salt="s", tenant="t", token_s=0.01)
    store.publish(prefix, RawPages(DevicePages(CPU, arena, arena), plan, raw, mean))
    assert not store.skipped
    again = store.pool.allocate(raw.size).reshape(2, 2, -1)
    attention = torch.zeros(2, 4, count)
    request = Request(id="r", prompt=tokens, sampling=Sampling(), reply_to="client", cache_salt="s")
    for limit in (0, plan.block_tokens - 1):
        assert store.load(replace(request, cached_at_most=limit), again, None) == 0
    limited = replace(request, cached_at_most=plan.block_tokens)
    assert store.load(limited, again, None) == plan.block_tokens
    found = store.load(request, again, attention)
    assert found == 3 * plan.block_tokens
    assert store.load(replace(request, cache_salt="other"), again, None) == 0

    lengths = torch.full((rows,), found, dtype=torch.int32)
    old = load_tokens(arena, plan.raw, torch.from_numpy(raw), lengths)
    new = load_tokens(arena, plan.raw, torch.from_numpy(again.reshape(rows, -1)), lengths)
    assert torch.equal(old[2], new[2])
    exact = found if policy == "fp16" else plan.block_sink_pages * plan.raw.tokens
    for before, after in zip(old[:2], new[:2], strict=True):
        assert torch.equal(before[:, :exact], after[:, :exact])
        bound = 0.0 if policy == "fp16" else 0.02
        assert (before - after).abs().max() <= bound
    sums = mean[:, :found] * torch.arange(found, 0, -1)
    torch.testing.assert_close(attention[0, 1, :found], sums[0])
    torch.testing.assert_close(attention[1, 2, :found], sums[3])
    assert not attention[..., found:].any()
    assert store.pool.check() == []


@pytest.mark.parametrize("window", [1, 2, 30, 1000])
def test_of_layers_with_a_window_only_what_is_read_is_loaded(window: int) -> None:
    """The rest is zeros, whatever the pages had before; window entries are evicted first."""
    store, raw, count = filled_store("k8v8", 1, windows=(0, window))
    plan, arena = store.plan, torch.from_numpy(store.pool.arena.data)
    prefix = Prefix(tokens=pack_tokens(range(count)), cache_salt="", tenant="t", token_s=0.01)
    store.publish(prefix, RawPages(DevicePages(CPU, arena, arena), plan, raw, None))
    request = Request(id="r", prompt=tuple(range(count)), sampling=Sampling(), reply_to="")
    again = store.pool.allocate(raw.size).reshape(2, 2, -1)
    arena[torch.from_numpy(again).long()] = 255
    found = store.load(request, again, None)
    assert found == 3 * plan.block_tokens
    lengths = torch.full((4,), found, dtype=torch.int32)
    old = load_tokens(arena, plan.raw, torch.from_numpy(raw), lengths)
    new = load_tokens(arena, plan.raw, torch.from_numpy(again.reshape(4, -1)), lengths)
    assert torch.equal(old[2], new[2])
    first = max(0, 3 - plan.window_blocks) * plan.block_tokens
    assert first <= max(0, found - window + 1)
    for before, after in zip(old[:2], new[:2], strict=True):
        assert (before - after)[:2].abs().max() < 0.02
        assert not after[2:, :first].any()
        assert not (before - after)[2:, first:].abs().gt(0.02).any()
    kept = store.pool.stat().prefix
    assert (kept.blocks, kept.windows) == (3, 3 if window > 1 else 0)
    if kept.windows > plan.window_blocks:
        store.pool.borrow_cache_memory((1 << 20) - kept.bytes + 1)
        left = store.pool.stat().prefix
        assert (left.blocks, left.windows) == (3, 2)
        assert store.load(request, again, None) == found
    assert store.pool.check() == []


def test_what_cannot_be_kept_is_counted_and_nothing_is_lost() -> None:
    store, raw, count = filled_store("k8v8", 1)
    prefix = Prefix(tokens=pack_tokens(range(count)), cache_salt="", tenant="", token_s=0.0)
    memory = DevicePages.in_place(store.pool.arena, CPU)
    pages = RawPages(memory, store.plan, raw, None)
    rest = store.pool.allocate(2000 - raw.size - 3)
    store.publish(prefix, pages)
    assert store.skipped == {"PoolExhausted": 1}
    assert store.pool.allocated_pages == raw.size + rest.size
    store.pool.free(rest)
    store.publish(prefix, pages)
    scores = segments(torch.from_numpy(store.pool.arena.data), store.plan.high).scores
    assert scores.isfinite().all()
    assert store.pool.stat().prefix.blocks == 3

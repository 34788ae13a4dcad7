"""The next turn computes its own tokens alone: what was answered is read back from decode pages."""

import random
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from triptych.core.config import AppConfig
from triptych.core.layout import Geometry
from triptych.core.messages import Cancel, Prefix, Request, Sampling, Tokens, pack_tokens
from triptych.core.pages import PagePlan
from triptych.kernels import load_tokens, store_tokens
from triptych.kvpool import LocalPool, PrefixSettings
from triptych.workers.decode.checkpoint import Checkpoint
from triptych.workers.decode.output_cache import OutputCache, SlotTokenSource
from triptych.workers.device import CPU
from triptych.workers.kv.device_pages import DevicePages
from triptych.workers.kv.handle_codec import small_pages
from triptych.workers.kv.prefix_cache import PrefixStore
from triptych.workers.local import Completion, LocalServer

VOCAB = 258
POLICIES = {
    "fp16": {"policy": "uniform:fp16"},
    "k8v8": {"policy": "uniform:k8v8"},
    "diffkv": {"policy": "diffkv", "high_format": "k8v8", "low_format": "k8v4"},
}
SESSION = "a conversation"


def config(policy: str, compressor: dict[str, object] | None = None, **pool: object) -> AppConfig:
    settings = {"profile": "none", "recent_window_tokens": 8, "high_window_tokens": 16}
    return AppConfig.from_mapping(
        {
            "model": {"name": "tiny", "dtype": "float32"},
            "pool": {"kv_cache_memory_bytes": 16 << 20, **pool},
            "compressor": {**settings, **POLICIES[policy], **(compressor or {})},
        }
    )


def prompt(tokens: int, seed: int = 0) -> list[int]:
    generator = random.Random(tokens * 1000 + seed)
    return [generator.randrange(2, VOCAB) for _ in range(tokens)]


def ask(
    server: LocalServer, tokens: list[int], session: str = SESSION, salt: str = ""
) -> Completion:
    """An answer, once nothing of its request is held any more."""
    sampling = Sampling(temperature=0.0, max_tokens=150, ignore_eos=True, logprobs=0)
    request = replace(server.request(tokens, sampling), session=session, cache_salt=salt)
    (answer,) = server.complete([request])
    assert answer.error is None
    settle(server)
    return answer


def settle(server: LocalServer) -> None:
    give_up_s = time.monotonic() + 30
    while (ledger := server.pool.stat()).held_pages != ledger.prefix_pages:
        assert time.monotonic() < give_up_s, ledger
        time.sleep(0.002)
    assert server.pool.check() == []
    assert ledger.faults == []
    assert (ledger.extent_pages, server.pool.allocated_pages) == (0, 0)


def whole(server: LocalServer, tokens: int) -> int:
    return tokens // server.plan.block_tokens * server.plan.block_tokens


# ------------------------------------------------------------------ through the engines


@pytest.mark.parametrize("policy", POLICIES)
def test_the_next_turn_begins_behind_the_answer(tiny_model: Path, policy: str) -> None:
    first, second = prompt(70), prompt(20, seed=1)
    with LocalServer(config(policy), tiny_model) as server:
        output_tokens = ask(server, first)
        turns = [*first, *output_tokens.tokens, *second]
        again = ask(server, turns)
        assert again.cached_tokens == whole(server, 70 + 149)
        alone = ask(server, turns, session="", salt="nobody else")
        assert alone.cached_tokens == 0
        assert server.pool.stat().prefix.sessions == 1
    pairs = zip(again.logprobs[:1], alone.logprobs[:1], strict=True)
    assert all(abs(one.logprob - other.logprob) < 0.5 for one, other in pairs)


def test_the_ledger_knows_whose_and_of_which_format_what_is_kept_is(tiny_model: Path) -> None:
    with LocalServer(config("diffkv"), tiny_model) as server:
        first = server.request(prompt(200), Sampling(temperature=0.0, max_tokens=100))
        steps = server.stream([replace(first, tenant="me", session=SESSION)])
        for _, event in zip(range(20), steps, strict=False):
            assert isinstance(event, Tokens)
        ledger, rows = server.pool.stat(), server.plan.geometry.head_rows
        assert ledger.faults == []
        assert ledger.by_tenant == {"me": ledger.request_pages}
        assert set(ledger.by_format) == {"fp16", "k8v8", "k8v4"}, "fp16: the cached sink"
        assert ledger.by_request.keys() == {first.id, "prefix"}
        for _ in steps:
            pass
        settle(server)
        ledger = server.pool.stat()
        sink = rows * server.plan.block_sink_pages
        assert ledger.by_format == {"k8v8": ledger.prefix_pages - sink, "fp16": sink}
        assert ledger.by_tenant == {"me": ledger.prefix_pages}


def test_only_whose_conversation_it_is_gains(tiny_model: Path) -> None:
    first = prompt(70)
    with LocalServer(config("k8v8"), tiny_model) as server:
        output_tokens = ask(server, first, salt="one")
        turns = [*first, *output_tokens.tokens, 5]
        assert ask(server, turns, salt="two").cached_tokens == 0
        assert ask(server, turns, session="", salt="one").cached_tokens == whole(server, 219)


@pytest.mark.parametrize(
    ("keep", "session", "is_kept"),
    [
        ("always", "", True),
        ("always", SESSION, True),
        ("sessions", "", False),
        ("sessions", SESSION, True),
        ("never", SESSION, False),
    ],
)
def test_a_setting_says_which_answers_are_kept(
    tiny_model: Path, keep: str, session: str, is_kept: bool
) -> None:
    first = prompt(70)
    with LocalServer(config("k8v8", keep_answers=keep), tiny_model) as server:
        output_tokens = ask(server, first, session)
        again = ask(server, [*first, *output_tokens.tokens, 5], session)
        assert again.cached_tokens == whole(server, 219 if is_kept else 70)


@pytest.mark.parametrize(
    ("compressor", "skipped"),
    [
        ({"alpha_high": 2.0, "alpha_low": 1.5}, {"TokensDropped": 2}),
        ({"score_every_tokens": 0}, {}),
        ({"policy": "leankv", "mass_high": 0.9, "mass_low": 0.5}, {"TokensDropped": 2}),
        ({"policy": "leankv", "mass_high": 0.3, "score_every_tokens": 0}, {}),
    ],
)
def test_what_would_mislead_the_next_turn_is_not_kept(
    tiny_model: Path, compressor: dict[str, object], skipped: dict[str, int]
) -> None:
    """Tokens were dropped, or nobody knows what attention the answer received."""
    first, counted = prompt(70), list[dict[str, int]]()
    with LocalServer(config("diffkv", compressor), tiny_model) as server:
        output_tokens = ask(server, first)
        again = ask(server, [*first, *output_tokens.tokens, 5])
        counted.append(dict(server.prefixes_skipped))
        assert again.cached_tokens == whole(server, 70)
    assert counted == [skipped]


def test_an_answer_that_is_kept_stays_high_where_low_tokens_have_no_positions(
    tiny_model: Path,
) -> None:
    first = prompt(300)
    with LocalServer(config("diffkv", {"high_window_tokens": 64}), tiny_model) as server:
        assert server.plan.low is not None
        assert not server.plan.low.is_tracked
        output_tokens = ask(server, first)
        again = ask(server, [*first, *output_tokens.tokens, 5])
        assert again.cached_tokens == whole(server, 449)
        assert server.prefixes_skipped == {}


def test_a_cancel_meets_an_answer_that_is_being_kept(tiny_model: Path) -> None:
    with LocalServer(config("diffkv"), tiny_model) as server:
        for seed in range(6):
            sampling = Sampling(temperature=0.0, max_tokens=150, ignore_eos=True)
            request = replace(server.request(prompt(70, seed), sampling), session=SESSION)
            (answer,) = server.complete([request])
            assert len(answer.tokens) == 150
            server.post(Cancel(requests=(request.id,)))
            settle(server)


# ------------------------------------------------------------------ the pages alone


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("seed", range(3))
def test_tokens_come_back_in_order_from_wherever_they_were(policy: str, seed: int) -> None:
    settings = {"compressor": {"profile": "none", **POLICIES[policy]}}
    made = PagePlan.of(AppConfig.from_mapping(settings), Geometry(2, 2, 32))
    plan = replace(made, prefix_bytes=1 << 20, reads_low_tokens=True)
    size, rows = plan.block_tokens, plan.geometry.head_rows
    stored = 3 * size + 7
    limits = PrefixSettings(block_tokens=size, total_bytes=1 << 20, tenant_bytes=1 << 20)
    pool = LocalPool(4000, plan.page_bytes, "w", limits)
    arena = torch.from_numpy(pool.arena.data)
    torch.manual_seed(seed)
    keys, values, scores = (*torch.randn(2, stored, rows, 32).unbind(), torch.rand(stored, rows))
    method = Checkpoint.create(plan, None, 2, 600).tables.methods[0]
    tables = method.sections
    chance = np.random.default_rng(seed)
    # Sink and window are recent and in order; the rest is in any class and any order.
    raw_end = plan.sink_tokens + 8 * plan.recent.tokens if plan.compresses else stored
    for row in range(rows):
        order = chance.permutation(
            np.arange(plan.sink_tokens, stored - (raw_end - plan.sink_tokens))
        )
        cut = len(order) // 2 if len(tables) > 2 else len(order)
        behind = np.arange(stored - (raw_end - plan.sink_tokens), stored)
        raw = np.concatenate([np.arange(plan.sink_tokens), behind])
        parts = [raw, order[:cut], order[cut:]] if plan.compresses else [np.arange(stored)]
        for table, tokens in zip(tables, parts, strict=False):
            layout = table.layout
            wanted = layout.pages(len(tokens))
            pages = small_pages(pool.allocate(layout.pool_pages(wanted)), layout.parts)[:wanted]
            table.pages[row // 2, 1, row % 2, : len(pages)] = pages
            table.tokens[row // 2, 1, row % 2] = len(tokens)
            at = torch.from_numpy(tokens)
            column, line = np.divmod(np.arange(len(tokens)), layout.tokens)
            store_tokens(
                arena,
                layout,
                keys[at, row : row + 1],
                values[at, row : row + 1],
                torch.from_numpy(pages[column].astype(np.int32))[:, None],
                torch.from_numpy(line.astype(np.int32))[:, None],
                at.int(),
                scores[at, row : row + 1],
            )
    store = PrefixStore(pool, plan, "weights", "float32")

    def slot_tokens(span: range) -> SlotTokenSource | None:
        memory = DevicePages(CPU, arena, arena)
        return SlotTokenSource.of(memory, method, 1, span, span, stored)

    output_tokens = tuple(range(stored))
    first = Prefix(
        tokens=pack_tokens(output_tokens[: 2 * size]), cache_salt="", tenant="", token_s=0.0
    )
    for prefix in (first, replace(first, tokens=pack_tokens(output_tokens), session="s")):
        kept = store.begin(prefix, 0)
        assert kept is not None
        span = range(kept.first * size, kept.last * size)
        kept.source = slot_tokens(span)
        assert kept.source is not None
        while not store.publish_next(kept, 1):
            pass
    assert pool.stat().prefix.sessions == 0, "the pool was told of no time-to-live"
    again = pool.allocate(rows * plan.raw.pages(stored)).reshape(2, 2, -1)
    attention = torch.zeros(2, 4, stored)
    request = Request(id="r", prompt=output_tokens, sampling=Sampling(), reply_to="")
    assert store.load(request, again, attention) == 3 * size
    lengths = torch.full((rows,), 3 * size, dtype=torch.int32)
    key, value, positions = load_tokens(
        arena, plan.raw, torch.from_numpy(again.reshape(rows, -1)), lengths
    )
    assert torch.equal(positions, torch.arange(3 * size, dtype=torch.int32).expand(rows, -1))
    sink = plan.sink_tokens if plan.compresses else 3 * size
    for found, meant in ((key, keys), (value, values)):
        expected = meant[: 3 * size].transpose(0, 1).to(torch.float16).float()
        assert (found[:, :sink] - expected[:, :sink]).abs().max() < (0.02 if sink < 9 else 1e-9)
        assert (found - expected).abs().max() < (0.5 if len(tables) > 2 else 0.05)
    if plan.policy.needs_significance:
        seen_by = stored - torch.arange(3 * size)
        mean = scores[: 3 * size, 0] / seen_by
        torch.testing.assert_close(
            attention[0, 0, : 3 * size], mean * torch.arange(3 * size, 0, -1)
        )
    tables[0].tokens[1, 1, 0] -= 1
    assert slot_tokens(range(size)) is None, "a row dropped one"
    assert attention.isfinite().all()


def test_a_worker_without_a_store_keeps_nothing() -> None:
    assert OutputCache.of(None, torch.empty(0), "always") is None

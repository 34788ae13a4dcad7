"""Requests that read pages of a cached prefix: the same tokens, and not a byte of it changes."""

import random
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from hashlib import sha256
from pathlib import Path

import numpy as np
import pytest

from tests.tiny import DIFFKV
from tests.unit.workers.decode.test_resume import (
    CONTEXT,
    DECODE,
    SELECTION,
    Client,
    Crash,
    Stages,
    crash_after,
    run,
)
from tests.unit.workers.kv.test_prefix_cache import ask, check, patient, prompt
from triptych.core.config import AppConfig
from triptych.core.messages import (
    Compress,
    Compressed,
    CompressItem,
    Encode,
    Join,
    Planned,
    Preempt,
    Prefill,
    Prefilled,
    Prefix,
    Request,
    Sampling,
    pack_tokens,
)
from triptych.core.pages import PagePlan
from triptych.core.schema import build
from triptych.kvpool import LocalPool, PrefixSettings
from triptych.workers.factory import load_model, make_engines, prefix_store
from triptych.workers.kv.handle_codec import copied_handle, pages_by_run
from triptych.workers.kv.prefix_cache import PrefixStore
from triptych.workers.local import LocalServer
from triptych.workers.models.facts import describe

__all__ = ["patient"]  # a fixture

ANSWER, COMMON = 24, 3 * 64 + 10
POLICIES = {
    "diffkv": {"compressor": DIFFKV},
    "selected": {"compressor": DIFFKV, "decode": {"selection": SELECTION}},
    "uniform": {"compressor": {"policy": "uniform:k8v4", "recent_window_tokens": 4}},
}


def requests(count: int = 2) -> list[Request]:
    """They begin alike."""
    return [
        Request(
            id=f"r{index}",
            prompt=tuple(prompt(COMMON) + prompt(33 + 14 * index, seed=index)),
            sampling=Sampling(max_tokens=ANSWER, temperature=0.7, seed=index, ignore_eos=True),
            reply_to="client",
        )
        for index in range(count)
    ]


@dataclass
class Sharing(Stages):
    """Stages whose pool keeps prefixes, and has that of all requests."""

    store: PrefixStore | None = None
    common: list[int] = field(default_factory=list)
    """Pages of the cached blocks."""

    @classmethod
    def with_policy(cls, model: Path, policy: str) -> "Sharing":
        settings = {
            "model": {"name": str(model), "dtype": "float32", "max_model_len": CONTEXT},
            "pool": {"kv_cache_memory_bytes": 8 << 20},
            **POLICIES[policy],
        }
        settings["compressor"] = {"profile": "none", **settings["compressor"]}
        config = build(AppConfig, settings)
        plan = PagePlan.of(config, describe(model).geometry)
        pages = config.pool.kv_cache_memory_bytes // plan.page_bytes
        pool = LocalPool(pages, plan.page_bytes, prefixes=PrefixSettings.of(config.pool, plan))
        store = prefix_store(config, plan, pool, "weights")
        stages = ("prefill", "compress", "decode")
        model_context = load_model(config, plan, model, stages)
        made = make_engines(config, plan, model_context, pool, stages, prefixes=store)
        self = cls(pool, plan, {engine.stage: engine for engine in made}, store=store)
        [first, *_] = requests()
        publisher = self.join(replace(first, id="first"))
        assert publisher.handle.lease_ref.shared == 0  # its pages are its own
        pool.release([publisher.handle.lease_ref.lease])
        found = pool.find_prefix(store.namespace(""), list(first.prompt))
        assert found is not None
        self.common = np.concatenate(found.blocks).tolist()
        pool.release_prefix(found.pin)
        return self

    def plan_of(self, request: Request) -> tuple[Prefilled, Planned]:
        prefill, compress = self.engines["prefill"], self.engines["compress"]
        read = self._until(prefill, Prefill(requests=(request,)), Prefilled)
        prefix = Prefix(
            tokens=pack_tokens(request.prompt),
            cache_salt=request.cache_salt,
            tenant="",
            token_s=0.001,
            cached_tokens=read.cached_tokens,
        )
        item = CompressItem(request=request.id, handle=read.handle, prefix=prefix)
        return read, self._until(compress, Compress(items=(item,)), Planned)

    def join(self, request: Request) -> Join:
        read, _ = self.plan_of(request)
        encode = Encode(requests=(request.id,), arena=self.pool.arena.id)
        done = self._until(self.engines["compress"], encode, Compressed)
        join = self.joins[request.id] = Join(
            request=request,
            output_tokens=(read.first_token,),
            handle=done.handle,
            report=done.report,
        )
        return join

    def copied(self, join: Join) -> Join:
        """The same bytes in pages of the request's own, as on another node."""
        handle = join.handle
        limit = self.pool.capacity_pages
        ids = np.concatenate(pages_by_run(handle, limit))
        self.pool.attach([(handle.lease_ref, ids)])
        mine = self.pool.allocate(ids.size)
        self.pool.arena.data[mine] = self.pool.arena.data[ids]
        (lease_ref,) = self.pool.handoff([(join.request.id, mine)], [handle.lease_ref.lease])
        assert lease_ref.shared == 0
        return replace(join, handle=copied_handle(handle, limit, lease_ref, mine))

    def digest(self) -> str:
        return sha256(self.pool.arena.data[self.common].tobytes()).hexdigest()

    @property
    def readers(self) -> int:
        return self.pool.stat().prefix.readers

    def expect_nothing_held(self) -> None:
        """But the cache itself, of which everything could be evicted."""
        ledger = self.pool.stat()
        assert self.pool.check() == []
        assert ledger.held_pages == ledger.prefix_pages
        assert (ledger.prefix.readers, ledger.prefix.shared_bytes) == (0, 0)


@pytest.fixture(scope="module", params=list(POLICIES))
def stages(request: pytest.FixtureRequest, tiny_model: Path) -> Sharing:
    return Sharing.with_policy(tiny_model, request.param)


@pytest.fixture
def client(stages: Sharing) -> Iterator[Client]:
    """Whatever a test does: afterwards the cache has the bytes that it had, and nobody holds it."""
    before = stages.digest()
    yield Client()
    assert stages.digest() == before
    for index in range(stages.decoders + 1):
        stages.pool.expel(f"decode-{index}")
    stages.expect_nothing_held()


@pytest.fixture(scope="module")
def whole(stages: Sharing) -> dict[str, list[int]]:
    """Answers from copies of the shared pages, which nothing interrupted."""
    client = Client()
    name, engine = stages.decoder()
    for request in requests():
        client.hear(engine.accept(stages.copied(stages.join(request))) or ())
    assert stages.readers == 0
    run(engine, client)
    assert stages.pool.expel(name)
    return {name: client.answer(name) for name in client.tokens}


def test_shared_pages_give_the_tokens_of_copies(
    stages: Sharing, whole: dict[str, list[int]], client: Client
) -> None:
    """To the bit, as the same bytes are read in the same order; tokens step down meanwhile."""
    _, engine = stages.decoder()
    for request in requests():
        join = stages.join(request)
        assert join.report.shared_bytes == join.handle.lease_ref.shared * stages.plan.page_bytes > 0
        client.hear(engine.accept(join) or ())
    assert stages.readers == len(requests())
    before = stages.digest()
    low = [table.tokens.sum() for table in engine.tables[2:-1]]
    while engine.has_work():
        client.hear(engine.step())
        assert stages.digest() == before
        now = [table.tokens.sum() for table in engine.tables[2:-1]]
        low = [max(pair) for pair in zip(low, now, strict=True)]
    assert all(low)
    assert {name: client.answer(name) for name in whole} == whole
    assert stages.readers == 0


def test_own_pages_are_what_is_booked(stages: Sharing, client: Client) -> None:
    """Shared and own pages are those that the request would hold alone, and own ones are counted
    exactly before they are there."""
    [request, _] = requests()
    _, planned = stages.plan_of(request)
    encode = Encode(requests=(request.id,), arena=stages.pool.arena.id)
    done = stages._until(stages.engines["compress"], encode, Compressed)
    ledger = stages.pool.stat()
    assert ledger.by_request[request.id] == planned.pages
    assert done.report.stored_bytes == planned.pages * stages.plan.page_bytes
    blocks = COMMON // stages.plan.block_tokens
    assert planned.shared == done.handle.lease_ref.shared == blocks * stages.plan.block_pages(1)
    assert ledger.prefix.shared_bytes == planned.shared * stages.plan.page_bytes
    stored = sum(np.frombuffer(one.tokens, "<i4").max() for one in done.handle.runs)
    assert stages.plan.policy.low_format or stored == len(request.prompt)
    stages.pool.release([done.handle.lease_ref.lease])


def test_whoever_dies_leaves_the_same_tokens_and_no_hold(
    stages: Sharing, whole: dict[str, list[int]], client: Client
) -> None:
    luck = random.Random(2)
    name, engine = stages.decoder()
    for request in requests():
        engine.accept(stages.join(request))
    with crash_after(10**9) as count:
        run(engine, Client())
    for lines in luck.sample(range(count[0]), 6):
        heard = Client()
        previous_worker, engine = stages.decoder()
        for request in requests():
            heard.hear(engine.accept(stages.join(request)) or ())
        with pytest.raises(Crash), crash_after(lines, DECODE):
            run(engine, heard)
        name, takeover = stages.decoder()
        for request in requests():
            heard.hear(takeover.accept(stages.resume(request, previous_worker)) or ())
        run(takeover, heard)
        assert {name: heard.answer(name) for name in whole} == whole, f"died at line {lines}"
        for one in (previous_worker, name):
            stages.pool.expel(one)
        stages.expect_nothing_held()


def test_shares_move_with_their_requests(
    stages: Sharing, whole: dict[str, list[int]], client: Client
) -> None:
    """From worker to worker; copies, which are the request's own, move as well."""
    both = [stages.decoder()[1] for _ in range(2)]
    [one, other] = requests()
    client.hear(both[0].accept(stages.join(one)) or ())
    client.hear(both[0].accept(stages.copied(stages.join(other))) or ())
    for turn in range(6):
        engine = both[turn % 2]
        for _ in range(3):
            client.hear(engine.step())
        client.hear(engine.accept(Preempt(requests=(one.id, other.id))) or ())
        assert stages.readers == 1
        for offer in client.suspended:
            request = one if offer.request == one.id else other
            join = Join(
                request=request,
                output_tokens=offer.output_tokens,
                handle=offer.handle,
                report=stages.joins[request.id].report,
            )
            client.hear(both[(turn + 1) % 2].accept(join) or ())
        client.suspended.clear()
    for engine in both:
        run(engine, client)
    assert {name: client.answer(name) for name in whole} == whole


@pytest.mark.parametrize("how", ["cancelled", "refused", "abandoned", "a fault"])
def test_a_compressor_lets_go_of_what_it_does_not_hand_over(
    stages: Sharing, client: Client, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    [request, _] = requests()
    stages.plan_of(request)
    compress = stages.engines["compress"]
    encode = Encode(requests=(request.id,), arena=stages.pool.arena.id)
    match how:
        case "cancelled":
            compress.cancel([request.id])
        case "abandoned":
            compress.accept(encode)
            compress.abandon()
        case "refused":
            compress.accept(encode)
            taken = stages.pool.allocate(stages.pool.stat().free_pages)
            list(compress.step())
            stages.pool.free(taken)
        case _:
            compress.accept(encode)
            monkeypatch.setattr(compress, "_encode", lambda *_: 1 / 0)
            with pytest.raises(ZeroDivisionError):
                compress.step()
            compress.cancel(compress.requests())
    stages.expect_nothing_held()


def test_what_was_evicted_meanwhile_is_encoded(
    stages: Sharing, client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(type(stages.pool), "pin_prefix", lambda *_: None)
    [request, _] = requests()
    join = stages.join(request)
    assert join.handle.lease_ref.shared == join.report.shared_bytes == 0
    stages.pool.release([join.handle.lease_ref.lease])


# ------------------------------------------------------------------ the server as a whole


def server(model: Path, policy: dict[str, object], **pool: object) -> LocalServer:
    settings = {
        "model": {"name": "tiny", "dtype": "float32"},
        "pool": {"kv_cache_memory_bytes": 16 << 20, **pool},
        "compressor": {"profile": "none", **policy},
    }
    return LocalServer(AppConfig.from_mapping(settings), model)


def test_a_beginning_is_stored_once_for_all_that_read_it(tiny_model: Path) -> None:
    """And booked once: what each has of its own is what the router and the pool count."""
    stored = dict[bool, list[int]]()
    tails = [prompt(17, seed=seed) for seed in range(3)]
    for shares in (True, False):
        with server(tiny_model, DIFFKV, share_pages=shares) as one:
            ask(one, prompt(COMMON))
            answers = [ask(one, [*prompt(COMMON), *tail]) for tail in tails]
            stored[shares] = [answer.report.stored_bytes for answer in answers]
            assert all((answer.report.shared_bytes > 0) == shares for answer in answers)
            assert all(answer.cached_tokens == COMMON // 64 * 64 for answer in answers)
            check(one)
            assert one.pool.stat().prefix.readers == 0
    assert max(stored[True]) < 0.8 * min(stored[False])


@pytest.mark.parametrize(
    ("policy", "other", "is_cached", "shares"),
    [
        (DIFFKV, "", True, True),
        (DIFFKV, "another tenant", False, True),
        ({"policy": "uniform:fp16"}, "", True, False),
    ],
)
def test_only_who_may_shares(
    tiny_model: Path, policy: dict[str, object], other: str, *, is_cached: bool, shares: bool
) -> None:
    """Clients that share no prefix share no page but with the cache; 16-bit pages are copied."""
    with server(tiny_model, policy) as one:
        ask(one, prompt(COMMON))
        blocks = one.pool.stat().prefix.blocks
        answer = ask(one, [*prompt(COMMON), 5, 6, 7], salt=other)
        assert (answer.cached_tokens > 0) == is_cached
        assert (one.pool.stat().prefix.blocks > blocks) == (not is_cached)
        assert (answer.report.shared_bytes > 0) == shares
        check(one)


@pytest.mark.usefixtures("patient")
def test_what_comes_back_from_disk_is_shared(tiny_model: Path, tmp_path: Path) -> None:
    disk = {"disk_path": str(tmp_path / "tier"), "disk_bytes": 1 << 24}
    with server(tiny_model, DIFFKV, **disk) as one:
        ask(one, prompt(COMMON))
        check(one)
    with server(tiny_model, DIFFKV, **disk) as one:
        answer = ask(one, [*prompt(COMMON), 5, 6, 7])
        assert one.pool.stat().disk.loaded == COMMON // 64
        assert answer.report.shared_bytes > 0
        check(one)

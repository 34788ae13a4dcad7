"""A decode worker that dies at any line of its code, and another one that goes on in its place."""

import contextlib
import random
import sys
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import FrameType
from typing import Any

import numpy as np
import pytest

from tests.effort import in_parts
from tests.tiny import DIFFKV
from triptych.core.config import AppConfig
from triptych.core.errors import StaleHandle
from triptych.core.grammar import from_regex
from triptych.core.messages import (
    Compress,
    Compressed,
    CompressionReport,
    CompressItem,
    Encode,
    Finished,
    Join,
    Planned,
    Preempt,
    Preempted,
    Prefill,
    Prefilled,
    Request,
    Resume,
    Resumed,
    Sampling,
    Send,
    Tokens,
)
from triptych.core.pages import PagePlan
from triptych.core.schema import build
from triptych.kvpool import LocalPool
from triptych.kvpool.rpc import page_ranges
from triptych.workers.compress.learned.known_networks import find_networks
from triptych.workers.decode import checkpoint, decode_engine, handover, page_selection, window
from triptych.workers.decode.checkpoint import Checkpoint, checkpoint_bytes
from triptych.workers.decode.decode_engine import DecodeEngine
from triptych.workers.device import CPU, Device
from triptych.workers.factory import load_model, make_engines
from triptych.workers.kv import block_table
from triptych.workers.kv.block_table import SectionTable
from triptych.workers.kv.handle_codec import pool_pages
from triptych.workers.models.compression_profile import find_profile
from triptych.workers.models.facts import describe

SLOTS, CONTEXT, ANSWER = 3, 256, 40
REPORT = CompressionReport(policy="any", raw_bytes=1, stored_bytes=1)
DECODE = frozenset(
    str(Path(module.__file__ or ""))
    for module in (decode_engine, handover, window, checkpoint, block_table, page_selection)
)
RETIREMENT = frozenset({str(Path(window.__file__ or ""))})
POLICIES = {
    "diffkv": DIFFKV,
    "uniform": {"policy": "uniform:k8v4", "recent_window_tokens": 4},
    "raw": {"policy": "uniform:fp16"},
}
POLICIES["mixed"] = {**DIFFKV, "methods": ["uniform:fp16"]}
"""The first request has classes, the second one keeps 16 bits."""
POLICIES["selected"] = POLICIES["diffkv"]
SELECTION = {
    "method": "moments",
    "keep_fraction": 0.4,
    "budget_tokens": 0,
    "window_tokens": 8,
    "dense_layers": 1,
}


class Crash(Exception):
    """Stands for the death of the process: nothing that comes after it happens."""


@contextmanager
def crash_after(lines: int, files: frozenset[str] = DECODE) -> Iterator[list[int]]:
    """Raise ``Crash`` before the line of these files that is the so many-th to run."""
    count = [0]

    def trace(frame: FrameType, event: str, _: object) -> Any:
        if frame.f_code.co_filename not in files or frame.f_code.co_name == "_score":
            return None  # what happens there is said there
        if event == "line":
            count[0] += 1
            if count[0] > lines:
                raise Crash
        return trace

    sys.settrace(trace)
    try:
        yield count
    finally:
        sys.settrace(None)


@dataclass
class Stages:
    """All stages on one pool, each driven by hand; decode workers are made as needed."""

    pool: LocalPool
    plan: PagePlan
    engines: dict[str, Any]
    device: Device = CPU
    decoders: int = 0
    joins: dict[str, Join] = field(default_factory=dict)
    """The last one of each request."""

    @classmethod
    def of(
        cls,
        model: Path,
        policy: str | Mapping[str, object],
        plugins: Iterable[object] = (),
        device: Device = CPU,
    ) -> "Stages":
        """``policy``: a name of ``POLICIES``, or settings of the compressor."""
        compressor = POLICIES[policy] if isinstance(policy, str) else policy
        settings = {
            "model": {"name": str(model), "dtype": "float32", "max_model_len": CONTEXT},
            "compressor": {"profile": "none", **compressor},
            "pool": {"kv_cache_memory_bytes": 8 << 20},
            "decode": {
                "selection": SELECTION if policy == "selected" else {},
                "plugins": list(plugins),
            },
        }
        config = build(AppConfig, settings)
        facts = describe(model)
        plan = PagePlan.of(
            config,
            facts.geometry,
            find_profile(config, facts),
            learned=find_networks(config, facts),
        )
        pool = LocalPool(config.pool.kv_cache_memory_bytes // plan.page_bytes, plan.page_bytes)
        stages = ("prefill", "compress", "decode")
        model_context = load_model(config, plan, model, stages, device)
        made = make_engines(config, plan, model_context, pool, stages, device=device)
        return cls(pool, plan, {engine.stage: engine for engine in made}, device)

    def decoder(self) -> tuple[str, DecodeEngine]:
        """A new decode worker with a checkpoint."""
        self.decoders += 1
        name = f"decode-{self.decoders}"
        pool = self.pool.join(name, checkpoint_bytes(self.plan, SLOTS, CONTEXT))
        model = self.engines["decode"]
        engine = DecodeEngine(
            model.runner,
            pool,
            self.plan,
            model.outputs,
            SLOTS,
            selection=model.selection,
            plugins=model.plugins,
            device=self.device,
        )
        return name, engine

    def join(self, request: Request) -> Join:
        """Read and compress a prompt, as the router would have it done."""
        prefill, compress = self.engines["prefill"], self.engines["compress"]
        methods = list(self.plan.by_method)
        number = int(request.id[-1]) if request.id[-1].isdigit() else 0
        if len(methods) > 1:
            request = replace(request, method=methods[number % len(methods)])
        read = self._until(prefill, Prefill(requests=(request,)), Prefilled)
        item = CompressItem(
            request=request.id, handle=read.handle, floor=request.floor, method=request.method
        )
        self._until(compress, Compress(items=(item,)), Planned)
        arena = self.pool.arena.id
        done = self._until(compress, Encode(requests=(request.id,), arena=arena), Compressed)
        join = self.joins[request.id] = Join(
            request=request,
            output_tokens=(read.first_token,),
            handle=done.handle,
            report=done.report,
        )
        return join

    def resume(self, request: Request, previous_worker: str) -> Resume:
        """What the router sends to the worker that takes over from a dead one."""
        return Resume(previous_worker=previous_worker, join=self.joins[request.id])

    @staticmethod
    def _until(engine: Any, message: Any, kind: type) -> Any:
        sends = list(engine.accept(message))
        while not (found := [send.message for send in sends if isinstance(send.message, kind)]):
            sends += engine.step()
        return found[0]


@dataclass
class Client:
    """Puts together what it hears, by index, and checks that nobody contradicts himself."""

    tokens: dict[str, dict[int, int]] = field(default_factory=dict)
    texts: dict[str, dict[int, str]] = field(default_factory=dict)
    likely: dict[str, dict[int, list[float]]] = field(default_factory=dict)
    """Log probabilities, of those who ask for them."""
    finished: set[str] = field(default_factory=set)
    resumed: set[str] = field(default_factory=set)
    suspended: list[Preempted] = field(default_factory=list)

    def hear(self, sends: Iterable[Send]) -> None:
        for send in sends:
            match send.message:
                case Tokens(request=name, index=index, tokens=(token,), text=text, logprobs=told):
                    assert self.tokens.setdefault(name, {}).setdefault(index, token) == token
                    assert self.texts.setdefault(name, {}).setdefault(index, text) == text
                    for one in told:
                        assert one.token == token
                        each = [one.logprob, *(value for _, value in one.top)]
                        likely = self.likely.setdefault(name, {}).setdefault(index, each)
                        assert likely == pytest.approx(each, abs=1e-4)
                case Finished(request=name, error=None):
                    self.finished.add(name)
                case Resumed(request=name):
                    self.resumed.add(name)
                case Preempted() as offer:
                    self.suspended.append(offer)
                case other:
                    raise AssertionError(other)

    def answer(self, name: str) -> list[int]:
        """Without the first token, if only the prefill may tell it."""
        first, *others = sorted(self.tokens[name].items())
        assert [index for index, _ in others] == [*range(first[0] + 1, first[0] + 1 + len(others))]
        return [token for _, token in (first, *others)]


def test_a_fault_of_the_compressor_ends_the_requests_that_it_was_encoding(
    stages: "Stages", monkeypatch: pytest.MonkeyPatch
) -> None:
    """They hang for ever if it does not know of them any more when it is asked whom to refuse."""
    [request, _] = requests()
    prefill, engine = stages.engines["prefill"], stages.engines["compress"]
    read = stages._until(prefill, Prefill(requests=(request,)), Prefilled)
    item = CompressItem(request=request.id, handle=read.handle)
    stages._until(engine, Compress(items=(item,)), Planned)
    engine.accept(Encode(requests=(request.id,), arena=stages.pool.arena.id))
    monkeypatch.setattr(engine, "_encode", lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        engine.step()
    assert engine.requests() == [request.id]
    engine.cancel(engine.requests())
    assert not engine.has_work()
    assert stages.pool.stat().held_pages == 0


@pytest.mark.parametrize("stage", ["prefill", "compress", "decode"])
def test_what_was_handed_over_and_nobody_took_goes_when_the_router_died(
    stages: "Stages", stage: str
) -> None:
    """Then nobody else knows of it."""
    [request, _] = requests()
    if stage == "prefill":
        stages._until(stages.engines[stage], Prefill(requests=(request,)), Prefilled)
    elif stage == "compress":
        stages.join(request)
    else:
        stages.engines[stage].accept(stages.join(request))
    assert stages.pool.stat().by_request
    stages.engines[stage].abandon()
    assert stages.pool.stat().by_request == {}
    assert stages.pool.stat().held_pages == 0
    assert not stages.engines[stage].has_work()


def requests(count: int = 2) -> list[Request]:
    return [
        Request(
            id=f"r{index}",
            prompt=tuple(random.Random(index).choices(range(2, 250), k=30 + 25 * index)),
            sampling=Sampling(
                max_tokens=ANSWER,
                temperature=0.7,
                seed=index,
                ignore_eos=True,
                stop=("~~",),
                grammar=from_regex(r"[ -~\n]*") if index else "",
                logprobs=-1 if index else 2,
            ),
            reply_to="client",
        )
        for index in range(count)
    ]


@pytest.fixture(scope="module", params=list(POLICIES))
def stages(request: pytest.FixtureRequest, tiny_model: Path) -> Stages:
    return Stages.of(tiny_model, request.param)


@pytest.fixture(scope="module")
def whole(stages: Stages) -> dict[str, list[int]]:
    return uninterrupted(stages)


def uninterrupted(stages: Stages) -> dict[str, list[int]]:
    """Answers that nothing interrupted."""
    client = Client()
    name, engine = stages.decoder()
    for request in requests():
        client.hear(engine.accept(stages.join(request)) or ())
    run(engine, client)
    assert stages.pool.expel(name)
    return {name: client.answer(name) for name in client.tokens}


def run(engine: DecodeEngine, client: Client) -> None:
    while engine.has_work():
        client.hear(engine.step())


def lines_of_a_run(stages: Stages, files: frozenset[str]) -> int:
    name, engine = stages.decoder()
    for request in requests():
        engine.accept(stages.join(request))
    with crash_after(10**9, files) as count:
        run(engine, Client())
    stages.pool.expel(name)
    return count[0]


def die_and_go_on(
    stages: Stages, whole: dict[str, list[int]], lines: int, files: frozenset[str]
) -> None:
    """No token is lost, none differs, and no page is lost."""
    client = Client()
    previous_worker, engine = stages.decoder()
    for request in requests():
        client.hear(engine.accept(stages.join(request)) or ())
    with pytest.raises(Crash), crash_after(lines, files):
        run(engine, client)
    go_on(stages, whole, client, previous_worker, f"died at line {lines}")


def test_log_probabilities_of_many_tokens_that_were_never_sent_are_sent_by_the_next_worker(
    stages: Stages, whole: dict[str, list[int]]
) -> None:
    """A busy machine can keep a worker from sending anything until it dies."""
    [asked, _] = requests()
    previous_worker, engine = stages.decoder()
    engine.accept(stages.join(asked))
    for _ in range(20):
        engine.step()
    client = Client()
    name, heir = stages.decoder()
    client.hear(heir.accept(stages.resume(asked, previous_worker)) or ())
    run(heir, client)
    assert client.answer(asked.id) == whole[asked.id]
    assert [*sorted(client.likely[asked.id])] == [*range(1, ANSWER)]
    assert stages.pool.expel(previous_worker)
    assert stages.pool.expel(name)


def test_log_probabilities_that_were_never_sent_go_with_a_request_that_migrates(
    stages: Stages, whole: dict[str, list[int]]
) -> None:
    """Its worker may die when the router has the pages and the client lacks the newest tokens."""
    [asked, _] = requests()
    name, engine = stages.decoder()
    engine.accept(stages.join(asked))
    for _ in range(20):
        engine.step()
    [offer] = [send.message for send in engine.accept(Preempt(requests=(asked.id,))) or ()]
    assert isinstance(offer, Preempted)
    client, (next_name, heir) = Client(), stages.decoder()
    client.hear(heir.accept(joining(stages, offer)) or ())
    run(heir, client)
    assert client.answer(asked.id) == whole[asked.id]
    assert [*sorted(client.likely[asked.id])] == [*range(1, ANSWER)]
    assert stages.pool.expel(name)
    assert stages.pool.expel(next_name)


def go_on(
    stages: Stages,
    whole: dict[str, list[int]],
    client: Client,
    previous_worker: str,
    how: str,
    *,
    is_moved: bool = False,
) -> None:
    """With ``is_moved`` the takeover worker is asked for the requests as soon as it has them."""
    takeover_name, takeover = stages.decoder()
    for request in requests():
        client.hear(takeover.accept(stages.resume(request, previous_worker)) or ())
    if is_moved:
        client.hear(takeover.accept(Preempt(requests=tuple(whole))) or ())
    run(takeover, client)
    next_name, third = stages.decoder()
    for offer in client.suspended:
        client.hear(third.accept(joining(stages, offer)) or ())
    run(third, client)
    assert client.resumed == client.finished == set(whole)
    assert {name: client.answer(name) for name in whole} == whole, how
    assert client.likely.keys() == {"r0"}
    assert [*sorted(client.likely["r0"])] == [*range(1, ANSWER)], how
    for name in (previous_worker, takeover_name, next_name):
        assert stages.pool.expel(name)
    assert stages.pool.check() == []
    assert stages.pool.stat().held_pages == 0


@in_parts(3)
def test_the_next_worker_goes_on_wherever_the_first_one_died(
    stages: Stages, whole: dict[str, list[int]], part: slice
) -> None:
    """At random lines of a run, more of them in its last steps, in which answers end."""
    total = lines_of_a_run(stages, DECODE)
    luck = random.Random(5)
    ends = luck.sample(range(int(0.97 * total), total), 5)
    for lines in [*luck.sample(range(total), 7), *ends][part]:
        die_and_go_on(stages, whole, lines, DECODE)


@pytest.mark.parametrize("is_moved", [False, True])
def test_a_step_that_nobody_heard_of_is_done_again_in_its_own_pages(
    stages: Stages,
    whole: dict[str, list[int]],
    monkeypatch: pytest.MonkeyPatch,
    *,
    is_moved: bool,
) -> None:
    """Its scores are added and its keys are stored, perhaps in a page that has nothing else.

    Only the takeover worker knows of that, so it does the step before it lets a request go.
    """
    if not stages.plan.policy.score_every:
        return
    say, left = Checkpoint.append_token, [0]

    def die(checkpoint: Checkpoint, slot: int, token: int) -> None:
        left[0] -= 1
        if left[0] == 0:
            raise Crash
        say(checkpoint, slot, token)

    for dies_at in (1, 2, 7, 11, 12, 15):  # 1, 11 and 12 are the first ones of their pages
        client = Client()
        previous_worker, engine = stages.decoder()
        for request in requests():
            client.hear(engine.accept(stages.join(request)) or ())
        left[0] = dies_at
        with monkeypatch.context() as patch:
            patch.setattr(Checkpoint, "append_token", die)
            with pytest.raises(Crash):
                run(engine, client)
        how = f"died at token {dies_at}"
        go_on(stages, whole, client, previous_worker, how, is_moved=is_moved)


@in_parts(3)
def test_a_retirement_is_carried_out_whatever_line_it_was_at(
    stages: Stages, whole: dict[str, list[int]], part: slice
) -> None:
    """At every second line of more than one retirement; fewer where nobody steps down."""
    total = lines_of_a_run(stages, RETIREMENT)
    if not stages.plan.compresses:
        assert total == 0
        return
    every = 2 if stages.plan.low is not None else 10
    for lines in range(total // 2, total // 2 + 60, every)[part]:
        die_and_go_on(stages, whole, lines, RETIREMENT)


def test_one_worker_may_take_over_from_several_and_die_itself(
    stages: Stages, whole: dict[str, list[int]]
) -> None:
    client, names = Client(), list[str]()
    lines = lines_of_a_run(stages, DECODE) // 4
    joins = [stages.join(request) for request in requests()]
    for join in joins:
        name, engine = stages.decoder()
        names.append(name)
        client.hear(engine.accept(join) or ())
        with pytest.raises(Crash), crash_after(lines):
            run(engine, client)
    for _ in range(2):
        takeover_name, takeover = stages.decoder()
        for request, previous_worker in zip(requests(), names, strict=True):
            client.hear(takeover.accept(stages.resume(request, previous_worker)) or ())
        names = [takeover_name] * len(names)
        with crash_after(lines if takeover_name != "last" else 10**9), contextlib.suppress(Crash):
            run(takeover, client)
    takeover_name, takeover = stages.decoder()
    for request, previous_worker in zip(requests(), names, strict=True):
        if request.id not in client.finished:
            client.hear(takeover.accept(stages.resume(request, previous_worker)) or ())
    run(takeover, client)
    assert {name: client.answer(name) for name in whole} == whole
    for name in [f"decode-{index}" for index in range(stages.decoders + 1)]:
        stages.pool.expel(name)
    assert stages.pool.stat().held_pages == 0


def test_a_request_moves_between_living_workers_and_no_token_changes(
    stages: Stages, whole: dict[str, list[int]]
) -> None:
    """After every few steps each goes to the other worker; one of them is the first's own again."""
    luck = random.Random(3)
    client, both = Client(), [stages.decoder() for _ in range(2)]
    for request in requests():
        client.hear(both[0][1].accept(stages.join(request)) or ())
    moves = 0
    while any(engine.has_work() for _, engine in both):
        for _, engine in both:
            for _ in range(luck.randrange(4)):
                client.hear(engine.step())
            client.hear(engine.accept(Preempt(requests=tuple(engine.requests()))) or ())
            assert not engine.has_work()
        for offer in client.suspended:
            _, engine = luck.choice(both)
            client.hear(engine.accept(joining(stages, offer)) or ())
            moves += 1
        client.suspended.clear()
    assert moves > 20
    assert client.finished == set(whole)
    assert {name: client.answer(name) for name in whole} == whole
    for name, _ in both:
        assert stages.pool.expel(name)
    assert stages.pool.check() == []
    assert stages.pool.stat().held_pages == 0


def test_an_answer_that_is_computed_again_goes_on_with_the_token_that_was_drawn(
    stages: Stages,
) -> None:
    """Behind what the client has, as after a router's death; decode took the answer's first one."""
    request = replace(requests(1)[0], sampling=Sampling(temperature=0.0, max_tokens=ANSWER))
    output_tokens = (7, 9, 11)
    handed = dict[str, tuple[int, ...]]()
    for name, one in {
        "again": replace(request, id="again", output_tokens=output_tokens),
        "prompt": replace(request, id="prompt", prompt=request.prompt + output_tokens),
    }.items():
        join = stages.join(one)
        handed[name] = join.output_tokens
        _, engine = stages.decoder()
        engine.accept(join)
        engine.cancel([name])
    assert handed["again"] == handed["prompt"] != (output_tokens[0],)


def joining(stages: Stages, offer: Preempted, previous_worker: str = "") -> Join:
    return Join(
        request=stages.joins[offer.request].request,
        output_tokens=offer.output_tokens,
        handle=offer.handle,
        report=REPORT,
        previous_worker=previous_worker,
        logprobs=offer.logprobs,
    )


def test_a_suspended_request_holds_nothing_but_its_pages(stages: Stages) -> None:
    [request, _] = requests()
    name, engine = stages.decoder()
    engine.accept(stages.join(request))
    for _ in range(25):
        engine.step()
    client = Client()
    client.hear(engine.accept(Preempt(requests=(request.id, "unknown"))) or ())
    [offer] = client.suspended
    limit = stages.pool.capacity_pages
    pages = sum(
        len(pool_pages(page_ranges.unpack(run.pages, run.parts * limit), run.parts))
        for run in offer.handle.runs
    )
    assert stages.pool.stat().by_request == {request.id: pages}
    assert engine.requests() == []
    engine.cancel([request.id])
    assert stages.pool.stat().by_request == {}
    stages.pool.expel(name)
    assert stages.pool.stat().held_pages == 0


@pytest.mark.parametrize("is_heard", [True, False])
def test_what_is_on_offer_outlives_the_worker_that_offered_it(
    stages: Stages, whole: dict[str, list[int]], *, is_heard: bool
) -> None:
    """Whether the router heard of the offer, or only of the death."""
    client = Client()
    previous_worker, engine = stages.decoder()
    for request in requests():
        client.hear(engine.accept(stages.join(request)) or ())
    for _ in range(11):
        client.hear(engine.step())
    client.hear(engine.accept(Preempt(requests=("r0", "r1"))) or ())
    name, takeover = stages.decoder()
    if is_heard:
        stages.pool.inherit(previous_worker)  # a fence: it is dead from here on
        for offer in client.suspended:
            client.hear(takeover.accept(joining(stages, offer, previous_worker)) or ())
    else:
        for request in requests():
            client.hear(takeover.accept(stages.resume(request, previous_worker)) or ())
    run(takeover, client)
    assert client.resumed == client.finished == set(whole)
    assert {name: client.answer(name) for name in whole} == whole
    for one in (previous_worker, name):
        assert stages.pool.expel(one)
    assert stages.pool.stat().held_pages == 0


@pytest.mark.parametrize("call", ["nothing", "start", "attach", "clear", "fill", "join", "enter"])
def test_a_death_on_the_way_into_the_batch_costs_nothing(
    stages: Stages, whole: dict[str, list[int]], monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    """Before the worker has looked at what it was told, or before its checkpoint has it."""
    client = Client()
    first, [moved, new] = stages.decoder(), requests()
    client.hear(first[1].accept(stages.join(moved)) or ())
    for _ in range(9):
        client.hear(first[1].step())
    previous_worker, engine = stages.decoder()
    client.hear(first[1].accept(Preempt(requests=("r0",))) or ())
    joins = [joining(stages, client.suspended.pop()), stages.join(new)]
    stages.joins["r0"] = joins[0]

    def die(*_: object, **__: object) -> None:
        raise Crash

    owners = {"attach": type(engine.pool), "fill": SectionTable, "clear": SectionTable}
    owners |= {"join": Checkpoint, "enter": Checkpoint, "start": type(engine.outputs)}
    for join in joins if call != "nothing" else ():
        with monkeypatch.context() as patch:
            patch.setattr(owners[call], call, die)
            with pytest.raises(Crash):
                engine.accept(join)
    go_on(stages, whole, client, previous_worker, f"died in {call}")
    stages.pool.expel(first[0])


@pytest.mark.parametrize("call", ["mark_preempted", "handoff", "setdiff1d"])
def test_a_death_on_the_way_to_an_offer_loses_nothing(
    stages: Stages, whole: dict[str, list[int]], monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    """Before the checkpoint says so, before the pool has the lease, and right after that."""
    client = Client()
    previous_worker, engine = stages.decoder()
    for request in requests():
        client.hear(engine.accept(stages.join(request)) or ())
    for _ in range(7):
        client.hear(engine.step())

    def die(*_: object, **__: object) -> None:
        raise Crash

    owner = {"mark_preempted": Checkpoint, "handoff": type(engine.pool), "setdiff1d": np}[call]
    with monkeypatch.context() as patch:
        patch.setattr(owner, call, die)
        with pytest.raises(Crash):
            engine.accept(Preempt(requests=("r0", "r1")))
    go_on(stages, whole, client, previous_worker, f"died in {call}")


def refusals(sends: Iterable[Send] | None) -> list[tuple[str | None, bool]]:
    """Code of each refusal, and whether the request may begin anew elsewhere."""
    errors = [send.message.error for send in sends or () if isinstance(send.message, Finished)]
    return [(error.code, error.resumable) for error in errors if error is not None]


NO_MORE = [("worker_lost", True)]


def test_what_is_not_there_cannot_be_resumed(stages: Stages) -> None:
    [request, other] = requests()
    previous_worker, engine = stages.decoder()
    takeover_name, takeover = stages.decoder()
    engine.accept(stages.join(request))
    never_here = replace(stages.joins[request.id], request=other)
    assert refusals(takeover.accept(stages.resume(request, "nobody"))) == NO_MORE
    assert (
        refusals(takeover.accept(Resume(previous_worker=previous_worker, join=never_here)))
        == NO_MORE
    )
    assert refusals(takeover.accept(stages.resume(request, previous_worker))) == []
    assert (
        refusals(takeover.accept(stages.resume(request, previous_worker))) == []
    )  # it is here already
    _, late = stages.decoder()
    assert refusals(late.accept(stages.resume(request, previous_worker))) == NO_MORE
    run(takeover, Client())
    for name in (previous_worker, takeover_name):
        stages.pool.expel(name)
    assert stages.pool.stat().held_pages == 0


@pytest.mark.parametrize(
    ("field_name", "value"),
    [
        ("num_output_tokens", 0),
        ("num_output_tokens", CONTEXT + 1),
        ("num_output_tokens", -1),
        ("num_prior_tokens", -5),
        ("num_prior_tokens", 10**6),
        ("lease", 10**12),
        ("lease", 0),
        ("lease", checkpoint.FINISHED),
    ],
)
def test_a_checkpoint_that_makes_no_sense_is_not_believed(
    stages: Stages, field_name: str, value: object
) -> None:
    [request, _] = requests()
    previous_worker, engine = stages.decoder()
    engine.accept(stages.join(request))
    takeover_name, takeover = stages.decoder()
    written = engine._checkpoint
    getattr(written, field_name)[written.find(request.id)] = value
    assert refusals(takeover.accept(stages.resume(request, previous_worker))) == NO_MORE
    assert stages.pool.check() == []
    for name in (previous_worker, takeover_name):
        stages.pool.expel(name)
    assert stages.pool.stat().held_pages == 0


def test_page_ids_and_counts_of_a_checkpoint_are_checked(stages: Stages) -> None:
    [request, _] = requests()
    rng = np.random.default_rng(3)
    for _ in range(20):
        previous_worker, engine = stages.decoder()
        engine.accept(stages.join(request))
        takeover_name, takeover = stages.decoder()
        table = rng.choice(engine._checkpoint.sections)
        target = table.pages if rng.random() < 0.5 else table.tokens
        target[...] = rng.integers(-(2**31), 2**31, target.shape, dtype=np.int32)
        refused = refusals(takeover.accept(stages.resume(request, previous_worker)))
        assert refused in (NO_MORE, [])  # raw counts are not believed anyway
        assert stages.pool.check() == []
        for name in (previous_worker, takeover_name):
            stages.pool.expel(name)
        assert stages.pool.stat().held_pages == 0


def test_a_checkpoint_of_other_settings_is_refused(stages: Stages) -> None:
    mine = Checkpoint.create(stages.plan, None, SLOTS, CONTEXT)
    for slots, context in ((SLOTS, CONTEXT - 1), (SLOTS - 1, CONTEXT), (SLOTS + 1, CONTEXT)):
        other = Checkpoint.create(stages.plan, None, slots, context)
        with pytest.raises(StaleHandle):
            mine.open_other(other.memory)
    with pytest.raises(StaleHandle):
        mine.open_other(np.zeros(mine.memory.size, np.uint8))

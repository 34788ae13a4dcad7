"""Plug-ins in the engine: neutral ones change nothing, and an answer may go on anywhere."""

import contextlib
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from torch import Tensor

from tests.unit.workers.decode.test_resume import REPORT, Client, Crash, Stages
from triptych.core.config import AppConfig
from triptych.core.grammar import from_regex
from triptych.core.messages import (
    Finished,
    Join,
    PluginOverride,
    Preempt,
    Preempted,
    Request,
    Sampling,
    Tokens,
)
from triptych.workers.decode.checkpoint import MAX_PLUGIN_MEMORY, Checkpoint
from triptych.workers.decode.decode_engine import DecodeEngine
from triptych.workers.decode.plugins.entropy import entropy
from triptych.workers.decode.window import RetirementPlan, Window
from triptych.workers.local import Completion, LocalServer
from triptych.workers.sampling.sampler import Drawn, SamplerRow, sample

PROMPTS = (list(range(2, 90)), list(range(60, 240)), [9, 8, 7] * 10)
GREEDY = Sampling(temperature=0.0, max_tokens=30, ignore_eos=True, logprobs=0)
PATIENCE = 3
NEUTRAL = "entropy_stop"
SELECTION = {
    "method": "moments",
    "keep_fraction": 0.3,
    "budget_tokens": 0,
    "window_tokens": 8,
    "dense_layers": 0,
}


def settings(model: Path, *plugins: object, **decode: object) -> AppConfig:
    return AppConfig.from_mapping(
        {
            "model": {"name": str(model), "dtype": "float32"},
            "compressor": {
                "profile": "none",
                "policy": "uniform:k8v4",
                "recent_window_tokens": 20,
            },
            "pool": {"kv_cache_memory_bytes": 16 << 20, "extent_pages": 64, "prefix_bytes": 0},
            "decode": {"plugins": list(plugins), **decode},
        }
    )


class Answers:
    """Asks a server of its own, and knows how sure the model was of each token."""

    def __init__(self, config: AppConfig) -> None:
        self.config = config
        self.entropies = list[float]()

    def draw(self, logits: Tensor, rows: Sequence[SamplerRow]) -> list[Drawn]:
        self.entropies += entropy(logits).tolist()
        return sample(logits, rows)

    def ask(
        self, *wishes: Sequence[PluginOverride], sampling: Sampling = GREEDY, prompts: int = 3
    ) -> list[Completion]:
        """Of each prompt an answer; wish by wish, each batch by itself."""
        done = list[Completion]()
        with LocalServer(self.config, draw=self.draw) as server:
            for plugin_overrides in wishes or ((),):
                asked = [server.request(prompt, sampling) for prompt in PROMPTS[:prompts]]
                done += server.complete(
                    [replace(one, plugin_overrides=tuple(plugin_overrides)) for one in asked]
                )
            assert server.pool.stat().held_pages == 0
        assert all(one.error is None for one in done)
        return done


def told(answers: Iterable[Completion]) -> list[list[float]]:
    """Tokens, and the log probability of each."""
    return [[*one.tokens, *(entry.logprob for entry in one.logprobs)] for one in answers]


@pytest.fixture(scope="module")
def plain(tiny_model: Path) -> list[list[float]]:
    return told(Answers(settings(tiny_model)).ask())


@pytest.fixture(scope="module")
def calm(tiny_model: Path) -> tuple[float, int]:
    """A threshold, and how long the first prompt's answer is with it and some patience."""
    answers = Answers(settings(tiny_model))
    (whole,) = answers.ask(prompts=1)
    assert len(whole.tokens) == len(answers.entropies) == 30
    for threshold in sorted(answers.entropies):
        streak = 0
        for index, one in enumerate(answers.entropies[1:], 1):  # the prefill draws the first
            streak = streak + 1 if one < threshold else 0
            if streak == PATIENCE and index > 2 + PATIENCE:
                return threshold, index + 1
    raise AssertionError("no threshold ends this answer in its midst")


def test_off_and_neutral_are_the_plain_step_token_for_token(
    tiny_model: Path, plain: list[list[float]]
) -> None:
    off = PluginOverride(plugin="eager", on=False)
    eager = {
        "name": "entropy_stop",
        "label": "eager",
        "options": {"threshold": 99.0, "patience_tokens": 1},
    }
    neutral = Answers(settings(tiny_model, NEUTRAL, "layer_exit", {**eager, "enabled": False}))
    assert told(neutral.ask()) == plain
    switched = Answers(settings(tiny_model, eager))
    by_request, by_option = (off,), (replace(off, on=True, options={"threshold": 0.0}),)
    assert told(switched.ask(by_request, by_option)) == plain * 2
    assert [len(one.tokens) for one in switched.ask()] == [2, 2, 2]


def test_tokens_skip_layers_for_those_who_want_it_alone(
    tiny_model: Path, plain: list[list[float]]
) -> None:
    early = (PluginOverride(plugin="layer_exit", options={"threshold": 99.0, "depth": 0.5}),)
    with LocalServer(settings(tiny_model, "layer_exit")) as server:
        asked = [server.request(prompt, GREEDY) for prompt in PROMPTS]
        changed, *others = server.complete([replace(asked[0], plugin_overrides=early), *asked[1:]])
        assert server.pool.stat().held_pages == 0
    assert [one.tokens for one in others] == [[*map(int, one[:30])] for one in plain[1:]]
    assert changed.error is None
    assert len(changed.tokens) == 30
    assert changed.tokens != plain[0][:30]


def test_an_answer_ends_with_the_last_of_so_many_tokens_that_were_sure(
    tiny_model: Path, plain: list[list[float]], calm: tuple[float, int]
) -> None:
    threshold, length = calm
    stop = {"name": "entropy_stop", "options": {"patience_tokens": PATIENCE}}
    wish = (PluginOverride(plugin="entropy_stop", options={"threshold": threshold}),)
    answers = Answers(settings(tiny_model, stop))
    (ended,) = answers.ask(wish, prompts=1)
    assert ended.finish == "stop"
    assert ended.tokens == plain[0][:length]
    held_back = replace(GREEDY, min_tokens=length + 1)
    (longer,) = answers.ask(wish, sampling=held_back, prompts=1)
    assert len(longer.tokens) > length
    assert longer.tokens == plain[0][: len(longer.tokens)]
    structured = replace(GREEDY, grammar=from_regex(r"[ -~\n]{25,}"), ignore_eos=False)
    (kept,) = answers.ask(wish, sampling=structured, prompts=1)
    assert len(kept.tokens) >= 25


def test_what_a_request_wants_and_nobody_has_ends_it_with_a_400(tiny_model: Path) -> None:
    config = settings(tiny_model, NEUTRAL)
    with LocalServer(config) as server:
        for switch in (
            PluginOverride(plugin="nobody"),
            PluginOverride(plugin="selection", on=False),
            PluginOverride(plugin="entropy_stop", options={"patience_tokens": -1.0}),
        ):
            request = replace(server.request(PROMPTS[0], GREEDY), plugin_overrides=(switch,))
            (answer,) = server.complete([request])
            assert answer.error is not None
            assert answer.error.status == 400
        assert server.pool.stat().held_pages == 0


def test_requests_of_one_batch_read_different_shares_of_their_pages(
    tiny_model: Path, plain: list[list[float]]
) -> None:
    """Each as it does alone; with all pages, or with none chosen, as without a selection."""
    config = settings(tiny_model, selection=SELECTION)
    wishes = [(), (PluginOverride(plugin="selection", on=False),)]
    wishes += [
        (PluginOverride(plugin="selection", options={"keep_fraction": kept}),) for kept in (0.6, 1)
    ]
    whole = told(Answers(settings(tiny_model)).ask(*[()] * 4, prompts=1))
    alone = told(Answers(config).ask(*wishes, prompts=1))
    assert alone[1] == alone[3] == whole[0] != alone[0]
    with LocalServer(config) as server:
        asked = [server.request(PROMPTS[0], GREEDY) for _ in wishes]
        mixed = [
            replace(one, plugin_overrides=wish) for one, wish in zip(asked, wishes, strict=True)
        ]
        together = server.complete(mixed)
    assert [one.tokens for one in together] == [one[:30] for one in alone]
    assert plain[0] == whole[0]


# ---------------------------------------------------------------- moved, and left by the dead


def asked(threshold: float) -> list[Request]:
    wish = PluginOverride(plugin="entropy_stop", options={"threshold": threshold})
    sampling = replace(GREEDY, logprobs=-1)
    requests = [
        Request(id=f"r{i}", prompt=tuple(prompt), sampling=sampling, reply_to="client")
        for i, prompt in enumerate(PROMPTS[:2])
    ]
    return [replace(requests[0], plugin_overrides=(wish,)), requests[1]]


class Listener(Client):
    """Also hears who ended an answer."""

    def __init__(self) -> None:
        super().__init__()
        self.ended_by = dict[str, str]()

    def hear(self, sends) -> None:
        sends = list(sends)
        for send in sends:
            if isinstance(send.message, Tokens) and send.message.finish:
                self.ended_by[send.message.request] = send.message.ended_by
        super().hear(sends)


@pytest.fixture(scope="module")
def stages(tiny_model: Path) -> Stages:
    stop = {"name": "entropy_stop", "options": {"patience_tokens": PATIENCE}}
    return Stages.of(tiny_model, "uniform", [stop])


@pytest.fixture(scope="module")
def threshold(stages: Stages) -> float:
    """One with which the first answer ends before the other, and not at its first chance."""
    for nats in (x / 8 for x in range(1, 48)):
        length = len(run(stages, nats).answer("r0"))
        if length < 29:
            return nats
    raise AssertionError("the model is never sure")


def run(stages: Stages, threshold: float) -> Listener:
    """Answers that nothing interrupts."""
    client = Listener()
    name, engine = stages.decoder()
    for request in asked(threshold):
        client.hear(engine.accept(stages.join(request)) or ())
    while engine.has_work():
        client.hear(engine.step())
    stages.pool.expel(name)
    return client


def check(client: Listener, whole: Listener, stages: Stages, names: Iterable[str]) -> None:
    assert {name: client.answer(name) for name in whole.tokens} == {
        name: whole.answer(name) for name in whole.tokens
    }
    assert client.ended_by == whole.ended_by == {"r0": "entropy_stop", "r1": ""}
    for name in names:
        stages.pool.expel(name)
    assert stages.pool.stat().held_pages == 0


def test_a_streak_goes_along_when_a_request_moves(stages: Stages, threshold: float) -> None:
    """After every step to another worker: the streak is never longer than one there."""
    whole, client = run(stages, threshold), Listener()
    both = [stages.decoder() for _ in range(2)]
    joins: list[Join] = [stages.join(request) for request in asked(threshold)]
    turn, moves = 0, 0
    while joins:
        turn = 1 - turn
        engine = both[turn][1]
        for join in joins:
            client.hear(engine.accept(join) or ())
        client.hear(engine.step())
        client.hear(engine.accept(Preempt(requests=tuple(engine.requests()))) or ())
        joins = [joining(offer, threshold) for offer in client.suspended]
        moves += len(joins)
        client.suspended.clear()
    assert moves > 30
    check(client, whole, stages, [name for name, _ in both])


def joining(offer: Preempted, threshold: float) -> Join:
    (request,) = [one for one in asked(threshold) if one.id == offer.request]
    return Join(
        request=request,
        output_tokens=offer.output_tokens,
        handle=offer.handle,
        report=REPORT,
        memory=offer.memory,
    )


@pytest.mark.parametrize("call", ["record_plugins", "append_token", "mark_finished", "leave"])
def test_a_streak_outlives_its_worker(
    stages: Stages, threshold: float, monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    """Wherever in a step the worker dies, right before a store of its checkpoint."""
    whole = run(stages, threshold)
    last = 2 * len(whole.answer("r0"))
    original = getattr(Checkpoint, call)
    for dies_at in range(1, 3) if call in ("mark_finished", "leave") else range(last - 7, last + 1):
        left = [dies_at]

        def die(checkpoint: Checkpoint, *given: object, left: list[int] = left) -> None:
            left[0] -= 1
            if left[0] == 0:
                raise Crash
            original(checkpoint, *given)

        client = Listener()
        previous_worker, engine = stages.decoder()
        for request in asked(threshold):
            client.hear(engine.accept(stages.join(request)) or ())
        with monkeypatch.context() as patch, contextlib.suppress(Crash):
            patch.setattr(Checkpoint, call, die)
            while engine.has_work():
                client.hear(engine.step())
        takeover_name, takeover = stages.decoder()
        for request in asked(threshold):
            if request.id not in client.finished:
                client.hear(takeover.accept(stages.resume(request, previous_worker)) or ())
        while takeover.has_work():
            client.hear(takeover.step())
        check(client, whole, stages, [previous_worker, takeover_name])


def test_a_memory_that_has_no_room_is_refused(stages: Stages) -> None:
    name, engine = stages.decoder()
    join = replace(stages.join(asked(0.0)[1]), memory=(0.0,) * (MAX_PLUGIN_MEMORY + 1))
    (refusal,) = engine.accept(join) or ()
    assert isinstance(refusal.message, Finished)
    assert refusal.message.error is not None
    assert "at most 16" in refusal.message.error.message
    assert not engine.has_work()
    stages.pool.expel(name)
    stages.pool.withdraw([join.request.id])  # what it was offered is its source worker's still
    assert stages.pool.stat().held_pages == 0


# ---------------------------------------------------------------- tokens that are dropped


def stored(tiny_model: Path, threshold: float | None) -> tuple[list[int], int, int]:
    """Tokens of an answer, how many are stored in all head rows, and how many were dropped."""
    plugins = [] if threshold is None else [{"name": "soft_prune"}]
    stages = Stages.of(tiny_model, "diffkv", plugins)
    wish = PluginOverride(plugin="soft_prune", options={"threshold": threshold or 0.0})
    sampling = Sampling(temperature=0.0, max_tokens=60, ignore_eos=True)
    request = Request(
        id="r",
        prompt=tuple(PROMPTS[0]),
        sampling=sampling,
        reply_to="client",
        plugin_overrides=(wish,),
    )
    if threshold is None:
        request = replace(request, plugin_overrides=())
    client, (name, engine) = Client(), stages.decoder()
    client.hear(engine.accept(stages.join(request)) or ())
    (dropped, held) = (0, 0)
    retire = Window.apply

    def move(window: Window, retirement: RetirementPlan) -> Any:
        nonlocal dropped
        before, low = held_tokens(engine), engine.tables[2].tokens[:, retirement.slots].copy()
        downgraded, places = retirement.plan.downgraded, retirement.plan.downgraded_places
        is_replaced = (places >= 0) & (places < low[..., None])
        gone = int(((downgraded >= 0) & (places < 0) | is_replaced).sum())
        emptied = retire(window, retirement)
        assert before - held_tokens(engine) == gone
        dropped += gone
        return emptied

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Window, "apply", move)
        while engine.has_work():
            held = held_tokens(engine)
            client.hear(engine.step())
    stages.pool.expel(name)
    assert stages.pool.stat().held_pages == 0
    return client.answer("r"), held, dropped


def held_tokens(engine: DecodeEngine) -> int:
    return sum(int(table.tokens.sum()) for table in engine.tables)


def test_pruning_drops_what_is_not_looked_at_and_nothing_when_neutral(tiny_model: Path) -> None:
    """Each token that is dropped is one less in its head row, exactly."""
    plain = stored(tiny_model, None)
    assert stored(tiny_model, 0.0) == plain
    some, most = stored(tiny_model, 0.7), stored(tiny_model, 5.0)
    assert most[2] > some[2] > plain[2]
    assert most[1] < some[1] < plain[1]

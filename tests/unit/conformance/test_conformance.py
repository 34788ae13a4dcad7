"""What every method of the table must keep: shapes, bytes, determinism, page tables, moves."""

import random
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.effort import examples
from tests.unit.conformance.rows import (
    FILES,
    METHODS_TO_TEST,
    answer,
    by_reference,
    compress,
    is_same,
    layouts,
    named,
    profile_for,
    settings_of,
    stored,
)
from tests.unit.workers.decode.test_resume import (
    DECODE,
    Client,
    Stages,
    die_and_go_on,
    joining,
    lines_of_a_run,
    uninterrupted,
)
from triptych.core.config import AppConfig
from triptych.core.layout import Geometry
from triptych.core.messages import Preempt, Request, Sampling
from triptych.core.methods.composition import Method
from triptych.core.methods.table import METHODS
from triptych.core.pages import PagePlan
from triptych.router import ByteModel
from triptych.workers.kv.handle_codec import pool_pages, unpack_run
from triptych.workers.kv.prefix_cache import profile_of

LENGTHS = (1, 2, 5, 31, 64, 131)
ANSWER = 24


@pytest.fixture(scope="module", params=METHODS_TO_TEST)
def stages(request: pytest.FixtureRequest, tiny_model: Path) -> Stages:
    return Stages.of(tiny_model, settings_of(request.param, tiny_model))


def requests(lengths: tuple[int, ...] = LENGTHS) -> list[Request]:
    sampling = Sampling(max_tokens=ANSWER, temperature=0.0, ignore_eos=True)
    return [
        Request(
            id=f"c{number}",
            prompt=tuple(random.Random(count).choices(range(2, 250), k=count)),
            sampling=sampling,
            reply_to="client",
        )
        for number, count in enumerate(lengths)
    ]


def drop(stages: Stages, asked: list[Request]) -> None:
    """Free what was compressed."""
    for stage in ("compress", "decode"):
        stages.engines[stage].cancel([one.id for one in asked])
    assert stages.pool.stat().by_request == {}
    assert stages.pool.check() == []


def test_every_token_is_stored_once_or_dropped_in_pages_of_the_methods_formats(
    stages: Stages,
) -> None:
    asked, plan = requests(), stages.plan
    for one, (_, done) in zip(asked, compress(stages, asked), strict=True):
        count, rows = len(one.prompt), plan.geometry.head_rows
        held = np.zeros((rows, count), np.int32)
        assert [run.format for run in done.handle.runs] == [
            layout.format.name for layout in layouts(stages)
        ]
        for _, key, value, positions in stored(stages, done):
            assert key.isfinite().all()
            assert value.isfinite().all()
            for row in range(rows):
                named = positions[row][positions[row] >= 0].numpy()
                np.add.at(held[row], named, 1)
        assert held.max() == 1
        sink, window = min(count, plan.sink_tokens), plan.policy.window_tokens
        assert held[:, :sink].all()
        assert held[:, count - min(count, window) :].all()
        if plan.policy.key_merging is not None:
            leaving = plan.leaving_tokens(count)
            sets = plan.policy.key_merging.sets(count, leaving, min(1, leaving))
            assert (held[:, sink : sink + leaving].sum(1) == sets).all()
            assert held[:, sink + leaving :].all()
            continue
        if plan.merges:
            leaving, chunk = plan.leaving_tokens(count), plan.policy.merged_tokens
            merged = held[:, sink : sink + leaving].reshape(rows, -1, chunk)
            assert (merged == [0] * (chunk - 1) + [1]).all(), "the newest of a chunk stands for it"
            assert held[:, sink + leaving :].all()
            continue
        assert plan.policy.drops_tokens or held.all()
    drop(stages, asked)


def test_pages_are_those_that_were_planned_and_no_more_than_the_byte_model_foretells(
    stages: Stages,
) -> None:
    asked, plan = requests(), stages.plan
    model, page = ByteModel(plan), plan.page_bytes
    for one, (planned, done) in zip(asked, compress(stages, asked), strict=True):
        bound = model.estimate(len(one.prompt), ANSWER)
        held = stages.pool.stat().by_request[one.id]
        assert planned.pages == held == done.report.stored_bytes // page
        assert held * page <= bound.compressed <= bound.grown
        if plan.compresses:
            exact = sum(
                layout.pool_pages(int((-(-counts // layout.tokens)).sum()))
                for layout, run in zip(layouts(stages), done.handle.runs, strict=True)
                for counts, _ in [
                    unpack_run(run, layout, plan.geometry.head_rows, stages.pool.capacity_pages)
                ]
            )
            assert held == exact
    drop(stages, asked)


def test_a_batch_gives_the_bytes_of_single_prompts_and_so_does_a_second_time(
    stages: Stages,
) -> None:
    asked = requests()
    together = [stored(stages, done) for _, done in compress(stages, asked)]
    for one, expected in zip(asked, together, strict=True):
        for again in named([one], "again "):
            ((_, done),) = compress(stages, [again])
            assert is_same(stored(stages, done), expected), len(one.prompt)
            stages.engines["compress"].cancel([again.id])
    drop(stages, asked)


def test_the_reference_stores_the_same_tokens_in_the_same_classes(stages: Stages) -> None:
    asked = requests((64, 230))
    fast = [stored(stages, done) for _, done in compress(stages, asked)]
    again = compress(stages, named(asked, "plain "), by_reference())
    plain = [stored(stages, done) for _, done in again]
    for one, other in zip(fast, plain, strict=True):
        for first, second in zip(one, other, strict=True):
            assert first[0] == second[0]
            assert torch.equal(first[3], second[3])
            for mine, theirs in zip(first[1:3], second[1:3], strict=True):
                off = (mine - theirs).abs()
                assert (off > 1e-3).sum() <= 0.01 * off.numel(), "another rounding of few numbers"
    drop(stages, [*asked, *named(asked, "plain ")])


def test_answers_are_those_of_single_requests_and_of_the_reference(stages: Stages) -> None:
    asked = requests((5, 64, 131))
    together = answer(stages, asked)
    alone = [answer(stages, [one])[one.id] for one in asked]
    assert list(together.values()) == alone
    with by_reference():
        plain = answer(stages, asked)
    same = [mine == theirs for mine, theirs in zip(plain.values(), alone, strict=True)]
    assert sum(same) >= 2, "a random model may be torn between two tokens"
    assert stages.pool.check() == []


def test_page_tables_are_conserved_at_every_step_and_within_the_byte_model(
    stages: Stages,
) -> None:
    asked, (name, engine) = requests((5, 64, 131)), stages.decoder()
    plan, model = stages.plan, ByteModel(stages.plan)
    for one in asked:
        list(engine.accept(stages.join(one)) or ())
    while engine.has_work():
        list(engine.step())
        for running in engine._running.values():
            named = engine._checkpoint.pages(running.slot)
            assert len(set(named.tolist())) == named.size
            unused = pool_pages(running.unused_pages, plan.recent.parts)
            held = np.union1d(named, unused)
            assert held.size == running.num_pages
            prompt = len(running.output.request.prompt)
            bound = model.estimate(prompt, ANSWER).grown
            assert held.size * plan.page_bytes <= bound
    assert stages.pool.expel(name)
    assert stages.pool.stat().held_pages == 0
    assert stages.pool.check() == []


def test_a_request_that_moves_answers_as_one_that_stays(stages: Stages) -> None:
    (asked,) = requests((97,))
    expected = answer(stages, [asked])[asked.id]
    client, (name, engine), (other, heir) = Client(), stages.decoder(), stages.decoder()
    client.hear(engine.accept(stages.join(asked)) or ())
    for _ in range(ANSWER // 2):
        client.hear(engine.step())
    client.hear(engine.accept(Preempt(requests=(asked.id,))) or ())
    client.hear(heir.accept(joining(stages, client.suspended[0])) or ())
    while heir.has_work():
        client.hear(heir.step())
    assert client.answer(asked.id) == expected
    for worker in (name, other):
        assert stages.pool.expel(worker)
    assert stages.pool.check() == []


@pytest.mark.conformance
def test_the_next_worker_goes_on_wherever_the_first_one_died(stages: Stages) -> None:
    whole, luck = uninterrupted(stages), random.Random(3)
    total = lines_of_a_run(stages, DECODE)
    for lines in luck.sample(range(total), 12):
        die_and_go_on(stages, whole, lines, DECODE)


@pytest.mark.parametrize("name", METHODS_TO_TEST)
@settings(max_examples=examples(60), deadline=None)
@given(prompt=st.integers(1, 2000), more=st.integers(0, 600))
def test_the_byte_model_grows_with_tokens(name: str, prompt: int, more: int) -> None:
    plan = plan_of(name)
    model = ByteModel(plan)
    now, then = model.estimate(prompt, 0), model.estimate(prompt, more)
    assert now.compressed == then.compressed <= now.grown <= then.grown
    if prompt + more > plan.full_recent_tokens:  # of fewer tokens decode moves none to other pages
        assert then.grown <= now.compressed + then.growth
    assert model.grown_bytes(prompt + more) >= then.grown
    if not plan.reads_in_blocks:
        assert model.estimate(prompt + more, 0).grown == then.grown


@pytest.mark.parametrize("name", METHODS_TO_TEST)
def test_a_new_version_has_other_cached_prefixes(name: str) -> None:
    plan = plan_of(name)
    newer = replace(plan, policy=replace(plan.policy, version=plan.policy.version + 1))
    assert profile_of(plan, "float32") != profile_of(newer, "float32")


@pytest.mark.parametrize("row", METHODS.builtin)
def test_parts_say_what_they_do_and_what_they_need(row: str) -> None:
    method = METHODS.load(row)
    assert isinstance(method, Method)
    policy = plan_of("uniform:k8v4" if row == "uniform" else row).policy
    assert policy.observes_attention == bool(method.needs & {"attention_sums", "queries"})
    rule = policy.observing_rule
    measured = {"attention_moments", "query_statistics"}
    assert method.needs & measured == ({rule.measured} & measured if rule else set())
    assert policy.merges == ("merges_tokens" in method.traits)
    assert policy.drops_tokens == ("drops_tokens" in method.traits)
    assert (policy.low_format is not None) == ("requantizes_tokens" in method.traits)
    mixes = {"mixes_channels", "mixes_segments"} & method.traits
    assert policy.kv_rotation.has_rotated_keys == bool(mixes)


def plan_of(name: str) -> PagePlan:
    config = AppConfig.from_mapping({"compressor": {"profile": "none", **settings_of(name)}})
    geometry = Geometry(layers=2, kv_heads=2, head_dim=64)
    return PagePlan.of(config, geometry, profile_for(geometry), learned=FILES)

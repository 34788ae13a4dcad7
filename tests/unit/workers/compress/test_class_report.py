"""Shares of token classes in a report: those of the tokens that pages hold."""

import random
from dataclasses import astuple, replace
from pathlib import Path

import pytest

from tests.learned import CHUNK_TOKENS, networks_beside
from tests.tiny import DIFFKV
from tests.unit.conformance.rows import compress, stored
from tests.unit.workers.decode.test_resume import Stages
from tests.unit.workers.test_local_server import greedy
from triptych.core.messages import ClassShares, Compressed, Request

SETTINGS = {
    **DIFFKV,
    "high_window_tokens": 4,
    "keep_share": 0.5,
    "mass_high": 0.9,
    "mass_low": 0.05,
}
TOKENS = 250
PROMPT = tuple(random.Random(3).choices(range(2, 250), k=TOKENS))
REQUEST = Request(id="r", prompt=PROMPT, sampling=greedy(4), reply_to="client")


def run(model: Path, request: Request = REQUEST, **settings: object) -> tuple[Stages, Compressed]:
    stages = Stages.of(model, {**SETTINGS, **settings})
    ((_, done),) = compress(stages, [request])
    return stages, done


def shares_of(done: Compressed) -> ClassShares:
    assert done.report.classes is not None
    return done.report.classes


@pytest.mark.parametrize("policy", ["uniform:k8v4", "diffkv", "leankv", "adakv", "snapkv"])
def test_shares_are_those_of_the_positions_in_the_pages(tiny_model: Path, policy: str) -> None:
    stages, done = run(tiny_model, policy=policy)
    rows = stages.plan.geometry.head_rows
    held = [int((at >= 0).sum()) / (rows * TOKENS) for *_, at in stored(stages, done)]
    recent, high, low = (*held, 0.0)[:3]
    found = shares_of(done)
    assert astuple(found) == pytest.approx((recent, high, low, 0, 1 - recent - high - low))
    assert sum(astuple(found)) == pytest.approx(1)
    assert (found.pruned > 0) == (policy != "uniform:k8v4")
    assert (found.low > 0) == (policy == "leankv")


def test_sixteen_bits_are_recent_and_a_high_floor_prunes_nothing(tiny_model: Path) -> None:
    _, done = run(tiny_model, policy="uniform:fp16")
    assert shares_of(done) == ClassShares(recent=1.0, high=0.0)
    _, done = run(tiny_model, request=replace(REQUEST, floor="high"), policy="diffkv")
    found = shares_of(done)
    assert (found.low, found.pruned) == (0, 0)
    assert found.recent + found.high == pytest.approx(1)


def test_merged_tokens_count_as_those_that_they_replace(tiny_model: Path) -> None:
    stages, done = run(tiny_model, policy="learned:merge", learned=networks_beside(tiny_model))
    leaving = stages.plan.leaving_tokens(TOKENS)
    found = shares_of(done)
    assert found.merged == pytest.approx(leaving // CHUNK_TOKENS * CHUNK_TOKENS / TOKENS)
    assert found.high == pytest.approx(leaving % CHUNK_TOKENS / TOKENS)
    assert found.pruned == pytest.approx(0)

"""Figures from samples whose moments are known."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from triptych.loadgen.measure import levels_of
from triptych.loadgen.report.sample import Chunk, Sample
from triptych.loadgen.report.stats import Slo, error_counts, percentile, summarize
from triptych.loadgen.run import Run
from triptych.loadgen.workload.openai_requests import WORDS, Workload


def sample(first_s: float, gap_s: float, tokens: int, *, error: str | None = None) -> Sample:
    chunks = tuple(Chunk(first_s + gap_s * i) for i in range(tokens))
    return Sample(0.0, chunks[-1].at_s, chunks, 10, tokens, error)


@given(st.lists(st.floats(-1e6, 1e6), min_size=1), st.floats(0, 100))
def test_percentiles_are_those_of_numpy(values: list[float], percent: float) -> None:
    assert percentile(values, percent) == pytest.approx(np.percentile(values, percent), abs=1e-6)


def test_figures_follow_from_the_moments() -> None:
    run = Run((sample(0.1, 0.02, 5), sample(0.3, 0.04, 5), sample(9, 9, 2, error="x")), 2.0)
    figures = summarize(run, Slo(ttft_ms=200.0))
    assert (figures["completed"], figures["failed"]) == (2, 1)
    assert figures["output_throughput"] == pytest.approx(5.0)
    assert figures["total_token_throughput"] == pytest.approx(15.0)
    assert figures["request_throughput"] == pytest.approx(1.0)
    assert figures["request_goodput"] == pytest.approx(0.5)
    assert figures["p50_ttft_ms"] == pytest.approx(200.0)
    assert figures["min_tpot_ms"] == pytest.approx(20.0)
    assert figures["max_itl_ms"] == pytest.approx(40.0)
    assert figures["max_e2el_ms"] == pytest.approx(460.0)


def test_without_an_answer_there_are_no_latencies_and_no_division_by_zero() -> None:
    run = Run((sample(1, 1, 1, error="a"), sample(1, 1, 1, error="a")), 1.0)
    figures = summarize(run, Slo())
    assert figures["completed"] == 0
    assert figures["request_goodput"] is None
    assert "p50_ttft_ms" not in figures
    assert error_counts(run.samples) == {"a": 2}


def test_an_answer_of_one_token_has_no_time_per_output_token() -> None:
    figures = summarize(Run((sample(0.1, 0.0, 1),), 1.0), Slo(tpot_ms=1.0))
    assert "p50_tpot_ms" not in figures
    assert figures["request_goodput"] == pytest.approx(1.0)


def test_limits_of_latency_hold_together() -> None:
    fast = sample(0.1, 0.01, 3)
    assert Slo(ttft_ms=101, tpot_ms=11).holds(fast)
    assert not Slo(ttft_ms=99, tpot_ms=11).holds(fast)
    assert not Slo(ttft_ms=101, tpot_ms=9).holds(fast)


def test_prompts_have_their_length_differ_and_come_back_with_the_seed() -> None:
    for form in ("tokens", "text"):
        workload = Workload(model="m", prompt_tokens=32, output_tokens=1, form=form, seed=3)
        prompts = [workload.body(workload.turn(index))["prompt"] for index in range(50)]
        lengths = {len(p.split() if isinstance(p, str) else p) for p in prompts}
        assert lengths == {32}
        assert len({str(prompt)[:40] for prompt in prompts}) == 50
        assert prompts[7] == workload.body(workload.turn(7))["prompt"]


@pytest.mark.parametrize("vocab_size", [2, 300, 32_000])
def test_token_ids_stay_inside_the_vocabulary(vocab_size: int) -> None:
    workload = Workload(model="m", prompt_tokens=500, output_tokens=1, vocab_size=vocab_size)
    prompt = workload.body(workload.turn(0))["prompt"]
    assert isinstance(prompt, list)
    assert all(0 < token < vocab_size for token in prompt)


def test_every_word_is_there_once() -> None:
    assert len(WORDS) == len(set(WORDS)) > 50


def test_levels_keep_their_order_and_fill_whole_rounds() -> None:
    levels = levels_of([1, 4, 16], [0.5], None)
    assert [str(level) for level in levels] == ["c=1", "c=4", "c=16", "0.5/s"]
    assert [level.requests for level in levels] == [10, 12, 32, 60]
    assert {level.requests for level in levels_of([3], [2.0], 7)} == {7}

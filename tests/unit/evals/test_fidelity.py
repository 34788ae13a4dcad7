"""Figures on inputs whose answers are known."""

from math import exp, log

import numpy as np
import pytest
import torch

from triptych.evals.metrics.fidelity import (
    Steps,
    bootstrap,
    compare,
    first_divergence,
    kl_means,
    summarize,
)


def steps(kl: list[float], agree: list[float], full: list[float], ours: list[float]) -> Steps:
    return Steps(*(np.array(values) for values in (kl, agree, full, ours)))


def test_two_known_distributions_give_the_divergence_of_the_textbook() -> None:
    p, q = torch.tensor([[0.7, 0.2, 0.1]]), torch.tensor([[0.1, 0.6, 0.3]])
    found = compare(p.log(), q.log() + 5.0, [2])
    expected = 0.7 * log(0.7 / 0.1) + 0.2 * log(0.2 / 0.6) + 0.1 * log(0.1 / 0.3)
    assert found.kl == pytest.approx([expected], rel=1e-5)
    assert found.agree.tolist() == [0.0]
    assert found.nll_full == pytest.approx([-log(0.1)], rel=1e-5)
    assert found.nll == pytest.approx([-log(0.3)], rel=1e-5)


def test_every_step_is_compared_with_its_own_target_however_many_there_are() -> None:
    logits = torch.randn(75, 11, generator=torch.Generator().manual_seed(0))
    targets = [step % 11 for step in range(75)]
    found = compare(logits, logits, targets)
    assert np.abs(found.kl).max() == 0.0
    assert found.agree.tolist() == [1.0] * 75
    expected = -logits.double().log_softmax(-1)[torch.arange(75), torch.tensor(targets)]
    assert found.nll == pytest.approx(expected.numpy())


def test_a_summary_pools_tokens_and_takes_perplexity_of_the_mean() -> None:
    one = steps([0.0, 0.2], [1, 0], [1.0, 2.0], [1.5, 2.0])
    two = steps([0.4, 0.6], [1, 1], [3.0, 4.0], [3.0, 4.5])
    summary = summarize([[one], [two]])
    assert (summary.documents, summary.tokens) == (2, 4)
    assert summary.kl == pytest.approx(0.3)
    assert summary.top1_agreement == 0.75
    assert summary.perplexity_full == pytest.approx(exp(2.5))
    assert summary.perplexity_ratio == pytest.approx(exp(0.25))
    assert summary.nll_difference == pytest.approx(0.25)
    assert summary.kl_p99 == pytest.approx(np.quantile([0.0, 0.2, 0.4, 0.6], 0.99))
    assert kl_means([[one], [two]]) == pytest.approx([0.1, 0.5])


def test_pieces_of_one_document_count_as_one_document() -> None:
    piece = steps([0.1], [1], [1.0], [1.0])
    assert summarize([[piece, piece, piece]]).documents == 1
    assert summarize([[piece, piece, piece]]).kl_ci95 is None


def test_the_bootstrap_covers_the_mean_and_narrows_with_more_documents() -> None:
    draw = np.random.default_rng(3)
    few, many = (list(draw.normal(1.0, 0.5, size=count)) for count in (8, 128))
    low, high = bootstrap(many) or (0.0, 0.0)
    assert low < 1.0 < high
    wide_low, wide_high = bootstrap(few) or (0.0, 0.0)
    assert high - low < (wide_high - wide_low) / 2
    assert bootstrap([0.25] * 5) == (0.25, 0.25)


def test_steps_survive_json() -> None:
    before = steps([0.125], [1], [2.0], [3.0])
    after = Steps.from_json(before.as_json())
    assert after.as_json() == before.as_json()


def test_answers_part_where_the_first_token_differs() -> None:
    assert first_divergence([1, 2, 3], [1, 2, 4]) == 2
    assert first_divergence([1, 2, 3], [1, 2, 3]) is None

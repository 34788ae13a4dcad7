"""The sampler against a plain definition, row by row, and its promises."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from tests.effort import examples
from triptych.core.errors import ModelError
from triptych.core.messages import Sampling
from triptych.workers.sampling.sampler import Drawn, SamplerRow, sample

VOCAB = 97
EOS = (2, 5)


def reference(logits: Tensor, row: SamplerRow, output: list[int]) -> int:
    """The definition, in float64 and plain loops."""
    x, want = logits.double().clone(), row.sampling
    for token, bias in want.logit_bias:
        x[token] += bias
    for token in {*row.prompt, *output}:
        x[token] = (
            x[token] / want.repetition_penalty
            if x[token] > 0
            else x[token] * want.repetition_penalty
        )
    for token in set(output):
        x[token] -= want.presence_penalty + want.frequency_penalty * output.count(token)
    if len(output) < want.min_tokens:
        ends = set(want.stop_token_ids) | (set() if want.ignore_eos else set(EOS))
        for token in ends:
            x[token] = -math.inf
    if want.temperature < 1e-5:
        return int(x.argmax())
    probs = filtered((x / want.temperature).softmax(0), want)
    cumulative, uniform = probs.cumsum(0), row.uniform()
    return int((cumulative <= uniform * cumulative[-1]).sum())


def filtered(probs: Tensor, want: Sampling) -> Tensor:
    """Probabilities after top-k, top-p and min-p."""
    best = probs.max()
    if want.top_k:
        falling = probs.sort(descending=True).values
        probs = torch.where(probs >= falling[min(want.top_k, len(probs)) - 1], probs, 0.0)
    if want.top_p < 1:
        falling = (probs / probs.sum()).sort(descending=True).values
        before = falling.cumsum(0) - falling
        border = falling[before < want.top_p].min() * probs.sum()
        probs = torch.where(probs >= border * (1 - 1e-12), probs, 0.0)
    return torch.where(probs >= want.min_p * best, probs, 0.0)


tokens = st.integers(0, VOCAB - 1)
samplings = st.builds(
    Sampling,
    temperature=st.sampled_from([0.0, 0.3, 1.0, 2.0]),
    top_k=st.sampled_from([0, 1, 5, VOCAB, 500]),
    top_p=st.sampled_from([1.0, 0.9, 0.4, 1e-6]),
    min_p=st.sampled_from([0.0, 0.1, 1.0]),
    repetition_penalty=st.sampled_from([1.0, 1.3, 0.7]),
    presence_penalty=st.sampled_from([0.0, 0.5, -0.5]),
    frequency_penalty=st.sampled_from([0.0, 0.4]),
    seed=st.integers(-(2**63), 2**64),
    logit_bias=st.lists(
        st.tuples(tokens, st.floats(-9, 9)), max_size=3, unique_by=lambda p: p[0]
    ).map(tuple),
    min_tokens=st.integers(0, 4),
    ignore_eos=st.booleans(),
    stop_token_ids=st.lists(tokens, max_size=2).map(tuple),
)


@given(
    wants=st.lists(samplings, min_size=1, max_size=6),
    seed=st.integers(0, 2**32 - 1),
    prompt=st.lists(tokens, min_size=1, max_size=9),
    output=st.lists(tokens, max_size=6),
)
@settings(max_examples=examples(300), deadline=None)
def test_every_row_of_a_batch_draws_what_the_definition_draws(
    wants: list[Sampling], seed: int, prompt: list[int], output: list[int]
) -> None:
    logits = torch.from_numpy(np.random.default_rng(seed).normal(scale=3, size=(len(wants), VOCAB)))
    logits = logits.float()
    before = logits.clone()
    rows = [SamplerRow(want, prompt, EOS, output) for want in wants]
    drawn = sample(logits, rows)
    expected = [reference(line, row, output) for line, row in zip(logits, rows, strict=True)]
    assert [one.token for one in drawn] == expected
    assert torch.equal(logits, before)


@given(want=samplings, seed=st.integers(0, 2**32 - 1))
@settings(max_examples=examples(50), deadline=None)
def test_an_answer_does_not_depend_on_what_shares_the_batch(want: Sampling, seed: int) -> None:
    logits = torch.from_numpy(np.random.default_rng(seed).normal(size=(5, VOCAB))).float()
    others = [Sampling(temperature=t, seed=i) for i, t in enumerate((0.0, 0.7, 1.0, 3.0))]
    rows = [SamplerRow(settings, [1, 2], EOS) for settings in (want, *others)]
    assert sample(logits, rows)[0] == sample(logits[:1], rows[:1])[0]


def test_the_same_seed_gives_the_same_answer_and_each_position_its_own_number() -> None:
    def uniforms(seed: int) -> list[float]:
        row = SamplerRow(Sampling(seed=seed), [1], EOS)
        drawn = list[float]()
        for _ in range(2000):
            drawn.append(row.uniform())
            row.append(3)
        return drawn

    assert uniforms(7) == uniforms(7)
    assert uniforms(7) != uniforms(8)
    values = np.array(uniforms(7))
    assert ((values >= 0) & (values < 1)).all()
    assert len(set(values)) == len(values)
    assert abs(values.mean() - 0.5) < 0.03
    assert abs(np.corrcoef(values[1:], values[:-1])[0, 1]) < 0.08


def test_an_answer_resumes_in_the_middle_with_the_same_numbers() -> None:
    want = Sampling(seed=3, repetition_penalty=1.2, frequency_penalty=0.5)
    whole = SamplerRow(want, [1, 2], EOS)
    for token in (4, 4, 9):
        whole.append(token)
    resumed = SamplerRow(want, [1, 2], EOS, output=(4, 4, 9))
    logits = torch.randn(1, VOCAB)
    assert sample(logits, [whole]) == sample(logits, [resumed])


def test_draws_follow_the_probabilities() -> None:
    logits = torch.tensor([[0.0, 1.0, 2.0, -1.0]]).expand(8000, 4)
    rows = [SamplerRow(Sampling(temperature=1.0, seed=i), [0], EOS) for i in range(8000)]
    counts = np.bincount([one.token for one in sample(logits, rows)], minlength=4) / 8000
    np.testing.assert_allclose(counts, logits[0].softmax(0), atol=0.02)


def test_log_probabilities_are_the_models_own() -> None:
    logits = torch.randn(3, VOCAB)
    wants = [
        Sampling(temperature=0.0, logprobs=3, logit_bias=((8, 100.0),)),
        Sampling(temperature=2.0, logprobs=0, top_k=4),
        Sampling(temperature=0.0),
    ]
    drawn = sample(logits, [SamplerRow(want, [1], EOS) for want in wants])
    raw = logits.log_softmax(-1)
    assert drawn[0].token == 8
    assert drawn[0].logprob == pytest.approx(float(raw[0, 8]), abs=1e-6)
    best = raw[0].topk(3)
    assert [token for token, _ in drawn[0].top] == best.indices.tolist()
    assert [value for _, value in drawn[0].top] == pytest.approx(best.values.tolist(), abs=1e-6)
    assert drawn[1].logprob == pytest.approx(float(raw[1, drawn[1].token]), abs=1e-6)
    assert drawn[1].top == ()
    assert drawn[2] == Drawn(int(logits[2].argmax()))


@pytest.mark.parametrize("bad", [math.nan, math.inf])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_logits_that_are_not_numbers_fail_their_row_alone(bad: float, temperature: float) -> None:
    logits = torch.randn(3, VOCAB)
    logits[1, 4] = bad
    want = Sampling(temperature=temperature, top_p=0.9, logprobs=1)
    drawn = sample(logits, [SamplerRow(want, [1], EOS) for _ in range(3)])
    with pytest.raises(ModelError, match="not finite"):
        drawn[1].checked_token()
    alone = sample(logits[[0, 2]], [SamplerRow(want, [1], EOS) for _ in range(2)])
    assert [drawn[0], drawn[2]] == alone
    assert drawn[0].checked_token() == drawn[0].token


def test_ids_outside_the_vocabulary_change_nothing() -> None:
    logits = torch.randn(1, VOCAB)
    want = Sampling(
        temperature=0.0, logit_bias=((VOCAB, 99.0),), stop_token_ids=(VOCAB + 7,), min_tokens=2
    )
    assert sample(logits, [SamplerRow(want, [1], ())])[0].token == int(logits.argmax())


def test_a_flat_distribution_over_a_large_vocabulary_is_cut_right() -> None:
    vocab = 20_000
    row = SamplerRow(Sampling(temperature=1.0, top_p=0.5, seed=1), [0], EOS)
    logits = torch.linspace(0, 1e-3, vocab)[None]
    drawn = {sample(logits, [row])[0].token for _ in range(300) if not row.append(0)}
    assert min(drawn) >= vocab // 2 - 20
    assert max(drawn) > vocab * 0.9


def test_no_rows_draw_nothing() -> None:
    assert sample(torch.empty(0, VOCAB), []) == []

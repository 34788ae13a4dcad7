"""Which heads retrieve: facts and where they stand, attention to them, and errors of layers."""

from pathlib import Path

import pytest
import torch

from triptych.core.errors import ConfigError
from triptych.core.methods.retention.compresskv import HEADS
from triptych.evals.data.vocabulary import Vocabulary
from triptych.evals.methods.masked_attention import MaskedModel, RecordingAttention
from triptych.evals.studies.retrieval_heads import (
    RetrievalStudy,
    attention_to_fact,
    find_retrieval_heads,
    kept_by,
    questions,
    ranked,
)

PLAN = RetrievalStudy(context=220, facts=3, documents=1, steps=4)


def test_facts_are_where_they_are_said_to_be_and_answers_end_the_question(tiny_model: Path) -> None:
    vocabulary = Vocabulary(tiny_model)
    found = questions(vocabulary, PLAN)
    depths = [one.fact.start for one in found]
    assert depths == sorted(depths)
    for one in found:
        assert len(one.case.prompt) == PLAN.context
        fact = vocabulary.decode(one.case.prompt[one.fact.start : one.fact.stop])
        answer = vocabulary.decode(one.case.forced[-one.answer :]).strip()
        assert len(answer) == 5
        assert answer in fact
        assert "The pass key is" in fact or "The magic number for" in fact


def test_attention_to_a_fact_is_that_of_the_queries_before_the_answer(tiny_model: Path) -> None:
    """Next to the attention of the whole sequence at once, head by head."""
    masked = MaskedModel(tiny_model)
    question = questions(Vocabulary(tiny_model), PLAN)[1]
    received, hits = attention_to_fact(masked, question)
    tokens = (*question.case.prompt, *question.case.forced)
    count, whole = len(tokens), RecordingAttention()
    cut = RecordingAttention()
    with torch.inference_mode():
        for end, attend in ((count - 1, whole), (count - 2, cut)):
            positions, last = torch.arange(end), torch.tensor([end - 1])
            masked.model(torch.tensor(tokens[:end]), positions, attend, last)
    fact = slice(question.fact.start, question.fact.stop)
    for layer, (sums, before) in enumerate(zip(whole.sums, cut.sums, strict=True)):
        newest = sums[:, fact].sum(-1) - before[:, fact].sum(-1)
        torch.testing.assert_close(received[layer, :, -1], newest, rtol=1e-3, atol=1e-4)
    assert received.shape[-1] == len(hits) == question.answer


def test_heads_are_ranked_and_a_layer_keeps_the_same_tokens_in_all_heads() -> None:
    heads = ranked(torch.tensor([[0.0, 3.0, 1.0, 2.0, 0.5], [5.0, 0.0, 0.0, 1.0, 0.0]]))
    assert heads == ((1, 3, 2, 4, 0), (0, 3, 1, 2, 4))
    torch.manual_seed(0)
    window = [torch.rand(5, 120) for _ in range(2)]
    window[0][0] *= 1e6  # the fifth of its layer, which does not count
    kept = kept_by(heads, window, 1, share=0.25)
    assert kept.sum(-1).tolist() == [[30], [30]]
    assert kept[..., -8:].all()
    window[0][0] = 0.0
    assert HEADS == 4
    assert torch.equal(kept_by(heads, window, 1, share=0.25), kept)


def test_a_model_that_finds_no_fact_has_no_retrieval_heads(tiny_model: Path) -> None:
    with pytest.raises(ConfigError, match="found none of 3 facts"):
        find_retrieval_heads(tiny_model, PLAN, lambda _name: None)
    long = RetrievalStudy(context=510, steps=8)
    with pytest.raises(ConfigError, match="ask for a shorter context"):
        find_retrieval_heads(tiny_model, long, lambda _name: None)

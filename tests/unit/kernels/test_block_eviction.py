"""Eviction after each block of a prompt, and episodes of a conversation: formulas by hand."""

import torch
from hypothesis import given
from hypothesis import strategies as st

from triptych.kernels.retain import (
    block_scores,
    episode_weights,
    kept_of_block,
    layer_budgets,
    lost_attention,
)
from triptych.kernels.retain.episodes import (
    CHANNELS,
    EPISODE_WEIGHT,
    MOST_TURN_TOKENS,
    clusters,
    turn_embeddings,
    turns_of,
)

INF = float("inf")


def test_scores_are_means_over_query_heads_and_neighbours_times_weights() -> None:
    """Two query heads on one KV head; the first and the two newest of seven tokens are kept."""
    sums = torch.tensor([[9.0, 1.0, 0.0, 0.0, 2.0, 9.0, 9.0], [9.0, 0.0, 0.0, 5.0, 0.0, 9.0, 9.0]])
    # Means over the heads: 9, 0.5, 0, 2.5, 1, 9, 9; then over at most five neighbours.
    expected = [INF, 12 / 4, 13 / 5, 13 / 5, 21.5 / 5, INF, INF]
    even = torch.ones(1, 7)
    torch.testing.assert_close(block_scores(sums, 1, even, 1, 2), torch.tensor([expected]))
    weights = torch.tensor([[1.0, 1.0, 3.0, 1.0, 1.0, 1.0, 1.0]])
    expected[2] *= 3
    found = block_scores(sums, 1, weights, 1, 2)
    torch.testing.assert_close(found, torch.tensor([expected]))
    assert kept_of_block(found, 5).tolist() == [[0, 2, 4, 5, 6]]
    # Of 3 + 7.8 + 2.6 + 4.3 in the middle 3 + 2.6 are dropped.
    assert abs(lost_attention(found, 5) - 5.6 / 17.7) < 1e-6


def test_heads_keep_as_many_tokens_each_of_its_own() -> None:
    scores = torch.tensor([[INF, 1.0, 3.0, 2.0, INF], [INF, 3.0, 1.0, 2.0, INF]])
    assert kept_of_block(scores, 4).tolist() == [[0, 2, 3, 4], [0, 1, 3, 4]]
    assert kept_of_block(scores, 9).tolist() == [[0, 1, 2, 3, 4]] * 2
    assert lost_attention(scores, 5) == 0


def test_nothing_is_lost_where_nobody_attends() -> None:
    assert lost_attention(torch.tensor([[INF, 0.0, 0.0]]), 1) == 0


@given(
    st.lists(st.floats(0, 1), min_size=1, max_size=12),
    st.integers(1, 300),
    st.integers(1, 100),
    st.integers(0, 400),
)
def test_budgets_of_layers_add_up_to_the_mean(
    errors: list[float], kept: int, least: int, more: int
) -> None:
    found = layer_budgets(errors, kept, least, kept + more)
    assert sum(found) == kept * len(errors)
    assert all(min(kept, max(least, kept // 2)) <= one <= kept + more for one in found)


@given(st.lists(st.integers(0, 5), min_size=1, max_size=900))
def test_turns_cover_a_prompt_in_order(tokens: list[int]) -> None:
    turns = turns_of(tokens, {0})
    assert [at for turn in turns for at in turn] == list(range(len(tokens)))
    assert all(0 < len(turn) <= MOST_TURN_TOKENS for turn in turns)


def test_the_opening_of_an_answer_belongs_to_the_question() -> None:
    """Short turns are one with the next, long ones are divided."""
    tokens = [*[1] * 9, 0, *[2] * 60, 0, *[2] * 300, 0, *[3] * 9, 0, 4, 4]
    assert turns_of(tokens, {0}) == [
        range(71),
        range(71, 221),
        range(221, 372),
        range(372, 384),
    ]


def test_tokens_of_few_turns_tell_what_a_turn_is_about() -> None:
    """Token 7 is in all turns and counts for nothing, 9 twice in one of three: 2 log 3."""
    found = turn_embeddings([7, 9, 9, 7, 5, 7, 5], [range(3), range(3, 5), range(5, 7)])
    assert found.shape == (3, CHANNELS)
    assert found[:, 7].tolist() == [0, 0, 0]
    torch.testing.assert_close(found[0, 9], 2 * torch.tensor(3.0).log())
    torch.testing.assert_close(found[1, 5], torch.tensor(1.5).log())
    assert found.count_nonzero() == 3


def test_clusters_are_those_of_the_directions() -> None:
    one, other = torch.tensor([1.0, 0.0, 0.1]), torch.tensor([0.0, 1.0, 0.0])
    vectors = torch.stack([one, 5 * one, other, one + 0.1 * other, 2 * other])
    labels, centres = clusters(vectors, 2)
    assert (labels == labels[0]).tolist() == [True, True, False, True, False]
    assert len(centres) == 2
    torch.testing.assert_close(centres.norm(dim=-1), torch.ones(2))
    assert len(clusters(vectors[:1], 4)[1]) == 1
    assert clusters(torch.ones(3, 2), 2)[0].tolist() == [0, 0, 0]


def test_tokens_of_the_episode_of_the_question_weigh_more() -> None:
    """Turns about two subjects, of two, three, one, two and one tokens; the last asks for one."""
    cat, ship = torch.tensor([1.0, 0.0]), torch.tensor([0.0, 1.0])
    turns = [range(2), range(2, 5), range(5, 6), range(6, 8), range(8, 9)]
    embeddings = torch.stack([cat, ship, ship, cat, 0.9 * cat + 0.2 * ship])
    many = EPISODE_WEIGHT
    assert episode_weights(embeddings, turns).tolist() == [many] * 2 + [1.0] * 4 + [many] * 3
    assert episode_weights(embeddings[:2], turns[:2]).tolist() == [1.0] * 5

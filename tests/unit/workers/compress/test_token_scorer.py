"""The scorer: one call for many requests, and nothing depends on where RoPE began."""

import torch

from triptych.core.layout import Geometry
from triptych.workers.compress.learned.rope_frame import RopeFrame
from triptych.workers.compress.learned.token_scorer import (
    LOG_FLOOR,
    TokenScorer,
    relative_significance,
    score_requests,
)

GEOMETRY = Geometry(layers=2, kv_heads=3, head_dim=8)
FRAME = RopeFrame(torch.tensor([1.0, 0.3, 0.1, 0.03]))
ROWS = GEOMETRY.layers, GEOMETRY.kv_heads


def trained_scorer() -> TokenScorer:
    scorer = TokenScorer(GEOMETRY, FRAME, hidden=8)
    draw = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for part in scorer.parameters():
            part.add_(torch.randn(part.shape, generator=draw) * 0.5)
    return scorer.requires_grad_(False)


def random_cache(tokens: int, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    draw = torch.Generator().manual_seed(seed)
    keys, values = (torch.randn(*ROWS, tokens, 8, generator=draw) for _ in "kv")
    return keys, values


def test_a_batch_gives_what_its_requests_give_one_by_one() -> None:
    scorer = trained_scorer()
    caches = [random_cache(tokens, tokens) for tokens in (7, 0, 1, 40)]
    together = score_requests(scorer, caches)
    for cache, found in zip(caches, together, strict=True):
        (alone,) = score_requests(scorer, [cache])
        assert found.shape == (*ROWS, cache[0].shape[2])
        torch.testing.assert_close(found, alone, rtol=1e-5, atol=1e-6)
        assert (found > 0).all()


def test_layers_are_scored_one_by_one_as_together() -> None:
    scorer = trained_scorer()
    keys, values = random_cache(9)
    (whole,) = score_requests(scorer, [(keys, values)])
    for layer in range(GEOMETRY.layers):
        here = slice(layer, layer + 1)
        (part,) = score_requests(scorer, [(keys[here], values[here])], here)
        torch.testing.assert_close(part, whole[here])


def test_the_scores_of_a_prefix_do_not_depend_on_what_follows() -> None:
    """So blocks of a cached prefix have the same scores in every request."""
    scorer = trained_scorer()
    keys, values = random_cache(30)
    (whole,) = score_requests(scorer, [(keys, values)])
    (prefix,) = score_requests(scorer, [(keys[:, :, :12], values[:, :, :12])])
    torch.testing.assert_close(prefix * 12, whole[:, :, :12] * 30, rtol=1e-5, atol=1e-6)


def test_a_key_counts_by_its_content_and_not_by_its_rotation() -> None:
    """The same token at another place: features differ in the position alone."""
    scorer = trained_scorer()
    key, value = random_cache(1)
    places = torch.tensor([0]), torch.tensor([25])
    turned = [scorer.content(FRAME.rotate(key, at), value, at) for at in places]
    torch.testing.assert_close(turned[0], turned[1], rtol=1e-4, atol=1e-4)
    unturned = scorer.content(key, value, places[1])
    assert not torch.allclose(unturned, turned[0], atol=0.01)


def test_an_untrained_scorer_says_the_same_of_all_tokens() -> None:
    (found,) = score_requests(TokenScorer(GEOMETRY, FRAME, hidden=8), [random_cache(10)])
    torch.testing.assert_close(found, torch.full((*ROWS, 10), 0.1))


def test_relative_significance_is_compared_with_log_alpha() -> None:
    found = relative_significance(torch.tensor([0.5, 0.01, 0.0]), 100)
    torch.testing.assert_close(found[:2].exp(), torch.tensor([50.0, 1.0]))
    assert found[2] == LOG_FLOOR

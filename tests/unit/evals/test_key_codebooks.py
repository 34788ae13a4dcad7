"""Codebooks of keys: a case by hand, and what query-aware errors promise."""

import torch

from triptych.evals.codecs.key_codebooks import CENTROIDS, fit_codebooks


def test_keys_that_are_centroids_have_exact_logits() -> None:
    """Fewer keys than centroids: each key is its own."""
    keys = torch.tensor([[1.0, 0.0], [0.0, 2.0], [3.0, -1.0]])
    for books in (1, 2):
        found = fit_codebooks(keys, torch.tensor([[2.0, 1.0], [1.0, 3.0]]), books)
        queries = torch.tensor([[1.0, 1.0], [-2.0, 0.5]])
        got = found.logits(queries, found.encode(keys))
        torch.testing.assert_close(got, queries @ keys.T, atol=1e-5, rtol=1e-5)


def test_errors_count_where_queries_are_long() -> None:
    """Keys differ in two channels alike, queries read the first: its error is the smaller one."""
    draw = torch.Generator().manual_seed(5)
    keys = torch.randn(4000, 2, generator=draw)
    queries = torch.randn(50, 2, generator=draw) * torch.tensor([10.0, 0.1])
    aware = fit_codebooks(keys, queries.T @ queries, 1)
    plain = fit_codebooks(keys, torch.eye(2), 1)
    errors = [
        float((one.logits(queries, one.encode(keys)) - queries @ keys.T).square().mean())
        for one in (aware, plain)
    ]
    assert errors[0] < errors[1] / 5


def test_more_books_have_smaller_errors() -> None:
    keys, queries = torch.randn(2000, 16), torch.randn(20, 16)
    errors = list[float]()
    for books in (1, 2, 4, 8):
        found = fit_codebooks(keys, torch.eye(16), books)
        codes = found.encode(keys)
        assert codes.shape == (2000, books)
        assert codes.max() < CENTROIDS
        error = (found.logits(queries, codes) - queries @ keys.T).square().mean()
        errors.append(float(error))
    assert errors == sorted(errors, reverse=True)

# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false
# torch leaves Tensor.unique_consecutive and others untyped in part.
"""Episodes of a conversation: turns with similar embeddings, and the one nearest to the question.

A turn is what lies between two end tokens, such as those that a chat template puts behind each
message. Its embedding is the mean of its token embeddings. K-means with cosine distances clusters
the turns before the last one; the last turn with content is the question.
"""

from collections.abc import Collection, Sequence
from itertools import pairwise

import torch
from torch import Tensor
from torch.nn.functional import normalize

LEAST_TURN_TOKENS = 8
"""Shorter pieces belong to the turn after them, and at the end, where a template opens the answer,
to the turn before."""
MOST_TURN_TOKENS = 256
"""A longer turn is divided, so that a text without turns has episodes too."""
MOST_EPISODES = 4
"""Most clusters; fewer if there are few turns."""
ROUNDS = 20
"""Most rounds of k-means."""
EPISODE_WEIGHT = 2.0
"""Weight of the scores of tokens in the episode of the question; those of others have weight 1."""


def turns_of(tokens: Sequence[int], ends: Collection[int]) -> list[range]:
    """The turns of a prompt, which cover it in order.

    ``ends``: tokens that end a turn.

    >>> turns_of([1, 1, 1, 1, 1, 1, 1, 9, 2, 2, 2, 2, 2, 2, 2, 9, 3], {9})
    [range(0, 8), range(8, 17)]
    """
    borders = [at + 1 for at, token in enumerate(tokens) if token in ends]
    found, start = list[range](), 0
    for border in (*borders, len(tokens)):
        if border - start >= LEAST_TURN_TOKENS:
            found += _divided(range(start, border))
            start = border
    if start < len(tokens):
        first = found.pop().start if found else start
        found += _divided(range(first, len(tokens)))
    return found


def _divided(turn: range) -> list[range]:
    """Equal parts of a turn, none longer than ``MOST_TURN_TOKENS``."""
    parts = -(-len(turn) // MOST_TURN_TOKENS)
    edges = [turn.start + len(turn) * part // parts for part in range(parts + 1)]
    return [range(first, end) for first, end in pairwise(edges)]


def clusters(vectors: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """K-means of unit vectors by cosine, from centres that are far apart: no random numbers.

    The first centre is the vector nearest to the mean of all; each further one is the vector that
    is farthest from the centres so far.

    Shapes:  vectors [n, E] -> labels int64 [n]; centres [k, E], k = min(count, n)
    """
    unit = normalize(vectors, dim=-1)
    chosen = [int((unit @ unit.mean(0)).argmax())]
    while len(chosen) < min(count, len(unit)):
        nearest = (unit @ unit[chosen].T).amax(1)
        nearest[chosen] = float("inf")
        chosen.append(int(nearest.argmin()))
    centres = unit[chosen]
    labels = (unit @ centres.T).argmax(1)
    for _ in range(ROUNDS):
        sums = torch.zeros_like(centres).index_add_(0, labels, unit)
        empty = torch.bincount(labels, minlength=len(centres)) == 0
        centres = torch.where(empty[:, None], centres, normalize(sums, dim=-1))
        renewed = (unit @ centres.T).argmax(1)
        if torch.equal(renewed, labels):
            break
        labels = renewed
    return labels, centres


def episode_weights(
    embeddings: Tensor, turns: Sequence[range], weight: float = EPISODE_WEIGHT
) -> Tensor:
    """Weight of each token of a prompt: ``weight`` in the episode nearest to the last turn, and in
    that turn itself; 1 in the others.

    All weights are 1 if fewer than two turns precede the last one.

    Shapes:  embeddings [turns, E], means over the tokens of a turn -> float32 [tokens]
    Source:  EpiCache (episodes by k-means; the centre nearest to the question). The paper keeps a
             cache for each episode and scores by queries of its central turn
    """
    weights = torch.ones(turns[-1].stop, device=embeddings.device)
    if len(turns) < 3:
        return weights
    # Embeddings share a direction; without it turns differ more.
    centred = embeddings - embeddings[:-1].mean(0)
    labels, centres = clusters(centred[:-1], min(MOST_EPISODES, (len(turns) - 1) // 2 + 1))
    nearest = int((centres @ normalize(centred[-1], dim=-1)).argmax())
    chosen = [turns[at] for at in (labels == nearest).nonzero().flatten().tolist()]
    for turn in (*chosen, turns[-1]):
        weights[turn.start : turn.stop] = weight
    return weights

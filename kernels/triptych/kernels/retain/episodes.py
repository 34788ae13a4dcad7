# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false
# torch leaves Tensor.index_put_ and others untyped in part.
"""Episodes of a conversation: turns about similar things, and the one nearest to the question.

A turn is what lies between two end tokens, such as those that a chat template puts behind each
message; short ones are one with the next. Its embedding has the numbers of its tokens, weighted by
how few turns have them, so that words of the template count for nothing. K-means with cosine
distances clusters the turns before the last one; the last turn is the question.
"""

import math
from collections import Counter
from collections.abc import Collection, Sequence
from itertools import pairwise

import torch
from torch import Tensor
from torch.nn.functional import normalize

LEAST_QUESTION_TOKENS = 8
"""A shorter piece belongs to the one after it, and at the end, where a template opens the answer,
to the one before."""
LEAST_TURN_TOKENS = 64
"""Shorter turns before the question are one turn with the next, so a message and its answer are."""
MOST_TURN_TOKENS = 256
"""A longer turn is divided, so that a text without turns has episodes too."""
MOST_EPISODES = 6
"""Most clusters; fewer if there are few turns."""
ROUNDS = 20
"""Most rounds of k-means."""
CHANNELS = 4096
"""Numbers of an embedding; tokens whose ids are equal modulo this share one."""
EPISODE_WEIGHT = 32.0
"""Weight of the scores of tokens in the episode of the question; those of others have weight 1."""


def turns_of(tokens: Sequence[int], ends: Collection[int]) -> list[range]:
    """The turns of a prompt, which cover it in order; the last one is the question.

    ``ends``: tokens that end a turn.

    >>> turns_of([*[1] * 70, 9, *[2] * 7, 9, 3], {9})
    [range(0, 71), range(71, 80)]
    """
    borders = [at + 1 for at, token in enumerate(tokens) if token in ends]
    pieces, start = list[range](), 0
    for border in (*borders, len(tokens)):
        if border - start >= LEAST_QUESTION_TOKENS:
            pieces.append(range(start, border))
            start = border
    if start < len(tokens) or not pieces:
        first = pieces.pop().start if pieces else start
        pieces.append(range(first, len(tokens)))
    found, start, question = list[range](), 0, pieces.pop()
    for piece in pieces:
        if piece.stop - start >= LEAST_TURN_TOKENS or piece.stop == question.start:
            found += _divided(range(start, piece.stop))
            start = piece.stop
    return [*found, *_divided(question)]


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


def turn_embeddings(tokens: Sequence[int], turns: Sequence[range]) -> Tensor:
    """Term frequency times inverse document frequency of the tokens of each turn.

    Shapes:  -> [turns, CHANNELS] float32
    Source:  Sparck Jones, 1972 (inverse document frequency); hashed channels. EpiCache embeds
             windows of utterances with a sentence encoder
    """
    counts = [Counter(tokens[turn.start : turn.stop]) for turn in turns]
    turns_with = Counter(token for counted in counts for token in counted)
    found = torch.zeros(len(turns), CHANNELS)
    for row, counted in zip(found, counts, strict=True):
        ids = torch.tensor(list(counted))
        worth = [many * math.log(len(turns) / turns_with[one]) for one, many in counted.items()]
        row.index_add_(0, ids % CHANNELS, torch.tensor(worth))
    return found


def episode_weights(
    embeddings: Tensor, turns: Sequence[range], weight: float = EPISODE_WEIGHT
) -> Tensor:
    """Weight of each token of a prompt: ``weight`` in the episode nearest to the last turn, and in
    that turn itself; 1 in the others.

    All weights are 1 if fewer than two turns precede the last one.

    Shapes:  embeddings [turns, E] -> float32 [tokens]
    Source:  EpiCache (episodes by k-means; the centre nearest to the question). The paper keeps a
             cache for each episode and scores by queries of its central turn
    """
    weights = torch.ones(turns[-1].stop, device=embeddings.device)
    if len(turns) < 3:
        return weights
    most = min(MOST_EPISODES, (len(turns) - 1) // 2 + 1)
    labels, centres = clusters(embeddings[:-1], most)
    nearest = int((centres @ normalize(embeddings[-1], dim=-1)).argmax())
    chosen = [turns[at] for at in (labels == nearest).nonzero().flatten().tolist()]
    for turn in (*chosen, turns[-1]):
        weights[turn.start : turn.stop] = weight
    return weights

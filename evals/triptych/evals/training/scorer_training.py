# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportUnknownArgumentType=false
# torch leaves Tensor.std, flatten and others untyped in part.
"""Trains the learned scorer to predict significance."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor

from triptych.evals.training.captures import Capture, Captures, order_of, read_capture
from triptych.workers.compress.learned.chunk_plan import SINK_TOKENS
from triptych.workers.compress.learned.token_scorer import TokenScorer, relative_significance

SAMPLED_TOKENS = 1024
"""Tokens of a document that a step looks at."""
KEPT_SHARE = 0.25
"""Share of the tokens whose attention the report compares."""

Target = Literal["later", "prompt"]
"""What is predicted: attention from the tokens behind a context, or from the context itself."""
Loss = Literal["deviance", "logarithm"]
"""``deviance``: Poisson's of attention, smallest for the mean attention of tokens with the same
features; ``logarithm``: the squared error of its logarithm, smallest for the mean logarithm."""
FIRST_TOKEN: dict[Loss, int] = {"deviance": SINK_TOKENS, "logarithm": 0}
"""First token of a document that a loss counts."""


@dataclass(frozen=True)
class ScorerObjective:
    """How far predicted attention is from a target, for each layer.

    What a class of lower precision costs grows with the attention on its tokens. So the deviance
    weights an error of the logarithm by the attention itself, and the squared error counts all
    tokens alike. The deviance leaves out the first tokens: they have most of the attention, and no
    method classifies them.

    Attention sums measure what a prompt's own tokens attend to, and stand for what the tokens
    behind it will attend to. Training can have the latter as its target: attention from the second
    half of a document to its first. A step has one document at one of its lengths, so that scores
    of short prompts are learned too.

    Source: ours; DiffKV's significance is the target ``prompt``
    """

    network: TokenScorer
    captures: Captures
    target: Target = "later"
    error: Loss = "logarithm"
    seed: int = 0

    def loss(self, step: int) -> Tensor:
        """Shapes: -> [L]"""
        capture = read_capture(order_of(self.captures.files, step, self.seed))
        lengths = lengths_of(capture, self.target)
        # Long prompts twice as often as short ones: they are what compression is for.
        draw = torch.Generator().manual_seed(self.seed * 1_000_003 + step)
        weights = torch.tensor([2.0**index for index in range(len(lengths))])
        length = lengths[int(torch.multinomial(weights, 1, generator=draw))]
        tokens = torch.randperm(length, generator=draw)[:SAMPLED_TOKENS].sort().values
        tokens = tokens[tokens >= FIRST_TOKEN[self.error]]
        return self._error(capture, length, tokens).mean((1, 2))

    @torch.no_grad()
    def held_out_loss(self) -> float:
        errors = [
            self._error(capture, length, torch.arange(FIRST_TOKEN[self.error], length)).mean()
            for capture in map(read_capture, self.captures.held_out)
            for length in lengths_of(capture, self.target)
        ]
        return float(torch.stack(errors).mean())

    def _error(self, capture: Capture, length: int, tokens: Tensor) -> Tensor:
        """Error of each token: [L, KH, n]"""
        keys, values = (part[:, :, tokens].float() for part in (capture.keys, capture.values))
        target = target_of(capture, length, self.target)[:, :, tokens]
        found = self.network(keys, values, tokens)
        if self.error == "logarithm":
            return (found - relative_significance(target, length)).square()
        return poisson_deviance(found, target * length)


def poisson_deviance(log_rate: Tensor, count: Tensor) -> Tensor:
    """Half the deviance of counts from predicted rates; 0 where they are equal, otherwise above.

    Shapes:  any, the same for both -> the same
    Source:  Gneiting 2011: the Bregman losses, of which this is one, are those whose best
             prediction is the mean
    """
    return log_rate.exp() - count + torch.xlogy(count, count) - count * log_rate


def lengths_of(capture: Capture, target: Target) -> list[int]:
    """Lengths of a document at which its target is known, ascending."""
    lengths = sorted(capture.significance)
    return lengths[:-1] if target == "later" else lengths


def target_of(capture: Capture, length: int, target: Target) -> Tensor:
    """Mean attention that the first tokens receive: [L, KH, length]"""
    return capture.attention_after(length) if target == "later" else capture.significance[length]


@torch.inference_mode()
def standardize_scorer(
    scorer: TokenScorer, files: Sequence[Path], target: Target, error: Loss
) -> None:
    """Set mean and deviation of the features from captures, and the bias to the best constant."""
    count, total, squares, means = 0, torch.zeros(()), torch.zeros(()), torch.zeros(())
    for capture in map(read_capture, files):
        length = lengths_of(capture, target)[-1]
        keys, values = (part[:, :, :length].float() for part in (capture.keys, capture.values))
        content = scorer.content(keys, values, torch.arange(length)).double()
        count, total = count + length, total + content.sum(1)
        squares = squares + content.square().sum(1)
        wanted = target_of(capture, length, target)[:, :, FIRST_TOKEN[error] :]
        part = relative_significance(wanted, length) if error == "logarithm" else wanted * length
        means = means + part.mean(2) / len(files)
    mean = total / count
    deviation = (squares / count - mean.square()).clamp_min(0).sqrt()
    scorer.standardize(mean.float(), deviation.float())
    scorer.output_bias.copy_((means if error == "logarithm" else means.log())[:, None])


@dataclass(frozen=True)
class ScorerReport:
    """How well a scorer finds the tokens that later tokens attend to, on held-out documents.

    The first half of a document is the prompt; attention is that from its second half.
    """

    correlation: float
    """Mean over head rows of the rank correlation of scores and attention."""
    correlation_of_sums: float
    """The same for the prompt's own attention sums."""
    attention_kept: float
    """Attention on the best quarter of tokens by score, over that on the best by attention."""
    attention_kept_by_sums: float
    """The same for the prompt's own attention sums."""


@torch.inference_mode()
def report_scorer(scorer: TokenScorer, files: Sequence[Path]) -> ScorerReport:
    """Compare scores, and the attention sums that they replace, with later attention."""
    rows = [_compare(scorer, read_capture(file)) for file in files]
    return ScorerReport(*torch.tensor(rows, dtype=torch.float64).mean(0).tolist())


def _compare(scorer: TokenScorer, capture: Capture) -> tuple[float, float, float, float]:
    length = capture.context // 2
    keys, values = (part[:, :, :length].float() for part in (capture.keys, capture.values))
    scores, sums = scorer(keys, values, torch.arange(length)), capture.significance[length]
    later = capture.attention_after(length)
    return (
        _rank_correlation(scores, later),
        _rank_correlation(sums, later),
        _share_kept(scores, later),
        _share_kept(sums, later),
    )


def _share_kept(scores: Tensor, attention: Tensor) -> float:
    count = max(1, round(KEPT_SHARE * scores.shape[-1]))
    found, best = (
        attention.gather(-1, part.topk(count, -1).indices).sum(-1) for part in (scores, attention)
    )
    return float((found / best.clamp_min(1e-12)).mean())


def _rank_correlation(one: Tensor, other: Tensor) -> float:
    ranks = [part.argsort(-1).argsort(-1).double() for part in (one, other)]
    one, other = (part - part.mean(-1, keepdim=True) for part in ranks)
    products = (one * other).sum(-1) / (one.norm(dim=-1) * other.norm(dim=-1)).clamp_min(1e-12)
    return float(products.mean())

# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportUnknownArgumentType=false
# torch leaves Tensor.var and others untyped in part.
"""Trains mergers: by attention outputs, or by reconstruction of masked tokens."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn

from triptych.core.layout import Geometry
from triptych.evals.training.captures import Captures, order_of, read_capture
from triptych.evals.training.output_matching import (
    chunk_plan_of,
    context_of,
    matching_loss,
    merge_capture,
    output_error,
)
from triptych.workers.compress.learned.chunk_merger import (
    Chunks,
    GatedMerger,
    MeanMerger,
    Merged,
    Merger,
    PaperMerger,
)
from triptych.workers.compress.learned.merge_requests import gather_chunks
from triptych.workers.compress.learned.rope_frame import RopeFrame

MASKED_SHARE = 0.3
"""Share of the tokens of a chunk that reconstruction hides."""

TrainedMerger = GatedMerger | PaperMerger


@dataclass(frozen=True)
class MatchingObjective:
    """Attention outputs of later queries over merged contexts match those over full ones.

    The phase of the chunks differs from step to step, so that it is not learned.

    Source: ours; FastCache reconstructs the cache or compares logits
    """

    network: TrainedMerger
    frame: RopeFrame
    captures: Captures
    seed: int = 0
    batch: int = 1
    """Samples of a step."""

    def loss(self, step: int) -> Tensor:
        """Shapes: -> [L]"""
        offset = phase_of(step, self.seed, self.network.chunk_tokens)
        steps = range(step * self.batch, (step + 1) * self.batch)
        files = [order_of(self.captures.files, one, self.seed) for one in steps]
        losses = [
            matching_loss(merge_capture(self.network, self.frame, one, offset), one)
            for one in map(read_capture, files)
        ]
        return torch.stack(losses).mean(0)

    @torch.no_grad()
    def held_out_loss(self) -> float:
        losses = [
            matching_loss(merge_capture(self.network, self.frame, one), one).mean()
            for one in map(read_capture, self.captures.held_out)
        ]
        return float(torch.stack(losses).mean())


def phase_of(step: int, seed: int, chunk_tokens: int) -> int:
    """Offset of the chunks in a step."""
    draw = torch.Generator().manual_seed(seed * 1_000_003 + step)
    return int(torch.randint(chunk_tokens, (1,), generator=draw))


# ------------------------------------------------------------------ masked reconstruction


class _Decoder(nn.Module):
    """Maps a merged token back to the k tokens of its chunk, standardized."""

    def __init__(self, geometry: Geometry, chunk_tokens: int, hidden: int = 64) -> None:
        super().__init__()
        layers, width = geometry.layers, 2 * geometry.head_dim
        draw = torch.Generator().manual_seed(1)
        self.input_weight = nn.Parameter(torch.randn(layers, width, hidden, generator=draw))
        self.input_weight.data /= width**0.5
        self.input_bias = nn.Parameter(torch.zeros(layers, 1, hidden))
        self.output_weight = nn.Parameter(torch.zeros(layers, hidden, chunk_tokens * width))
        self.output_bias = nn.Parameter(torch.zeros(layers, 1, chunk_tokens * width))

    def forward(self, tokens: Tensor) -> Tensor:
        """Shapes: [L, n, 2d] -> [L, n, 2kd]"""
        hidden = torch.baddbmm(self.input_bias, tokens, self.input_weight)
        return torch.baddbmm(self.output_bias, nn.functional.gelu(hidden), self.output_weight)


class MaskedAutoencoder(nn.Module):
    """A merger, and a decoder that is thrown away after pre-training."""

    def __init__(self, merger: TrainedMerger) -> None:
        super().__init__()
        self.merger = merger
        self.decoder = _Decoder(merger.geometry, merger.chunk_tokens)

    def forward(self, chunks: Chunks, hidden: Tensor) -> Tensor:
        """Mean squared error of the hidden tokens in units of their deviation.

        Shapes:  hidden [L, KH, C, k] bool -> [L]
        """
        mean, deviation = self.merger.mean, self.merger.deviation
        least = chunks.log_significance.amin(-1, keepdim=True)
        masked = Chunks(
            keys=torch.where(hidden[..., None], mean[:, :, :, 0], chunks.keys),
            values=torch.where(hidden[..., None], mean[:, :, :, 1], chunks.values),
            log_significance=torch.where(hidden, least, chunks.log_significance),
        )
        found: Merged = self.merger(masked)
        token = torch.stack((found.keys, found.values), 3)  # [L, KH, C, 2, d]
        token = ((token - mean.mean(4)) / deviation.mean(4)).flatten(3)
        decoded = self.decoder(token.flatten(1, 2)).view(*hidden.shape[:3], 2, -1, mean.shape[-1])
        content = torch.stack((chunks.keys, chunks.values), 3)
        wrong = (decoded - (content - mean) / deviation).square().mean((3, 5))  # [L, KH, C, k]
        return (wrong * hidden).sum((1, 2, 3)) / hidden.sum((1, 2, 3)).clamp_min(1)


@dataclass(frozen=True)
class ReconstructionObjective:
    """Hidden tokens of a chunk are reconstructed from its merged token.

    Source: FastCache, section 3.2 (masked prediction), on standardized channels. Error of
            reconstruction is not error of attention: for pre-training only
    """

    network: MaskedAutoencoder
    frame: RopeFrame
    captures: Captures
    seed: int = 0

    def loss(self, step: int) -> Tensor:
        """Shapes: -> [L]"""
        return self._loss(order_of(self.captures.files, step, self.seed), step)

    @torch.no_grad()
    def held_out_loss(self) -> float:
        files = self.captures.held_out
        losses = [self._loss(file, index).mean() for index, file in enumerate(files)]
        return float(torch.stack(losses).mean())

    def _loss(self, file: Path, step: int) -> Tensor:
        merger = self.network.merger
        offset = phase_of(step, self.seed, merger.chunk_tokens)
        chunks = _chunks_of(file, self.frame, merger.chunk_tokens, offset)
        draw = torch.Generator().manual_seed(self.seed * 1_000_003 + step)
        hidden = torch.rand(chunks.log_significance.shape, generator=draw) < MASKED_SHARE
        return self.network(chunks, hidden)


def _chunks_of(file: Path, frame: RopeFrame, chunk_tokens: int, offset: int = 0) -> Chunks:
    capture = read_capture(file)
    plan = chunk_plan_of(capture, chunk_tokens, offset)
    starts = torch.tensor([start for some in plan.chunks.values() for start in some])
    return gather_chunks(context_of(capture), frame, starts, chunk_tokens)


# ------------------------------------------------------------------ before and after


@torch.inference_mode()
def standardize_merger(merger: TrainedMerger, frame: RopeFrame, files: Sequence[Path]) -> None:
    """Set mean and deviation of keys and values of each slot of a chunk, from captures."""
    count, total, squares = 0, torch.zeros(()), torch.zeros(())
    for file in files:
        chunks = _chunks_of(file, frame, merger.chunk_tokens)
        content = torch.stack((chunks.keys, chunks.values), 3).double()
        count, total = count + content.shape[2], total + content.sum(2)
        squares = squares + content.square().sum(2)
    mean = total / count
    deviation = (squares / count - mean.square()).clamp_min(0).sqrt()
    merger.standardize(mean.float(), deviation.float())


@dataclass(frozen=True)
class MergerReport:
    """Attention-output error of a merger on held-out documents, mean over layers."""

    error: float
    """Squared error of outputs over their square."""
    mean_pooling_error: float
    """The same for the mean of each chunk, with bias log k."""
    lse_error: float
    """Squared error of the log-sum-exp."""


@torch.inference_mode()
def report_merger(merger: Merger, frame: RopeFrame, files: Sequence[Path]) -> MergerReport:
    """Compare a merger with mean pooling on documents that it was not trained on."""
    rows = list[list[Tensor]]()
    mean = MeanMerger(merger.chunk_tokens)
    for capture in map(read_capture, files):
        error, lse = output_error(merge_capture(merger, frame, capture), capture)
        pooled, _ = output_error(merge_capture(mean, frame, capture), capture)
        rows.append([error.mean(), pooled.mean(), lse.mean()])
    error, pooled, lse = torch.tensor(rows).mean(0).tolist()
    return MergerReport(error, pooled, lse)

# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportUnknownArgumentType=false
# torch leaves Tensor.sort and others untyped in part.
"""Distillation: the model with a merged context imitates the model with the full one.

Gradients pass through all layers of the frozen model, so a step takes seconds. It is a polish after
attention outputs match.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from triptych.evals.methods.replaced_cache import ReplacedAttention, ReplacedCache
from triptych.evals.training.captures import Capture, Captures, order_of, read_capture
from triptych.evals.training.merger_training import TrainedMerger, phase_of
from triptych.evals.training.output_matching import context_of, merge_capture
from triptych.workers.compress.learned.rope_frame import RopeFrame
from triptych.workers.models.hf_model import HFModel

TOP_P = 0.9
"""The teacher's most likely tokens, up to this probability, are what cross-entropy compares."""


@dataclass(frozen=True)
class DistillationObjective:
    """Logits and attention outputs of student and teacher on the continuation of a document.

    Source: FastCache's code: 0.5 (0.5 CE + 0.3 JS + 0.2 difference of logits) + 0.5
            (0.5 (MSE + 1 - cosine)) of hidden states. Ours compares attention outputs in place of
            hidden states, relative to their size
    """

    network: TrainedMerger
    frame: RopeFrame
    captures: Captures
    model: HFModel
    seed: int = 0

    def loss(self, step: int) -> Tensor:
        """Shapes: -> []"""
        file = order_of(self.captures.files, step, self.seed)
        offset = phase_of(step, self.seed, self.network.chunk_tokens)
        return self._loss(read_capture(file), self.captures.files.index(file), offset)

    @torch.no_grad()
    def held_out_loss(self) -> float:
        first = len(self.captures.files)
        losses = [
            self._loss(read_capture(file), first + index, 0)
            for index, file in enumerate(self.captures.held_out)
        ]
        return float(torch.stack(losses).mean())

    def _loss(self, capture: Capture, index: int, offset: int) -> Tensor:
        cache = context_of(capture)
        full = ReplacedCache(cache.keys, cache.values, torch.zeros(cache.keys.shape[:3]))
        with torch.no_grad():
            teacher, targets = self._run(full, capture, index)
        merged = merge_capture(self.network, self.frame, capture, offset)
        student, outputs = self._run(merged, capture, index)
        return 0.5 * logit_loss(student, teacher) + 0.5 * _output_loss(outputs, targets)

    def _run(
        self, replaced: ReplacedCache, capture: Capture, index: int
    ) -> tuple[Tensor, list[Tensor]]:
        attention = ReplacedAttention(replaced)
        tokens = torch.tensor(self.captures.continuations[index])
        positions = torch.arange(len(tokens)) + capture.context
        logits = self.model(tokens, positions, attention, torch.arange(len(tokens)))
        return logits, attention.outputs


def logit_loss(student: Tensor, teacher: Tensor) -> Tensor:
    """0.5 CE + 0.3 JS + 0.2 mean difference of logits. Shapes: [M, vocab] twice -> []"""
    p, log_q = teacher.softmax(-1), student.log_softmax(-1)
    top = _nucleus(p)
    cross = -(top * log_q).sum(-1).mean()
    middle = ((p + log_q.exp()) / 2).clamp_min(1e-30).log()
    divergence = (
        F.kl_div(middle, p, reduction="batchmean")
        + F.kl_div(middle, log_q, reduction="batchmean", log_target=True)
    ) / 2
    return 0.5 * cross + 0.3 * divergence + 0.2 * (student - teacher).abs().mean()


def _nucleus(probabilities: Tensor) -> Tensor:
    """The most likely tokens up to ``TOP_P``, normalized. Shapes: [M, vocab] -> [M, vocab]"""
    ordered, at = probabilities.sort(-1, descending=True)
    kept = torch.where(ordered.cumsum(-1) - ordered < TOP_P, ordered, 0.0)
    kept = kept / kept.sum(-1, keepdim=True)
    return torch.zeros_like(kept).scatter_(-1, at, kept)


def _output_loss(outputs: list[Tensor], targets: list[Tensor]) -> Tensor:
    parts = [
        (F.mse_loss(ours, theirs) / theirs.square().mean())
        + (1 - F.cosine_similarity(ours.flatten(1), theirs.flatten(1), -1)).mean()
        for ours, theirs in zip(outputs, targets, strict=True)
    ]
    return torch.stack(parts).mean() / 2

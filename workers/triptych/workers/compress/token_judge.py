"""Scores and thresholds by which tokens of a prompt become high, low or dropped."""

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from triptych.core.layout import PageLayout
from triptych.core.policy import Policy
from triptych.kernels import mass_limits, significance_of
from triptych.kernels.pages import segments
from triptych.workers.compress.job import Job, LayerGroup
from triptych.workers.compress.retention import retained
from triptych.workers.kv.device_pages import DevicePages

Ids = NDArray[np.int32]
Judgement = tuple[Tensor, Tensor, Tensor]
"""Scores of tokens [head rows, tokens]; the least of a high token, and of a low one [head rows]."""


@dataclass(frozen=True)
class TokenJudge:
    """Applies policies to the raw pages of prompts."""

    memory: DevicePages
    raw: PageLayout

    def judge(self, job: Job, group: LayerGroup, own: Ids, rounded: int = 0) -> Judgement:
        """How the policy of a request judges its tokens at ``own``.

        ``rounded``: first tokens, on which no threshold depends. With a policy for images each
        modality is judged by its own; then scores are classes: 0 dropped, 1 low, 2 high.
        """
        text, images = job.plan.policy, job.plan.policy.images
        if images is None:
            every = np.arange(job.tokens, dtype=np.int32)
            return self._by_policy(text, job, group, every, own, rounded)
        is_image, put = job.is_image, self.memory.device.put
        found = list[Tensor]()
        for policy, mask in ((text, ~is_image), (images, is_image)):
            concerned = np.flatnonzero(mask).astype(np.int32)
            scores, high, low = self._by_policy(policy, job, group, concerned, own)
            classes = (scores >= high[:, None]).float() + (scores >= low[:, None])
            classes[:, put(own >= job.tokens - policy.high_window_tokens)] = 2.0
            found.append(classes)
        scores = torch.where(put(is_image[own]), found[1], found[0])
        between = scores.new_full((len(group.raw),), 0.5)
        return scores, between + 1, between

    def significance(self, raw: Ids, tokens: int) -> Tensor:
        """Mean attention of each token from itself and all later ones, [head rows, tokens].

        Prefill left each KV head's sums in the score segment of the raw pages.
        """
        scores = segments(self.memory.near, self.raw).scores
        kept = scores[self.memory.device.put(raw).long()]
        return significance_of(kept.flatten(1), tokens, len(raw))

    def _by_policy(
        self,
        policy: Policy,
        job: Job,
        group: LayerGroup,
        concerned: Ids,
        own: Ids,
        rounded: int = 0,
    ) -> Judgement:
        """How one policy judges them; ``concerned``: positions of the tokens of its modality."""
        rows, at = len(group.raw), self.memory.device.put(own).long()
        if policy.retention is not None:
            classes = retained(
                self.memory,
                job.plan,
                policy.retention,
                group.raw,
                job.tokens,
                job.rows_before(group),
                concerned,
                np.intersect1d(own, concerned),
            )
            half = torch.full((rows,), 0.5, device=classes.device)
            return classes[:, at].float(), half + 1, half
        if policy.classifies_tokens:
            significance = self.significance(group.raw, job.tokens)
            first, end = group.leaving.start, group.leaving.stop
            judged = slice(max(0, first - rounded), max(0, end - rounded))
            own_scales = slice(job.rows_before(group), job.rows_before(group) + rows)
            scales = policy.alpha_scales[own_scales]
            high, low = _limits(policy, significance[:, rounded:], judged, job.tokens, scales)
            return significance[:, at], high, low
        is_low = policy.high_format != job.plan.policy.high_format
        none = torch.zeros(rows, own.size, device=at.device)
        return none, none.new_full((rows,), float(is_low)), none.new_zeros(rows)


def _limits(
    policy: Policy, scores: Tensor, leaving: slice, tokens: int, scales: tuple[float, ...]
) -> tuple[Tensor, Tensor]:
    """Significance thresholds of the high and the low class: [head rows] each."""
    if policy.mass_high > 0:
        total, leave = scores.sum(1), scores[:, leaving]
        high = mass_limits(leave, total, policy.mass_high)
        return high, mass_limits(leave, total, policy.mass_low)
    alphas = policy.alpha_high, policy.alpha_low
    each = np.array(scales or (1.0,) * len(scores))
    high, low = (np.minimum(1.0, alpha * each / tokens) for alpha in alphas)
    return scores.new_tensor(high), scores.new_tensor(low)

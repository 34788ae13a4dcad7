# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportUnknownArgumentType=false
# torch leaves Tensor.unflatten and others untyped in part.
"""Captures: keys, values, significance and later queries of samples, for training.

The model runs once over each sample. A capture is a file, so memory holds one sample at a time,
and training that was stopped does not run the model again.
"""

import hashlib
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import torch
from safetensors.torch import load as parse_tensors
from safetensors.torch import save as format_tensors
from torch import Tensor

from triptych.core.config import require
from triptych.core.errors import ConfigError
from triptych.core.images import IMAGE, Segment
from triptych.evals.methods.masked_attention import (
    BLOCK_QUERIES,
    by_kv_head,
    causal_weights,
    check_plain,
    ungrouped,
)
from triptych.evals.training.samples import Sample, Samples
from triptych.kernels.prefill import significance_of
from triptych.workers.models.attention_interface import Attend, LayerTraits
from triptych.workers.models.facts import ModelFacts
from triptych.workers.models.load import LoadedModel, load
from triptych.workers.models.store.tensor_headers import MAX_HEADER_BYTES
from triptych.workers.models.vision.feature_rows import FeatureRows
from triptych.workers.models.vision.vision_tower import VisionTower

CAPTURE = "triptych_capture"
"""Key of the metadata that says what a file captures."""
SHORTER = (8, 4, 2, 1)
"""Significance is recorded for the first 1/8, 1/4, 1/2 of a context as well: shorter prompts."""

Done = Callable[[], None]
"""Called after each sample."""


@dataclass(frozen=True, kw_only=True)
class CapturePlan:
    """The samples that networks are trained on, and those that stop the training."""

    context: int = 1024
    """Tokens of a document that are compressed; chats say themselves."""
    continuation: int = 128
    """Tokens after them, whose queries are captured; 0: none."""
    documents: int = 24
    """Documents or chats to train on."""
    held_out: int = 6
    """Further ones, for early stopping and the report."""

    def __post_init__(self) -> None:
        require(self.context >= max(SHORTER), "context", self.context, f">= {max(SHORTER)}")
        require(self.continuation >= 0, "continuation", self.continuation, ">= 0")
        require(self.documents >= 1, "documents", self.documents, ">= 1")
        require(self.held_out >= 1, "held_out", self.held_out, ">= 1")


@dataclass(frozen=True)
class Capture:
    """A sample after prefill: N tokens of context and M tokens after them.

    L layers, H query heads, KH KV heads. Keys are after RoPE, neither rotated nor centred. All but
    significance and log-sum-exp is float16.
    """

    keys: Tensor
    """[L, KH, N + M, d]"""
    values: Tensor
    """[L, KH, N + M, d]"""
    significance: dict[int, Tensor]
    """For the first n tokens alone: [L, KH, n] float32; the largest n is N."""
    queries: Tensor
    """[L, H, M, d], scaled."""
    outputs: Tensor
    """Attention outputs of the queries: [L, H, M, d]."""
    lse: Tensor
    """Log-sum-exp of their logits: [L, H, M] float32."""
    image_places: Tensor
    """First place of each image in the context, and the place behind its last one: [n, 2] int64."""

    @property
    def images(self) -> list[Segment]:
        """Parts of the context that are no text."""
        return [Segment(IMAGE, start, end) for start, end in self.image_places.tolist()]

    @property
    def context(self) -> int:
        return max(self.significance)

    def attention_after(self, tokens: int) -> Tensor:
        """Mean attention of the first tokens from as many queries behind them.

        What significance of a prompt estimates: how much later tokens attend to it. Approximate:
        the head of a group with the largest sum may be another one before and after.

        Shapes:  -> [L, KH, tokens] float32
        """
        seen_by = torch.arange(2 * tokens, tokens, -1)
        until, before = self.significance[2 * tokens], self.significance[tokens]
        sums = until[..., :tokens] * seen_by - before * (seen_by - tokens)
        return sums.clamp_min(0) / tokens


@dataclass(frozen=True)
class Captures:
    """Files of captures: samples to train on, then those that are held out."""

    files: tuple[Path, ...]
    held_out: tuple[Path, ...]
    continuations: tuple[tuple[int, ...], ...]
    """Tokens after the context of each, in the order of the files."""
    source: str
    """Hash of the texts or chats."""


class CaptureAttention(Attend):
    """Dense causal attention that records what a capture holds."""

    def __init__(self, context: int) -> None:
        self._context = context
        self.tensors: dict[str, list[Tensor]] = {}

    def __call__(
        self,
        layer: int,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        traits: LayerTraits,
        sinks: Tensor | None = None,
    ) -> Tensor:
        """Raises: ModelError for sliding windows or softcaps"""
        check_plain(layer, traits, sinks)
        context, tokens = self._context, len(query)
        grouped = by_kv_head(query, key.shape[1]) * traits.scale
        keys, values = key.transpose(0, 1), value.transpose(0, 1)
        sums = torch.zeros(*grouped.shape[:2], tokens)
        out = torch.empty_like(grouped)
        lengths = [context // share for share in SHORTER]
        edges = sorted({*range(0, tokens, BLOCK_QUERIES), *lengths, tokens})
        for start, end in pairwise(edges):
            weights = causal_weights(grouped[:, :, start:end], keys[:, :end], start)
            sums[..., :end] += weights.sum(2)
            out[:, :, start:end] = weights @ values[:, None, :end]
            if end in lengths:
                found = significance_of(sums.flatten(0, 1), end, key.shape[1])
                self._record(f"significance.{end}", found)
        later = grouped[:, :, context:]
        self._record("keys", keys.half())
        self._record("values", values.half())
        self._record("queries", later.flatten(0, 1).half())
        self._record("outputs", out[:, :, context:].flatten(0, 1).half())
        self._record("lse", _log_sum_exp(later, keys, context).flatten(0, 1))
        return ungrouped(out)

    def _record(self, name: str, tensor: Tensor) -> None:
        self.tensors.setdefault(name, []).append(tensor)


def _log_sum_exp(query: Tensor, keys: Tensor, first: int) -> Tensor:
    """[KH, G, M, d] at ``first`` and on -> [KH, G, M]"""
    logits = query @ keys[:, None].mT
    ahead = torch.arange(keys.shape[1]) > torch.arange(first, first + query.shape[2])[:, None]
    return logits.masked_fill_(ahead, float("-inf")).logsumexp(-1)


def capture_samples(
    path: Path, facts: ModelFacts, plan: CapturePlan, samples: Samples, folder: Path, done: Done
) -> Captures:
    """Run the model over samples; files of an earlier run with the same ones are kept.

    Raises: ConfigError if the model's context is too short; ModelError for a model with sliding
            windows or softcaps
    """
    size = max(len(one.tokens) for one in samples.every)
    if size > facts.context_tokens:
        raise ConfigError(
            f"{size} tokens: the model's context is {facts.context_tokens}; "
            "ask for a shorter context"
        )
    folder.mkdir(parents=True, exist_ok=True)
    files = [folder / f"{index:04}.safetensors" for index in range(len(samples.every))]
    loaded: LoadedModel | None = None
    tower: VisionTower | None = None
    for sample, file in zip(samples.every, files, strict=True):
        name = _name(sample, facts)
        if not _is_capture(file, name):
            loaded = loaded or load(path, "float32", quantization="none")
            given: FeatureRows | None = None
            if sample.images:
                tower = tower or VisionTower.read(path, "float32", torch.device("cpu"))
                given = _features(sample, tower)
            tensors, _ = _run(loaded, sample, given)
            _write(file, tensors, name)
        done()
    return Captures(
        tuple(files[: plan.documents]),
        tuple(files[plan.documents :]),
        tuple(one.continuation for one in samples.every),
        samples.source,
    )


def read_capture(path: Path) -> Capture:
    """Read one sample into memory. Raises: OSError if the file is gone"""
    return _as_capture(parse_tensors(path.read_bytes()))


def _as_capture(tensors: dict[str, Tensor]) -> Capture:
    kept = dict(tensors)
    prefix = "significance."
    significance = {
        int(name.removeprefix(prefix)): kept.pop(name)
        for name in sorted(kept)
        if name.startswith(prefix)
    }
    return Capture(significance=significance, **kept)


def capture_text(
    loaded: LoadedModel, tokens: Sequence[int], plan: CapturePlan
) -> tuple[Capture, Tensor]:
    """A capture of one text, and the logits after each token behind the context.

    Shapes:  ``tokens``: context and continuation -> logits [continuation, vocab] float32
    """
    sample = Sample(tokens=tuple(tokens), context=plan.context)
    tensors, logits = _run(loaded, sample, None)
    return _as_capture(tensors), logits


def _run(
    loaded: LoadedModel, sample: Sample, given: FeatureRows | None
) -> tuple[dict[str, Tensor], Tensor]:
    attend = CaptureAttention(sample.context)
    ids, places = torch.tensor(sample.tokens), torch.arange(len(sample.tokens))
    wanted = places[min(sample.context, len(places) - 1) :]  # one at least
    with torch.inference_mode():
        logits = loaded.network(ids, places, attend, wanted, given=given)
    tensors = {name: torch.stack(parts) for name, parts in attend.tensors.items()}
    images = [(one.start, one.end) for one in sample.segments]
    tensors["image_places"] = torch.tensor(images, dtype=torch.int64).view(-1, 2)
    return tensors, logits


def _features(sample: Sample, tower: VisionTower) -> FeatureRows:
    """Features of the images of a sample, and their places."""
    runs = [run for span in sample.spans for run in span.runs]
    places = torch.cat([torch.arange(first, first + count) for first, count in runs])
    return FeatureRows(places, torch.cat(list(tower.encode(sample.images))))


def _name(sample: Sample, facts: ModelFacts) -> str:
    """Everything that a capture depends on."""
    hashed = hashlib.sha256(repr((sample.tokens, sample.context)).encode())
    for image in sample.images:
        hashed.update(image.digest)
    return json.dumps((facts.revision, hashed.hexdigest()))


def _is_capture(file: Path, name: str) -> bool:
    """Whether the file is whole and captures this document; it is renamed when it is whole."""
    if not file.is_file():
        return False
    with file.open("rb") as stream:
        size = int.from_bytes(stream.read(8), "little")
        try:
            header = json.loads(stream.read(min(size, MAX_HEADER_BYTES)))
        except ValueError:
            return False
    return header.get("__metadata__", {}).get(CAPTURE) == name


def _write(file: Path, tensors: dict[str, Tensor], name: str) -> None:
    partial = file.with_name(file.name + ".partial")
    partial.write_bytes(format_tensors(tensors, {CAPTURE: name}))
    partial.replace(file)


def order_of(files: Sequence[Path], step: int, seed: int) -> Path:
    """The file of a step: each pass over the files has an order of its own.

    It is a function of the step, so that a resumed training goes on where it was.
    """
    draw = torch.Generator().manual_seed(seed * 1_000_003 + step // len(files))
    return files[int(torch.randperm(len(files), generator=draw)[step % len(files)])]

# transformers leaves the calls of its models and caches untyped.
# pyright: reportUnknownMemberType=false
"""Methods that run transformers alone: the full cache, and simulated page formats.

``full`` is the reference of every comparison. ``simulated:k4v8`` rounds the cache of
transformers with the reference quantizer, for formats without pages and kernels: negative
controls, and estimates of a format before it is implemented.
"""

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel

from triptych.core.errors import ConfigError
from triptych.core.layout import FORMATS, PageFormat, PageLayout, default_page_bytes
from triptych.evals.data.cases import Case, Footprint, Outcome
from triptych.evals.metrics.footprint import of_rows
from triptych.kernels.codec.quantizer import decode, encode
from triptych.workers.models.facts import ModelFacts, describe
from triptych.workers.models.hf_model import read_model

SIMULATED = re.compile(r"k([1-8]|16)v([1-8]|16)(?::([1248]):([1248]))?")

EditCache = Callable[[DynamicCache], None]


@dataclass(frozen=True)
class FullCache:
    """transformers in float32 with its full, unquantized cache."""

    model_path: Path
    name: str = "full"

    def run(self, cases: Sequence[Case]) -> list[Outcome]:
        runner = TransformersRunner(self.model_path)
        return [self._outcome(case, runner) for case in cases]

    def _outcome(self, case: Case, runner: "TransformersRunner") -> Outcome:
        logits, tokens = runner.run(case, _unchanged)
        full = runner.full_bytes(len(case.prompt))
        footprint = Footprint(full_bytes=full, data_bytes=full, all_in_bytes=full)
        return Outcome(logits=logits, tokens=tokens, footprint=footprint)


@dataclass(frozen=True)
class SimulatedFormat:
    """transformers in float32, the prompt's cache rounded to ``format``.

    The newest ``window_tokens`` are not rounded. Unlike in the engines, tokens after the prompt are
    not rounded either, and the window ends at a token instead of at a page.
    """

    model_path: Path
    format: PageFormat
    window_tokens: int

    @property
    def name(self) -> str:
        return f"simulated:{self.format.name}"

    def run(self, cases: Sequence[Case]) -> list[Outcome]:
        runner = TransformersRunner(self.model_path)
        return [self._outcome(case, runner) for case in cases]

    def _outcome(self, case: Case, runner: "TransformersRunner") -> Outcome:
        logits, tokens = runner.run(case, self._round_old)
        count = len(case.prompt)
        recent = min(count, self.window_tokens)
        geometry = runner.facts.geometry
        page = default_page_bytes(geometry.head_dim)
        runs = [
            (PageLayout(form, geometry.head_dim, page), [tokens] * geometry.head_rows)
            for form, tokens in ((self.format, count - recent), (FORMATS["fp16"], recent))
        ]
        footprint = of_rows(runs, runner.full_bytes(count))
        return Outcome(logits=logits, tokens=tokens, footprint=footprint)

    def _round_old(self, cache: DynamicCache) -> None:
        for layer in cache.layers:
            layer = cast("Any", layer)  # its tensors are declared optional
            old = max(0, layer.keys.shape[2] - self.window_tokens)
            _round(layer.keys[:, :, :old], self.format.key_bits, self.format.key_groups)
            _round(layer.values[:, :, :old], self.format.value_bits, self.format.value_groups)


def simulated_format(name: str) -> PageFormat:
    """A format by its bits, such as ``k4v8``, whether or not pages of it exist.

    ``k4v2:2:4`` has a scale for each half of a key and for each quarter of a value.

    Raises: ConfigError if the name is no such format
    """
    found = SIMULATED.fullmatch(name.lower())
    if found is None:
        raise ConfigError(
            f"simulated format {name!r}: expected key and value bits, as in k4v8, and groups of "
            "1, 2, 4 or 8 if there are more than one, as in k4v2:2:4"
        )
    key_bits, value_bits, *groups = found.groups(default="1")
    key_groups, value_groups = (int(count) for count in groups)
    return PageFormat(name.lower(), int(key_bits), int(value_bits), key_groups, value_groups)


def _unchanged(_cache: DynamicCache) -> None:
    return


def _round(vectors: Tensor, bits: int, groups: int) -> None:
    """Replace vectors by their quantized and dequantized values. Shapes: [..., d]"""
    flat = vectors.reshape(-1, vectors.shape[-1])
    vectors.copy_(decode(encode(flat, bits, groups)).view_as(vectors))


@dataclass(frozen=True)
class TransformersRunner:
    """Runs cases on a transformers model: prefill, edit the cache, decode."""

    model_path: Path
    facts: ModelFacts = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "facts", describe(self.model_path))

    @cached_property
    def model(self) -> PreTrainedModel:
        return read_model(self.model_path, "float32", "cpu", "sdpa")

    def full_bytes(self, tokens: int) -> int:
        """Bytes of the keys and values of this many tokens in 16 bits."""
        return 2 * tokens * self.facts.geometry.token_numbers

    @torch.inference_mode()
    def run(self, case: Case, edit: EditCache) -> tuple[Tensor | None, tuple[int, ...]]:
        """Logits before each of ``forced[1:]`` if scored, and the free tokens."""
        cache = DynamicCache(config=self.model.config)
        last = self._feed(case.prompt, cache, keep=1)
        edit(cache)
        kept = None
        if case.forced:
            every = self._feed(case.forced, cache, keep=len(case.forced))
            kept = every[:-1] if case.scored else None
            last = every[-1:]
        tokens = list[int]()
        while len(tokens) < case.free_tokens:
            if tokens:
                last = self._feed(tokens[-1:], cache, keep=1)
            tokens.append(int(last[-1].argmax()))
        return kept, tuple(tokens)

    def _feed(self, tokens: Sequence[int], cache: DynamicCache, *, keep: int) -> Tensor:
        """Logits after the last ``keep`` tokens, [keep, vocab]."""
        ids = torch.tensor([list(tokens)])
        model = cast("Any", self.model)
        return model(ids, past_key_values=cache, logits_to_keep=keep).logits[0]

"""Baselines by name, each at the bytes of another method or at a given share."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from torch import Tensor

from triptych.core.errors import ConfigError
from triptych.evals.data.cases import Case, EqualBytes, Footprint, Method, Outcome
from triptych.evals.methods.eviction import EVICTIONS, EvictionPolicy
from triptych.evals.methods.full_cache import FullCache
from triptych.evals.methods.masked_attention import MaskedModel
from triptych.evals.methods.page_retrieval import (
    LayerQueries,
    Rank,
    certified_hits,
    page_scores,
    visible_tokens,
)
from triptych.kernels.select import Rule
from triptych.kernels.select.summary import summary_bytes

PAGED: dict[str, Rank] = {
    "quest": "box",
    "moments": "moments",
    "mean": "mean",
    "oracle": "oracle",
    "static": "static",
}
BASELINES = (*EVICTIONS, "quest", "moments", "mean", "oracle")
"""What ``triptych eval quality --baselines`` adds."""
KEEP = "keep"

Settings = dict[str, float]


@dataclass(frozen=True, kw_only=True)
class EvictionBaseline:
    """An eviction baseline: some tokens of the prompt are kept, in 16 bits.

    Their bytes are counted without pages, tables or positions, in the baselines' favour.
    """

    name: str
    model: MaskedModel
    policy: EvictionPolicy
    keep: float
    """Share of the tokens."""

    def run(self, cases: Sequence[Case]) -> list[Outcome]:
        return [self._outcome(case) for case in cases]

    def _outcome(self, case: Case) -> Outcome:
        prompt = self.model.prefill(case.prompt).attention
        kept = self.policy(prompt, round(self.keep * prompt.tokens))
        masks = tuple(kept)

        def mask(layer: int, queries: LayerQueries) -> Tensor:
            return with_newer(masks[layer], queries)

        logits, tokens, counts = self.model.run(case, mask)
        token_bytes = 4 * self.model.facts.geometry.head_dim
        held = int(kept.sum()) * token_bytes
        footprint = Footprint(
            full_bytes=kept.numel() * token_bytes, data_bytes=held, all_in_bytes=held
        )
        return Outcome(logits=logits, tokens=tokens, footprint=footprint, hit=counts.hit_share)


def with_newer(kept: Tensor, queries: LayerQueries) -> Tensor:
    """Mask of the kept prompt tokens and all tokens after the prompt: [KH, N] -> [KH, T, n]."""
    count = queries.query.shape[2]
    total, prompt = queries.keys.shape[1], kept.shape[1]
    mask = kept.new_ones(kept.shape[0], count, total).tril(queries.first)
    mask[..., :prompt] = kept[:, None]
    return mask


@dataclass(frozen=True, kw_only=True)
class PageRetrievalBaseline:
    """A page retrieval baseline: all tokens are kept in 16 bits, some pages are read."""

    name: str
    model: MaskedModel
    rank: Rank
    rule: Rule
    page_tokens: int
    dense_layers: int

    def run(self, cases: Sequence[Case]) -> list[Outcome]:
        return [self._outcome(case) for case in cases]

    def _outcome(self, case: Case) -> Outcome:
        certified = list[float]()
        """Mean over heads and queries, of each call of a layer."""

        def mask(layer: int, queries: LayerQueries) -> Tensor | None:
            read = self._mask(layer, queries)
            if self.rank == "box":
                is_all = read is None
                hits = 1.0 if is_all else certified_hits(queries, read, self.page_tokens).mean()
                certified.append(float(hits))
            return read

        logits, tokens, counts = self.model.run(case, mask)
        geometry = self.model.facts.geometry
        full = len(case.prompt) * geometry.head_rows * geometry.head_dim * 4
        choosing = geometry.head_rows * max(0, geometry.layers - self.dense_layers)
        pages = len(case.prompt) // self.page_tokens * (choosing // geometry.layers)
        summaries = pages * _summary_bytes(self.rank, geometry.head_dim)
        footprint = Footprint(
            full_bytes=full,
            data_bytes=round(full * counts.read_share) + summaries,
            all_in_bytes=full + summaries,
        )
        return Outcome(
            logits=logits,
            tokens=tokens,
            footprint=footprint,
            hit=counts.hit_share,
            hit_bound=sum(certified) / len(certified) if certified else None,
        )

    def _mask(self, layer: int, queries: LayerQueries) -> Tensor | None:
        if layer < self.dense_layers:
            return None
        scores = page_scores(self.rank, queries, self.page_tokens)
        tokens = queries.keys.shape[1]
        return visible_tokens(scores, self.rule, queries.first, tokens, self.page_tokens)


@dataclass(frozen=True, kw_only=True)
class UnmaskedFullCache:
    """The full cache, run by the baselines' model, which has already prefilled each prompt."""

    model: MaskedModel
    name: str = "full"

    def run(self, cases: Sequence[Case]) -> list[Outcome]:
        return [self._outcome(case) for case in cases]

    def _outcome(self, case: Case) -> Outcome:
        logits, tokens, _ = self.model.run(case, _every_token)
        geometry = self.model.facts.geometry
        full = len(case.prompt) * geometry.head_rows * geometry.head_dim * 4
        footprint = Footprint(full_bytes=full, data_bytes=full, all_in_bytes=full)
        return Outcome(logits=logits, tokens=tokens, footprint=footprint)


def _every_token(layer: int, queries: LayerQueries) -> None:
    del layer, queries


def reference_of(methods: Sequence[Method | EqualBytes], model_path: Path) -> Method:
    """The full-cache reference: transformers' own, or the masked model if all methods use it."""
    masked = [one for one in methods if isinstance(one, EvictionBaseline | PageRetrievalBaseline)]
    if len(masked) == len(methods):
        return UnmaskedFullCache(model=masked[0].model)
    return FullCache(model_path)


def is_baseline(name: str) -> bool:
    """Whether a method's name, with or without settings, names a baseline."""
    return name.partition("+")[0] in (*EVICTIONS, *PAGED)


@dataclass(frozen=True)
class Baselines:
    """Makes the baselines of one model; they share each prompt's prefill."""

    model_path: Path
    _model: MaskedModel = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "_model", MaskedModel(self.model_path))

    def parse(self, name: str) -> Method | EqualBytes:
        """``h2o``, ``h2o+keep=0.5``, ``quest+page=32+keep=0.3+dense_layers=0``.

        ``keep`` is the share of tokens that are kept, or of pages that are read. Without it the
        method gets as many bytes as another one; for page retrieval, as many bytes read.

        Raises: ConfigError for a setting that the baseline does not have
        """
        kind = name.partition("+")[0]
        if kind in EVICTIONS:
            given = settings_of(name, {})
            make = partial(self._evicted, name, EVICTIONS[kind])
        else:
            usual = {"page": 16.0, "sink_tokens": 4.0, "window_tokens": 64.0, "dense_layers": 2.0}
            given = settings_of(name, usual)
            make = partial(self._paged, name, PAGED[kind], given)
        if KEEP in given:
            return make(given[KEEP])
        return EqualBytes(name, self._fitted(PAGED[kind], make, given) if kind in PAGED else make)

    def _evicted(self, name: str, policy: EvictionPolicy, keep: float) -> Method:
        return EvictionBaseline(name=name, model=self._model, policy=policy, keep=min(1.0, keep))

    def _paged(self, name: str, rank: Rank, given: Settings, keep: float) -> Method:
        sinks, window = int(given["sink_tokens"]), int(given["window_tokens"])
        return PageRetrievalBaseline(
            name=name,
            model=self._model,
            rank=rank,
            rule=Rule.of(keep, 0, sinks, window, 0.0),
            page_tokens=int(given["page"]),
            dense_layers=int(given["dense_layers"]),
        )

    def _fitted(
        self, rank: Rank, make: Callable[[float], Method], given: Settings
    ) -> Callable[[float], Method]:
        """Convert a share of bytes into a share of pages: dense layers and summaries count too."""
        geometry = self._model.facts.geometry
        dense = min(1.0, given["dense_layers"] / geometry.layers)
        summary = _summary_bytes(rank, geometry.head_dim)
        summary /= 4 * geometry.head_dim * given["page"]

        def at(share: float) -> Method:
            pages = 1.0 if dense == 1.0 else (share - dense) / (1.0 - dense) - summary
            return make(min(1.0, max(0.0, pages)))

        return at


def _summary_bytes(rank: Rank, head_dim: int) -> int:
    """Bytes of a page's summary; a ranking without a kernel counts as the smaller one."""
    if rank == "static":
        return 0
    return summary_bytes("moments" if rank == "moments" else "box", head_dim)


def settings_of(name: str, usual: Settings) -> Settings:
    """Settings in a baseline's name, over the defaults.

    Raises: ConfigError naming the known settings
    """
    found = dict(usual)
    for setting in name.split("+")[1:]:
        key, _, text = setting.partition("=")
        if key != KEEP and key not in usual:
            raise ConfigError(f"method {name!r}: expected one of {[KEEP, *usual]}, got {key!r}")
        try:
            found[key] = float(text)
        except ValueError:
            raise ConfigError(f"method {name!r}: {key}={text!r}: expected a number") from None
        is_share = key == KEEP
        if not (0 <= found[key] <= 1 if is_share else found[key] == int(found[key]) >= 0):
            expected = "0 to 1" if is_share else "a whole number, 0 or more"
            raise ConfigError(f"method {name!r}: {key}={text}: expected {expected}")
    if found.get("page", 1.0) < 1:
        raise ConfigError(f"method {name!r}: page=0: expected 1 token or more")
    return found

"""Baselines by name, each at the bytes of another method or at a share that is told."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from torch import Tensor

from triptych.core.errors import ConfigError
from triptych.evals.data.cases import Case, EqualBytes, Footprint, Method, Outcome
from triptych.evals.methods.eviction import EVICTIONS, Evict
from triptych.evals.methods.full_cache import FullCache
from triptych.evals.methods.masked_attention import MaskedModel
from triptych.evals.methods.page_retrieval import Rank, Step, page_scores, visible_tokens
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
class Evicted:
    """Only some tokens of the prompt are kept, in 16 bits.

    Their bytes are counted without pages, tables or positions, in the baselines' favour.
    """

    name: str
    model: MaskedModel
    policy: Evict
    keep: float
    """Share of the tokens."""

    def run(self, cases: Sequence[Case]) -> list[Outcome]:
        return [self._outcome(case) for case in cases]

    def _outcome(self, case: Case) -> Outcome:
        seen = self.model.read(case.prompt).seen
        kept = self.policy(seen, round(self.keep * seen.tokens))
        masks = tuple(kept)

        def look(layer: int, step: Step) -> Tensor:
            return with_newer(masks[layer], step)

        logits, tokens, tally = self.model.follow(case, look)
        token_bytes = 4 * self.model.facts.geometry.head_dim
        held = int(kept.sum()) * token_bytes
        footprint = Footprint(
            full_bytes=kept.numel() * token_bytes, data_bytes=held, all_in_bytes=held
        )
        return Outcome(logits=logits, tokens=tokens, footprint=footprint, hit=tally.hit_share)


def with_newer(kept: Tensor, step: Step) -> Tensor:
    """What was kept of the prompt and all that came after it: [KH, N] -> [KH, T, n]."""
    queries = step.query.shape[2]
    total, prompt = step.keys.shape[1], kept.shape[1]
    seen = kept.new_ones(kept.shape[0], queries, total).tril(step.first)
    seen[..., :prompt] = kept[:, None]
    return seen


@dataclass(frozen=True, kw_only=True)
class Paged:
    """Everything is kept in 16 bits, and some pages of it are read."""

    name: str
    model: MaskedModel
    rank: Rank
    rule: Rule
    page_tokens: int
    dense_layers: int

    def run(self, cases: Sequence[Case]) -> list[Outcome]:
        return [self._outcome(case) for case in cases]

    def _outcome(self, case: Case) -> Outcome:
        logits, tokens, tally = self.model.follow(case, self._look)
        geometry = self.model.facts.geometry
        full = len(case.prompt) * geometry.head_rows * geometry.head_dim * 4
        choosing = geometry.head_rows * max(0, geometry.layers - self.dense_layers)
        pages = len(case.prompt) // self.page_tokens * (choosing // geometry.layers)
        summaries = pages * _summary_bytes(self.rank, geometry.head_dim)
        footprint = Footprint(
            full_bytes=full,
            data_bytes=round(full * tally.read_share) + summaries,
            all_in_bytes=full + summaries,
        )
        return Outcome(logits=logits, tokens=tokens, footprint=footprint, hit=tally.hit_share)

    def _look(self, layer: int, step: Step) -> Tensor | None:
        if layer < self.dense_layers:
            return None
        scores = page_scores(self.rank, step, self.page_tokens)
        tokens = step.keys.shape[1]
        return visible_tokens(scores, self.rule, step.first, tokens, self.page_tokens)


@dataclass(frozen=True, kw_only=True)
class Unmasked:
    """The full cache in the layers of the baselines, so that they need not read a prompt again."""

    model: MaskedModel
    name: str = "full"

    def run(self, cases: Sequence[Case]) -> list[Outcome]:
        return [self._outcome(case) for case in cases]

    def _outcome(self, case: Case) -> Outcome:
        logits, tokens, _ = self.model.follow(case, _every_token)
        geometry = self.model.facts.geometry
        full = len(case.prompt) * geometry.head_rows * geometry.head_dim * 4
        footprint = Footprint(full_bytes=full, data_bytes=full, all_in_bytes=full)
        return Outcome(logits=logits, tokens=tokens, footprint=footprint)


def _every_token(layer: int, step: Step) -> None:
    del layer, step


def reference_of(methods: Sequence[Method | EqualBytes], model_path: Path) -> Method:
    """The full cache: of transformers as it is, unless all methods are baselines with masks."""
    masked = [one for one in methods if isinstance(one, Evicted | Paged)]
    if len(masked) == len(methods):
        return Unmasked(model=masked[0].model)
    return FullCache(model_path)


def is_baseline(name: str) -> bool:
    """Whether a method's name, with settings or without, is that of a baseline."""
    return name.partition("+")[0] in (*EVICTIONS, *PAGED)


@dataclass(frozen=True)
class Baselines:
    """Makes the baselines of one model, which read each prompt once for all of them."""

    model_path: Path
    _model: MaskedModel = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "_model", MaskedModel(self.model_path))

    def parse(self, name: str) -> Method | EqualBytes:
        """``h2o``, ``h2o+keep=0.5``, ``quest+page=32+keep=0.3+dense_layers=0``.

        ``keep`` is the share of tokens that are kept, or of pages that are read; without it the
        method gets the bytes of another one. Of pages, those are the bytes that are read.

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

    def _evicted(self, name: str, policy: Evict, keep: float) -> Method:
        return Evicted(name=name, model=self._model, policy=policy, keep=min(1.0, keep))

    def _paged(self, name: str, rank: Rank, given: Settings, keep: float) -> Method:
        sinks, window = int(given["sink_tokens"]), int(given["window_tokens"])
        return Paged(
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
        """Turn a share of bytes into one of pages: dense layers and summaries are read, too."""
        geometry = self._model.facts.geometry
        dense = min(1.0, given["dense_layers"] / geometry.layers)
        summary = _summary_bytes(rank, geometry.head_dim)
        summary /= 4 * geometry.head_dim * given["page"]

        def at(share: float) -> Method:
            pages = 1.0 if dense == 1.0 else (share - dense) / (1.0 - dense) - summary
            return make(min(1.0, max(0.0, pages)))

        return at


def _summary_bytes(rank: Rank, head_dim: int) -> int:
    """Bytes of a page's summary; what no kernel serves counts as the smaller one."""
    if rank == "static":
        return 0
    return summary_bytes("moments" if rank == "moments" else "box", head_dim)


def settings_of(name: str, usual: Settings) -> Settings:
    """Numbers behind a baseline's name, over the usual ones.

    Raises: ConfigError naming what the baseline knows
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

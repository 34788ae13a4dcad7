"""Settings of page selection and of plug-ins of the decode step."""

import re
from dataclasses import dataclass, field
from typing import Literal

from triptych.core.config.values import require


@dataclass(frozen=True, slots=True, kw_only=True)
class SelectionConfig:
    """Which pages of a long context a decode step reads; by default all."""

    method: Literal["none", "moments", "box", "a2ats"] = "none"
    """How pages are ranked for each query: by means and deviations of quarters of their keys, by
    the box around them, or by codes of their keys (``codebooks``); ``none``: every page is read."""

    codebooks: str = ""
    """File of codebooks for ``method: a2ats``, which ``triptych codebooks`` wrote for the model."""

    keep_fraction: float = 0.3
    """Share of each head row's pages that is read, those that are read in any case included."""

    budget_tokens: int = 2048
    """Minimum number of tokens whose pages are read. Contexts of up to twice as many are read
    whole: selection takes longer than it saves there, and loses information that later tokens
    need."""

    omitted_mass: float = 0.0
    """More pages are read until the others are expected to receive no more than this share of the
    attention to pages that compete; an estimate (``moments`` alone) that misses single keys in long
    contexts. 0: no more are."""

    sink_tokens: int = 4
    """First tokens whose pages are read in any case: attention rests on them."""

    window_tokens: int = 64
    """Newest tokens whose pages are read in any case."""

    head_budgets: Literal["auto", "even"] = "auto"
    """How the page budget is divided between heads: ``auto``: as the model's profile has it, by the
    attention that each head would miss (``triptych spread``), evenly if it has none; ``even``:
    evenly."""

    dense_layers: int | Literal["auto"] = "auto"
    """First layers that read every page. ``auto``: 2; none if the profile has head budgets,
    which cover these layers."""

    reselect_every: int = 1
    """Tokens of an answer from one choice of pages to the next."""

    request_bounds: dict[str, tuple[float, float]] = field(
        default_factory=dict[str, tuple[float, float]]
    )
    """What requests may set instead, from and to: ``keep_fraction``, ``budget_tokens`` and
    ``omitted_mass``. They may always read every page."""

    def __post_init__(self) -> None:
        kept = self.keep_fraction
        require(0 <= kept <= 1, "decode.selection.keep_fraction", kept, "0 to 1")
        dense = self.dense_layers
        fits = dense == "auto" or 0 <= dense < 1 << 31
        require(fits, "decode.selection.dense_layers", dense, "auto, or 0 or more")
        for name in ("budget_tokens", "sink_tokens", "window_tokens"):
            value = getattr(self, name)
            require(0 <= value < 1 << 31, f"decode.selection.{name}", value, "0 or more")
        fits = (self.method == "a2ats") == bool(self.codebooks)
        expected = "a file with method: a2ats ('triptych codebooks' writes one), else empty"
        require(fits, "decode.selection.codebooks", self.codebooks, expected)
        mass, told = self.omitted_mass, self.method == "moments"
        expected = "0 to 1; above 0 only with method: moments"
        fits = 0 <= mass < 1 and (mass == 0 or told)
        require(fits, "decode.selection.omitted_mass", mass, expected)
        every = self.reselect_every
        require(every >= 1, "decode.selection.reselect_every", every, ">= 1")
        for name in self.request_bounds:
            expected = f"one of {', '.join(SELECTION_BY_REQUEST)}"
            fits = name in SELECTION_BY_REQUEST
            require(fits, "decode.selection.request_bounds", name, expected)


SELECTION_BY_REQUEST = ("keep_fraction", "budget_tokens", "omitted_mass")
"""Settings of the selection that may differ from request to request."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepPluginConfig:
    """One plug-in of the decode step."""

    name: str = ""
    """A built-in one, one of an entry point, or ``module:object`` (docs/extending.md)."""

    label: str = ""
    """Name of the plug-in in requests and in the metric ``triptych_answers_ended_by_plugin``;
    empty: its name without the module."""

    options: dict[str, int | float | bool | str] = field(
        default_factory=dict[str, int | float | bool | str]
    )
    """Its settings; what is not named has the plug-in's own default."""

    enabled: bool = True
    """Whether requests that say nothing of it have it. They may switch it on and off."""

    request_bounds: dict[str, tuple[float, float]] = field(
        default_factory=dict[str, tuple[float, float]]
    )
    """Options that requests may set themselves, from and to."""

    def __post_init__(self) -> None:
        require(bool(self.name), "decode.plugins.name", self.name, "the name of a plug-in")
        fits = re.fullmatch(r"[A-Za-z0-9_.-]{1,64}", self.called) is not None
        expected = "up to 64 letters, digits, dots, hyphens and underscores"
        require(fits, "decode.plugins.label", self.called, expected)

    @property
    def called(self) -> str:
        """Name of the plug-in in requests."""
        return self.label or self.name.rpartition(":")[2]

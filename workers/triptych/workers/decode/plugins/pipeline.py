# torch leaves some operators untyped.
# pyright: reportUnknownMemberType=false
"""The step plug-ins of a decode worker: their order, and those of each request."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from triptych.core.config import DecodeConfig, SelectionConfig, StepPluginConfig
from triptych.core.errors import ConfigError, PluginError, RequestError
from triptych.core.messages import PluginOverride
from triptych.core.plugin_overrides import OptionRange, OverridablePlugin
from triptych.core.policy import Policy
from triptych.core.schema import SchemaError, build
from triptych.workers.decode.checkpoint import MAX_PLUGIN_MEMORY
from triptych.workers.decode.plugins.entropy import entropy
from triptych.workers.decode.plugins.plugin import (
    ALPHA_LOW,
    CONDITIONS,
    END,
    EXITS,
    GIVEN,
    MEMORY,
    SCORES,
    SETTINGS,
    StepPlugin,
)
from triptych.workers.plugins import STEP_PLUGINS

SETTINGS_ALONE = frozenset(SETTINGS)
Memory = NDArray[np.float64]
Rows = list[int]
Chosen = tuple[StepPlugin | None, ...]
"""The plug-ins of one request, in the order of the pipeline; None: it does not have that one."""

SELECTION = "selection"
"""Name of ``decode.selection`` in requests."""


@dataclass(frozen=True)
class Placed:
    """A configured plug-in at its place in the order."""

    label: str
    plugin: StepPlugin
    """With the server's options."""
    is_on: bool
    """Whether requests have it by default."""
    bounds: dict[str, OptionRange]
    after: tuple[str, ...]
    """Labels of the plug-ins whose values it needs."""
    memory: slice
    """Its columns of the plug-in memory."""

    @property
    def looks(self) -> bool:
        """Whether it runs at each step."""
        return self.plugin.memory > 0 or not SETTINGS_ALONE.issuperset(self.plugin.provides)


@dataclass(frozen=True)
class Seen:
    """Values of the engine at the end of a step; rows are requests."""

    logits: Tensor
    tokens: Sequence[int]
    lengths: Sequence[int]
    positions: Sequence[int]


@dataclass(frozen=True)
class Verdict:
    """Results of the plug-ins of a step; rows are requests."""

    ended_by: list[int]
    """The plug-in that ends the output, counted from 1 in pipeline order; 0: none."""
    memory: Memory


@dataclass(frozen=True)
class Pipeline:
    """The plug-ins in their order."""

    places: tuple[Placed, ...]

    @classmethod
    def of(
        cls,
        plugins: Sequence[StepPluginConfig],
        policy: Policy | None = None,
        *,
        can_exit: bool = True,
    ) -> "Pipeline":
        """Plug-ins beside a compression policy and a model, as ``ordered`` takes them.

        Raises: ConfigError if they do not fit together
        """
        return cls(tuple(ordered(plugins, policy, can_exit=can_exit)))

    def label(self, number: int) -> str:
        """The label of a number of ``Verdict.ended_by``; empty for 0."""
        return self.places[number - 1].label if 0 < number <= len(self.places) else ""

    def chosen(self, plugin_overrides: Sequence[PluginOverride]) -> Chosen:
        """The plug-ins of a request.

        Raises: RequestError if one of them is not here, or does not take these options
        """
        wanted = {
            override.plugin: override
            for override in plugin_overrides
            if override.plugin != SELECTION
        }
        for label in wanted.keys() - {placed.label for placed in self.places}:
            raise RequestError(f"no plug-in {label!r} is configured here", f"plugins.{label}")
        return tuple(_chosen(placed, wanted.get(placed.label)) for placed in self.places)

    def settings(self, chosen: Chosen) -> dict[str, float]:
        """The settings that the plug-ins of a request provide."""
        return {name: value for one in chosen if one for name, value in one.settings().items()}

    def look(self, chosen: Sequence[Chosen], seen: Seen, memory: Memory) -> Verdict | None:
        """Run the plug-ins of a step; None: no request has any.

        Plug-ins with equal options run once for all their requests.
        """
        looking = [index for index, placed in enumerate(self.places) if placed.looks]
        if not any(plugins[index] for plugins in chosen for index in looking):
            return None
        there = seen.logits.device
        facts: dict[str, Tensor] = {
            "logits": seen.logits,
            "token": torch.tensor(seen.tokens).to(there),
            "length": torch.tensor(seen.lengths).to(there),
            "position": torch.tensor(seen.positions).to(there),
        }
        ended_by, kept = [0] * len(chosen), torch.from_numpy(memory.copy()).to(there)
        for index, placed in enumerate(self.places):
            groups = dict[StepPlugin, Rows]()
            for row, plugins in enumerate(chosen):
                if (plugin := plugins[index]) and placed.looks:
                    groups.setdefault(plugin, []).append(row)
            for plugin, rows in groups.items():
                made = _step(placed, plugin, rows, facts, kept)
                for row in _where(made.pop(END, None), rows):
                    ended_by[row] = ended_by[row] or index + 1
                if placed.plugin.memory:
                    kept[rows, placed.memory] = made.pop(MEMORY)
                for name, value in made.items():
                    _spread(facts, name, value, rows, len(chosen))
        return Verdict(ended_by, kept.cpu().numpy())


def selection_for(
    config: SelectionConfig, plugin_overrides: Sequence[PluginOverride]
) -> SelectionConfig | None:
    """The page selection of a request; None: it reads all pages.

    Raises: RequestError if its options are invalid
    """
    wanted = [override for override in plugin_overrides if override.plugin == SELECTION]
    if config.method == "none":
        if wanted:
            raise RequestError("no selection is configured here", f"plugins.{SELECTION}")
        return None
    if not wanted or not (override := wanted[-1]).options:
        return None if wanted and not wanted[-1].on else config
    try:
        return replace(config, **_typed(SelectionConfig, override.options)) if override.on else None
    except ConfigError as error:
        raise RequestError(str(error), f"plugins.{SELECTION}") from error


# ---------------------------------------------------------------- configuration


def offers_of(
    config: DecodeConfig, policy: Policy | None = None, *, can_exit: bool = True
) -> tuple[OverridablePlugin, ...]:
    """The options of plug-ins and page selection that requests can change.

    ``policy``: how pages are compressed; None: that is not known. ``can_exit``: whether tokens can
    skip layers of the model.

    Raises: ConfigError if the plug-ins do not fit together, or a bound does not fit its option
    """
    places = ordered(config.steps, policy, can_exit=can_exit)
    offers = [
        OverridablePlugin(
            plugin=one.label,
            on=one.is_on,
            bounds=one.bounds,
            needs=one.after,
            drops_tokens=ALPHA_LOW in one.plugin.provides,
            needs_scores=SCORES in one.plugin.needs,
        )
        for one in places
    ]
    chosen = config.selection
    if chosen.method == "none":
        return tuple(offers)
    bounds = _bounds("decode.selection", chosen, chosen.request_bounds)
    return (OverridablePlugin(plugin=SELECTION, on=True, bounds=bounds), *offers)


def ordered(
    configs: Sequence[StepPluginConfig], policy: Policy | None, *, can_exit: bool = True
) -> list[Placed]:
    """Load plug-ins and sort each behind those whose values it needs, else as configured.

    Raises: ConfigError if one cannot be loaded, or they do not fit together
    """
    plugins = _loaded(configs)
    makers = _makers(plugins)
    _check_conditions(plugins, _lacking(policy, can_exit=can_exit))
    before = {label: _before(label, plugin, makers) for label, plugin in plugins.items()}
    places, column = list[Placed](), 0
    for config in _sorted(configs, before):
        label = config.called
        plugin, end = plugins[label], column + plugins[label].memory
        bounds = _bounds(f"decode.plugins.{label}", plugin, config.request_bounds)
        place = slice(column, end)
        places.append(Placed(label, plugin, config.enabled, bounds, before[label], place))
        column = end
    if column > MAX_PLUGIN_MEMORY:
        text = f"decode.plugins: together they remember {column} numbers of each answer"
        raise ConfigError(f"{text}; there is room for {MAX_PLUGIN_MEMORY}")
    _check_switched_on(places)
    return places


def _loaded(configs: Sequence[StepPluginConfig]) -> dict[str, StepPlugin]:
    """The plug-ins by label."""
    plugins = dict[str, StepPlugin]()
    for config in configs:
        label = config.called
        if label in plugins or label == SELECTION:
            what = f"decode.plugins: {label!r} is there twice, or is the name of decode.selection"
            raise ConfigError(f"{what}; give one of them another label")
        plugins[label] = _load(config)
    return plugins


def _sorted(
    configs: Sequence[StepPluginConfig], before: Mapping[str, Sequence[str]]
) -> Iterator[StepPluginConfig]:
    """Topological order; among plug-ins that are ready, the one configured first."""
    waiting, done = list(configs), set[str]()
    while waiting:
        ready = next((one for one in waiting if done.issuperset(before[one.called])), None)
        if ready is None:
            names = " and ".join(repr(one.called) for one in waiting)
            raise ConfigError(f"decode.plugins: {names} wait for each other's facts")
        waiting.remove(ready)
        done.add(ready.called)
        yield ready


def _load(config: StepPluginConfig) -> StepPlugin:
    where = f"decode.plugins.{config.called}"
    try:
        kind = STEP_PLUGINS.load(config.name)
    except ConfigError as error:
        raise ConfigError(f"decode.plugins: {error}") from error
    if not _is_plugin(kind):
        text = f"{where}: {config.name!r} is no frozen dataclass that extends StepPlugin"
        raise ConfigError(text)
    try:
        return build(kind, config.options, f"{where}.options")
    except SchemaError as error:
        raise ConfigError(str(error)) from error
    except ConfigError as error:
        raise ConfigError(f"{where}.options: {error}") from error


def _is_plugin(kind: object) -> bool:
    if not (isinstance(kind, type) and issubclass(kind, StepPlugin) and kind is not StepPlugin):
        return False
    return "__dataclass_params__" in vars(kind)


def _makers(plugins: Mapping[str, StepPlugin]) -> dict[str, str]:
    """The plug-in that provides each value that the engine does not."""
    makers = dict[str, str]()
    for label, plugin in plugins.items():
        for fact in plugin.provides:
            if fact in (*GIVEN, *CONDITIONS, MEMORY):
                text = f"decode.plugins: {label!r} provides {fact!r}, which the engine itself does"
                raise ConfigError(text)
            if fact != END and fact in makers:
                text = f"decode.plugins: {makers[fact]!r} and {label!r} both provide {fact!r}"
                raise ConfigError(f"{text}; leave one of them out")
            makers[fact] = label
    return {fact: label for fact, label in makers.items() if fact not in (END, *SETTINGS)}


def _lacking(policy: Policy | None, *, can_exit: bool) -> dict[str, str]:
    """Conditions that are not met, and the reason."""
    lacking = dict[str, str]()
    if policy is not None and not policy.scores_tokens:
        lacking[SCORES] = f"compressor.policy: {policy.name}"
    if not can_exit:
        lacking[EXITS] = "this model"
    return lacking


def _check_conditions(plugins: Mapping[str, StepPlugin], lacking: Mapping[str, str]) -> None:
    for label, plugin in plugins.items():
        for condition, cause in lacking.items():
            if condition in plugin.needs:
                raise ConfigError(
                    f"decode.plugins: {label!r} needs {condition!r}, which {cause} does not "
                    f"provide; choose {CONDITIONS[condition]}"
                )


def _before(label: str, plugin: StepPlugin, makers: Mapping[str, str]) -> tuple[str, ...]:
    """Labels of the plug-ins whose values a plug-in needs."""
    for fact in plugin.needs:
        if fact not in (*GIVEN, *CONDITIONS) and fact not in makers:
            have = ", ".join(sorted({*GIVEN, *CONDITIONS, *makers}))
            text = f"decode.plugins: {label!r} needs {fact!r}, which nothing provides"
            raise ConfigError(f"{text} (there are: {have})")
    return tuple(dict.fromkeys(makers[fact] for fact in plugin.needs if fact in makers))


def _check_switched_on(places: Sequence[Placed]) -> None:
    is_on = {placed.label: placed.is_on for placed in places}
    for placed in places:
        for label in placed.after:
            if placed.is_on and not is_on[label]:
                text = f"decode.plugins: {placed.label!r} is enabled and needs {label!r}"
                raise ConfigError(f"{text}, which is not")


def _bounds(
    where: str, plugin: object, given: Mapping[str, tuple[float, float]]
) -> dict[str, OptionRange]:
    """Bounds of options, each of which the plug-in takes at both its ends."""
    bounds = dict[str, OptionRange]()
    for name, (least, most) in given.items():
        now = getattr(plugin, name, None)
        if type(now) not in (int, float):
            numbers = ", ".join(sorted(_numbers(plugin))) or "none"
            text = f"{where}.request_bounds: {name!r} is no option with a number"
            raise ConfigError(f"{text} (those are: {numbers})")
        value, whole = cast("float", now), type(now) is int
        if not least <= value <= most or (whole and (least % 1 or most % 1)):
            kind = "whole numbers" if whole else "numbers"
            text = f"{where}.request_bounds.{name}={[least, most]}: expected {kind}, from no more"
            raise ConfigError(f"{text} than the server's own {value:g} to no less")
        for end in (least, most):
            try:
                replace(cast("Any", plugin), **{name: type(value)(end)})
            except ConfigError as error:
                raise ConfigError(f"{where}.request_bounds.{name}: {error}") from error
        bounds[name] = OptionRange(default=value, least=least, most=most, is_whole=whole)
    return bounds


def _numbers(plugin: object) -> list[str]:
    names = [field.name for field in fields(cast("Any", plugin))]
    return [name for name in names if type(getattr(plugin, name)) in (int, float)]


# ---------------------------------------------------------------- a request, and a step


def _chosen(placed: Placed, override: PluginOverride | None) -> StepPlugin | None:
    """The plug-in as a request wants it; None: not at all."""
    if override is None:
        return placed.plugin if placed.is_on else None
    if not override.on:
        return None
    try:
        return replace(placed.plugin, **_typed(type(placed.plugin), override.options))
    except (ConfigError, TypeError) as error:
        raise RequestError(f"{placed.label}: {error}", f"plugins.{placed.label}") from error


def _typed(kind: type, options: Mapping[str, float]) -> dict[str, Any]:
    """Options with the number types of their dataclass; a message has floats only."""
    whole = {field.name for field in fields(kind) if field.type in (int, "int")}
    return {name: int(value) if name in whole else value for name, value in options.items()}


def _step(
    placed: Placed, plugin: StepPlugin, rows: Rows, facts: dict[str, Tensor], memory: Tensor
) -> dict[str, Tensor]:
    """Run a plug-in on some rows.

    Raises: PluginError if its results are not the values that it provides
    """
    if "entropy" in plugin.needs:
        _add_entropy(facts, rows)
    given = {name: facts[name][rows] for name in plugin.needs if name not in CONDITIONS}
    if plugin.memory:
        given[MEMORY] = memory[rows, placed.memory]
    made = dict(plugin.step(given))
    expected = {*plugin.provides, *([MEMORY] if plugin.memory else [])} - SETTINGS_ALONE
    if made.keys() != expected:
        raise PluginError(placed.label, f"gave {sorted(made)}, expected {sorted(expected)}")
    for name, value in made.items():
        width = (plugin.memory,) if name == MEMORY else value.shape[1:]
        if value.shape != (len(rows), *width):
            shape = tuple(value.shape)
            raise PluginError(placed.label, f"{name} is {shape}, expected {(len(rows), *width)}")
    return made


def _add_entropy(facts: dict[str, Tensor], rows: Rows) -> None:
    """Compute the entropy of these rows where it is missing."""
    logits = facts["logits"]
    known = facts.setdefault("entropy", logits.new_full((logits.shape[0],), torch.nan))
    unknown = torch.tensor(rows).to(known.device)[known[rows].isnan()]
    known[unknown] = entropy(logits[unknown])


def _spread(facts: dict[str, Tensor], name: str, value: Tensor, rows: Rows, count: int) -> None:
    """Scatter the rows that a plug-in computed into those of all requests."""
    if name not in facts:
        facts[name] = value.new_zeros(count, *value.shape[1:])
    facts[name][rows] = value


def _where(verdict: Tensor | None, rows: Rows) -> Rows:
    if verdict is None:
        return []
    ends = cast("list[bool]", verdict.tolist())
    return [row for row, is_end in zip(rows, ends, strict=True) if is_end]

"""Which decode-step plug-ins and options a request may override, and the check of its overrides.

The ingress checks overrides with this module and does not import the plug-ins.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from triptych.core.errors import RequestError
from triptych.core.messages import Floor, PluginOverride

RequestedPlugins = Mapping[str, bool | Mapping[str, float]]
"""By label of the plug-in: on or off, or the options to run it with."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OptionRange:
    """The range of an option that requests may set."""

    default: float
    least: float
    most: float
    is_whole: bool
    """Whether only whole numbers are valid."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OverridablePlugin:
    """A plug-in that requests may switch on or off, or run with other options."""

    plugin: str
    """Its label."""
    on: bool
    """Whether it runs for requests without an override."""
    bounds: dict[str, OptionRange] = field(default_factory=dict[str, OptionRange])
    needs: tuple[str, ...] = ()
    """Labels of the plug-ins that it depends on."""
    drops_tokens: bool = False
    """Whether it drops tokens, which no request with the floor ``high`` may have."""
    needs_scores: bool = False
    """Whether it needs the scores of tokens, which not every compression method measures."""


def check_scores(
    method: str,
    scoring: Sequence[str],
    plugins: Sequence[OverridablePlugin],
    overrides: Sequence[PluginOverride],
) -> None:
    """Raise RequestError if a request switches on a plug-in that its method gives no scores.

    ``scoring``: the methods that score tokens.
    """
    needing = {one.plugin for one in plugins if one.needs_scores}
    chosen = [one.plugin for one in overrides if one.on and one.plugin in needing]
    if chosen and method not in scoring:
        names = ", ".join(map(repr, scoring)) or "none here"
        text = (
            f"{chosen[0]!r} needs the scores of tokens, which the compression method {method!r} "
            f"does not measure (methods that do: {names}): leave it out, or choose one of those"
        )
        raise RequestError(text, f"plugins.{chosen[0]}")


def check_floor(
    floor: Floor, plugins: Sequence[OverridablePlugin], overrides: Sequence[PluginOverride]
) -> None:
    """Raise RequestError if a request has a floor and switches on a plug-in that drops tokens."""
    droppers = {one.plugin for one in plugins if one.drops_tokens}
    chosen = [one.plugin for one in overrides if one.on and one.plugin in droppers]
    if floor == "high" and chosen:
        text = (
            f"{chosen[0]!r} drops tokens, which the floor 'high' of this request, its key or the "
            "server forbids: leave it out, or lower the floor"
        )
        raise RequestError(text, f"plugins.{chosen[0]}")


def overrides_of(
    requested: RequestedPlugins, plugins: Sequence[OverridablePlugin]
) -> tuple[PluginOverride, ...]:
    """Check the overrides of a request against the plug-ins that it may override.

    Raises: RequestError naming the plug-in or the option, and the valid ones
    """
    by_label = {one.plugin: one for one in plugins}
    overrides = tuple(_override(label, value, by_label) for label, value in requested.items())
    is_on = {one.plugin: one.on for one in plugins}
    is_on |= {override.plugin: override.on for override in overrides}
    for one in plugins:
        missing = [label for label in one.needs if not is_on[label]]
        if is_on[one.plugin] and missing:
            text = f"{one.plugin!r} needs {missing[0]!r}: switch both on, or both off"
            raise RequestError(text, f"plugins.{one.plugin}")
    return overrides


def _override(
    label: str, value: bool | Mapping[str, float], by_label: Mapping[str, OverridablePlugin]
) -> PluginOverride:
    where = f"plugins.{label[:64]}"
    if label not in by_label:
        known = ", ".join(sorted(by_label)) or "none"
        raise RequestError(f"no plug-in {label[:64]!r} is configured here (have: {known})", where)
    if isinstance(value, bool):
        return PluginOverride(plugin=label, on=value)
    bounds = by_label[label].bounds
    for name, number in value.items():
        at = f"{where}.{name[:64]}"
        if name not in bounds:
            free = ", ".join(sorted(bounds)) or "none of its options"
            raise RequestError(f"{at}: requests may set {free}", at)
        bound = bounds[name]
        if not bound.least <= number <= bound.most or (bound.is_whole and number % 1):
            kind = "a whole number" if bound.is_whole else "a number"
            text = f"{at}={number:g}: expected {kind} from {bound.least:g} to {bound.most:g}"
            raise RequestError(text, at)
    return PluginOverride(
        plugin=label, options={name: float(number) for name, number in value.items()}
    )

"""What requests may change of the decode step's plug-ins, and what one of them asks for.

Nothing in here knows what a plug-in does, so the ingress can say what is wrong without its code.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from triptych.core.errors import RequestError
from triptych.core.messages import PluginOverride

Wanted = Mapping[str, bool | Mapping[str, float]]
"""By label: whether it is wanted, or with which options."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Bound:
    """An option that requests may set, from and to."""

    default: float
    least: float
    most: float
    is_whole: bool
    """Whether it takes whole numbers alone."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Offer:
    """What requests may change of one plug-in."""

    plugin: str
    """Its label."""
    on: bool
    """Whether requests that say nothing of it have it."""
    bounds: dict[str, Bound] = field(default_factory=dict[str, Bound])
    needs: tuple[str, ...] = ()
    """Plug-ins without which it cannot work."""


def overrides_of(wanted: Wanted, offers: Sequence[Offer]) -> tuple[PluginOverride, ...]:
    """What a request wants, checked against what is offered.

    Raises: RequestError naming the plug-in or the option, and what there is instead
    """
    by_label = {offer.plugin: offer for offer in offers}
    switches = tuple(_switch(label, value, by_label) for label, value in wanted.items())
    is_on = {offer.plugin: offer.on for offer in offers}
    is_on |= {switch.plugin: switch.on for switch in switches}
    for offer in offers:
        missing = [label for label in offer.needs if not is_on[label]]
        if is_on[offer.plugin] and missing:
            text = f"{offer.plugin!r} needs {missing[0]!r}: switch both on, or both off"
            raise RequestError(text, f"plugins.{offer.plugin}")
    return switches


def _switch(
    label: str, value: bool | Mapping[str, float], by_label: Mapping[str, Offer]
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

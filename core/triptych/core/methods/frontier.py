"""The measured KL and bytes of compression methods: lookups, limits and the Pareto frontier."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from triptych.core.errors import FloorNotMet
from triptych.core.profile import Fidelity

Measured = Mapping[str, Sequence[Fidelity]]
"""Fidelity of methods at several context lengths, by name."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredMethod:
    """A compression method with its measurements."""

    name: str
    fidelity: tuple[Fidelity, ...]
    """At several context lengths."""
    compress_us: float = 0.0
    """Microseconds to compress a token of a prompt; 0: not measured."""


def nearest(measured: Sequence[Fidelity], tokens: int) -> Fidelity | None:
    """The measurement at the context length nearest to ``tokens``; None if there is none."""
    return min(measured, key=lambda one: abs(one.context - tokens), default=None)


def check_max_kl(measured: Measured, names: Iterable[str], max_kl: float, tokens: int) -> None:
    """Raise FloorNotMet if no method of ``names`` has a KL of at most ``max_kl``; 0: any.

    ``tokens``: length of the prompt.
    """
    if not max_kl:
        return
    found = {name: nearest(measured.get(name, ()), tokens) for name in names}
    kls = {name: one.kl for name, one in found.items() if one is not None}
    if min(kls.values(), default=max_kl + 1) > max_kl:
        best = min(kls, key=lambda name: kls[name], default="")
        raise FloorNotMet(max_kl, tuple(found), best, kls.get(best, 0.0))


def pareto(measured: Measured) -> tuple[str, ...]:
    """Names of the methods of which no other has fewer bytes and a smaller KL.

    A method belongs to them if that holds at one context length at least. Those that take as many
    bytes as 16 bits are left out.
    """
    found = dict[str, None]()
    for context in sorted({one.context for each in measured.values() for one in each}):
        points = [
            (one.bytes_ratio, one.kl, name)
            for name, each in measured.items()
            for one in each
            if one.context == context and one.bytes_ratio < 1
        ]
        least = float("inf")
        for _, kl, name in sorted(points):
            if kl < least:
                least, found[name] = kl, None
    return tuple(found)

"""Result of a simulated engine's step: duration, messages, and output tokens."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from triptych.core.handles import KVHandle, LeaseId, LeaseRef
from triptych.core.messages import Send

FIRST_TOKEN = 1
Lengths = Mapping[str, int]
"""Output tokens after which each request ends."""


@dataclass(frozen=True, slots=True)
class StepOutput:
    """Output tokens of one step, for the clients."""

    requests: int
    first: tuple[str, ...] = ()
    """Requests that receive their first token."""
    last: tuple[str, ...] = ()
    """Requests whose output is complete."""
    joined: tuple[str, ...] = ()
    """Requests for which it is the first token after the prefill's."""
    goes_on: bool = False
    """Whether the worker decodes in its next step as well."""


@dataclass(frozen=True, slots=True)
class Work:
    """Duration and results of one unit of work."""

    seconds: float
    sends: Sequence[Send] = ()
    output: StepOutput | None = None
    began: tuple[str, ...] = ()
    """Requests whose prefill begins with it."""


TAKEN = Work(0.0)
"""A message was taken, and nobody is to hear of it."""


class NeverQuiet:
    """Of an engine whose steps all matter to others."""

    def quiet_steps(self) -> list[float]:
        return []

    def skip(self, count: int) -> int:
        raise ValueError(f"{count} steps of a stage that has no quiet ones")


def lease_ref(request: str, tokens: int) -> KVHandle:
    """A handle with page counts and without pages, as simulated requests have none."""
    return KVHandle(LeaseRef("simulated", LeaseId(0), 0), (), tokens)

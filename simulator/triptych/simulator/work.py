"""Result of a simulated engine's step: duration, messages, and output tokens."""

from dataclasses import dataclass, field

from triptych.core.messages import Send


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
    sends: list[Send] = field(default_factory=list[Send])
    output: StepOutput | None = None
    began: tuple[str, ...] = ()
    """Requests whose prefill begins with it."""

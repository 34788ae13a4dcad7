"""What the HTTP side asks of the rest: an engine that answers, and the card of its model."""

from collections.abc import AsyncGenerator, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from triptych.core.messages import Failed, Request, Tokens
from triptych.core.plugin_overrides import OverridablePlugin
from triptych.core.profile import Fidelity


@dataclass(frozen=True, slots=True, kw_only=True)
class Health:
    """Whether a request sent now would be served, and if not, why."""

    ok: bool
    reason: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelCard:
    """What clients learn about the served model."""

    name: str
    """What clients put into ``model``."""
    context_tokens: int
    """Prompt plus answer, at most."""
    window_tokens: int = 0
    """Tokens that the model reads at once, if that is less; 0: it is not."""
    created: int
    """Unix time in seconds."""
    fidelity: tuple[Fidelity, ...] = ()
    """What compression costs, as calibration measured it at some lengths of context."""
    plugins: tuple[OverridablePlugin, ...] = ()
    """What requests may change of the decode step."""
    root: str = ""
    """Where the weights came from; empty: ``name``."""


class Reasons(Protocol):
    """Knows what was decided about the latest requests."""

    async def explain(self, client_id: str) -> Sequence[Mapping[str, object]]:
        """All that is known of a client's request, for operators; empty if nothing is."""
        ...

    async def decision(self, client_id: str) -> str:
        """The decisions in one line, for the client; empty if nothing is known."""
        ...


class NoReasons:
    """Knows nothing: the default of ``create_app``."""

    async def explain(self, client_id: str) -> Sequence[Mapping[str, object]]:
        return ()

    async def decision(self, client_id: str) -> str:
        return ""


class Profiles(Protocol):
    """Looks on while the stages work."""

    async def __call__(
        self, steps: int, seconds: float, /, *, trace: bool
    ) -> Sequence[Mapping[str, object]]:
        """What the next steps of each stage are made of, worker by worker."""
        ...


async def no_profiles(
    _steps: int, _seconds: float, *, trace: bool
) -> Sequence[Mapping[str, object]]:
    """There are no stages: the default of ``create_app``."""
    del trace
    return ()


class Engine(Protocol):
    """Turns requests into tokens, wherever the stages run."""

    @property
    def address(self) -> str:
        """Where the stages send tokens for this ingress: ``Request.reply_to``."""
        ...

    def generate(self, requests: Sequence[Request]) -> AsyncGenerator[Tokens | Failed, None]:
        """Yield the tokens of all choices of one client request as they are drawn.

        Ends when each request finished or failed. Closing the generator, or cancelling
        whoever waits for it, cancels what still runs and frees what it holds.

        Raises: TriptychError if the requests cannot be taken at all (``QueueFull``, ``Overloaded``)
        """
        ...

    async def health(self) -> Health:
        """Say whether the stages can take a request now."""
        ...

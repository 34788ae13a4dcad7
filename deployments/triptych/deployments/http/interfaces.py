"""Interfaces of the HTTP server: an engine, its model card, and sources of diagnostics."""

from collections.abc import AsyncGenerator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from triptych.core.images import Image, ImageLayout
from triptych.core.messages import Failed, Floor, Request, Tokens
from triptych.core.methods.frontier import Measured
from triptych.core.plugin_overrides import OverridablePlugin
from triptych.core.profile import Fidelity

AUTO = "auto"
"""Name that stands for the method that an adaptive server chooses."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Health:
    """Whether a request sent now would be served, and if not, the reason."""

    ok: bool
    reason: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelCard:
    """The served model as clients see it."""

    name: str
    """The name that clients send as ``model``, and that is in answers."""
    aliases: tuple[str, ...] = ()
    """Other names that clients may send."""
    sampling_defaults: Mapping[str, float] = field(default_factory=dict[str, float])
    """Values of fields that a request leaves out, where they are not OpenAI's."""
    context_tokens: int
    """Most tokens of prompt plus output."""
    served_tokens: int = 0
    """Tokens that are served however they are split into prompt and output, if these are fewer;
    else 0."""
    window_tokens: int = 0
    """Tokens of the model's own context, if it is smaller and windows are used; else 0."""
    vocab_tokens: int = 0
    """Token ids that the model has; 0: as many as the tokenizer."""
    created: int
    """Unix time in seconds."""
    methods: tuple[str, ...] = ()
    """Compression methods that requests may name, the default first."""
    adaptive: tuple[str, ...] = ()
    """Those among which the router chooses for a request that names none; empty: it does not."""
    scoring_methods: tuple[str, ...] = ()
    """Those of them that score tokens of answers, which some plug-ins need."""
    fidelity: Measured = field(default_factory=dict[str, tuple[Fidelity, ...]])
    """The error of compression that calibration measured, by method, at several lengths."""
    measured_on: str = ""
    """The model and the texts with which it was measured."""
    floor: Floor = "low"
    """Floor of all requests (``compressor.floor``)."""
    max_kl: float = 0.0
    """Limit of KL of all requests (``compressor.max_kl``); 0: none."""
    plugins: tuple[OverridablePlugin, ...] = ()
    """What requests may change about the plug-ins of the decode step."""
    reasoning: str = "auto"
    """Whether answers begin with reasoning: ``think``, ``none``, or ``auto``, by the template."""
    fingerprint: str = ""
    """OpenAI's ``system_fingerprint``: changes with weights, config and tokenizer; empty: none."""
    images: ImageLayout | None = None
    """What stands in a prompt for an image; None: images are not read."""
    images_reason: str = "this model reads text only"
    """Why they are not."""
    root: str = ""
    """Where the weights come from; empty: ``name``."""

    @property
    def names(self) -> tuple[str, ...]:
        """Every name that clients may send."""
        return (self.name, *self.aliases)

    @property
    def offered(self) -> tuple[str, ...]:
        """Every method that a request may name."""
        return (*self.methods, AUTO) if self.adaptive else self.methods

    @property
    def max_model_len(self) -> int:
        """The context as clients are told it: any prompt and output within it are served."""
        return self.served_tokens or self.context_tokens


class DecisionSource(Protocol):
    """Source of the router's decisions about the latest requests."""

    async def explain(self, client_id: str) -> Sequence[Mapping[str, object]]:
        """The decisions about a client's request, for operators; empty if it is unknown."""
        ...

    async def decision(self, client_id: str) -> str:
        """The decisions in one line, for the client; empty if the request is unknown."""
        ...


class NoDecisions:
    """Source without decisions: the default of ``create_app``."""

    async def explain(self, client_id: str) -> Sequence[Mapping[str, object]]:
        return ()

    async def decision(self, client_id: str) -> str:
        return ""


class ProfileSource(Protocol):
    """Takes a profile of the stages while they serve."""

    async def __call__(
        self, steps: int, seconds: float, /, *, trace: bool
    ) -> Sequence[Mapping[str, object]]:
        """Profile the next steps of each stage; one report per worker."""
        ...


async def no_profile(
    _steps: int, _seconds: float, *, trace: bool
) -> Sequence[Mapping[str, object]]:
    """Source without profiles: the default of ``create_app``."""
    del trace
    return ()


class Engine(Protocol):
    """Runs requests on the stages and yields their output tokens."""

    @property
    def address(self) -> str:
        """The address that stages send tokens to: ``Request.reply_to``."""
        ...

    def generate(
        self, requests: Sequence[Request], images: Sequence[Image] = ()
    ) -> AsyncGenerator[Tokens | Failed, None]:
        """Yield the tokens of all choices of one client request as they are sampled.

        ``images``: those that the prompts of all the requests name.

        Ends when each request has finished or failed. Closing the generator, or cancelling the
        task that awaits it, cancels what still runs and frees its memory.

        Raises: TriptychError if the requests are not accepted (``QueueFull``, ``Overloaded``)
        """
        ...

    async def health(self) -> Health:
        """Whether the stages can serve a request now."""
        ...

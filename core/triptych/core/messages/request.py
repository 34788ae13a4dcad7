"""A request, and what is reported about it: sampling, log probabilities, compression."""

import struct
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import repeat
from typing import Literal

from triptych.core.errors import MessageError
from triptych.core.images import ImageSpan, Modality, Segment, content_keys, image_segments

FinishReason = Literal["stop", "length"]
Stage = Literal["encode", "prefill", "compress", "decode"]
STAGES: tuple[Stage, ...] = ("prefill", "compress", "decode")
"""Stages of every model, in the order of a request."""
ChoiceReason = Literal["quality", "memory", "link", "stages", "floor", "held"]
"""Why the router chose a method and not the next one with more bytes. ``quality``: there is none.
``memory``: its pages do not fit. ``link``, ``stages``: it takes longer, mostly on the link between
nodes or in the compressor. ``floor``: the load asks for fewer bytes, and the floor for these.
``held``: it was not chosen long enough ago."""
Floor = Literal["low", "high"]
"""The lowest class that may store tokens of a request. ``low``: as the policy decides, and high
tokens become low when memory is short. ``high``: all tokens are high at least, none is dropped."""


def stages_of(*, has_images: bool) -> tuple[Stage, ...]:
    """Stages of a model; one that reads images has an encode stage before the others."""
    return ("encode", *STAGES) if has_images else STAGES


PromptKey = tuple[str, str, int | None, int, tuple[int, ...]]
"""``Request.prompt_key``: method, salt, limit of cached tokens, prompt tokens, tokens."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampling:
    """Sampling parameters of a request, named as vLLM's and OpenAI's."""

    temperature: float = 1.0
    """0 takes the most likely token."""
    top_k: int = 0
    """Keep the k most likely tokens; 0 keeps all."""
    top_p: float = 1.0
    """Keep the smallest set of tokens whose probability reaches this."""
    min_p: float = 0.0
    """Keep tokens at least this likely, relative to the most likely one."""
    repetition_penalty: float = 1.0
    """Divides positive logits of tokens seen in prompt or answer (multiplies negative ones)."""
    presence_penalty: float = 0.0
    """Subtracted from the logits of tokens that the answer already has."""
    frequency_penalty: float = 0.0
    """Subtracted once per occurrence in the answer."""
    seed: int = 0
    """Seed of the sampler: its random numbers depend on the seed and the position alone, in any
    batch. Logits differ in their last digits beside other requests, which can change a token."""
    logit_bias: tuple[tuple[int, float], ...] = ()
    """Pairs of token id and the value added to its logit."""
    max_tokens: int = 16
    """Maximum output tokens."""
    min_tokens: int = 0
    """End-of-sequence and stop ids are not drawn before this many tokens."""
    ignore_eos: bool = False
    """Continue after the model's end token."""
    stop: tuple[str, ...] = ()
    """Texts that end the answer; they are not part of it."""
    include_stop: bool = False
    """Keep the stop text in the answer."""
    tool_calls: bool = False
    """The answer may contain tool calls, in which stop texts are not matched."""
    tool_calls_first: bool = False
    """Tool calls stand only at the beginning: an answer that begins otherwise is text as a whole,
    tags of calls included."""
    stop_token_ids: tuple[int, ...] = ()
    """Token ids that end the answer, beside the model's own."""
    logprobs: int = -1
    """Alternatives per token to report; 0: the drawn token's only; -1: none."""
    prompt_logprobs: int = -1
    """The same for prompt tokens. The prompt is then computed without the prefix cache, which
    stores no log probabilities."""
    skip_special_tokens: bool = True
    """Leave special tokens out of the text."""
    grammar: str = ""
    """Grammar of the answer, as encoded by ``core.grammar``; empty: none."""

    @property
    def reports_logprobs(self) -> bool:
        """Whether log probabilities are reported. A takeover worker cannot report them for older
        tokens."""
        return self.logprobs >= 0 or self.prompt_logprobs >= 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Slo:
    """Service-level objectives of a request, in seconds; 0: none."""

    ttft_s: float = 0.0
    """Time to first token (TTFT)."""
    tpot_s: float = 0.0
    """Mean time per output token after the first (TPOT)."""
    deadline_s: float = 0.0
    """End-to-end latency."""


NO_SLO = Slo()


@dataclass(frozen=True, slots=True, kw_only=True)
class PluginOverride:
    """Settings of one plug-in of the decode step for one request."""

    plugin: str
    """Its label."""
    on: bool = True
    options: dict[str, float] = field(default_factory=dict[str, float])
    """Options that the request sets."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MethodChoice:
    """A compression method that the router has chosen, and by what."""

    method: str
    reason: ChoiceReason
    kl: float
    """Its KL to the full cache, as calibration measured it near this length."""
    stored_bytes: int
    """Bytes that the request will probably take with it, answer included."""
    free_bytes: int
    """Bytes that were free for the request: an equal part for each one that waited."""
    link_bytes_s: float = 0.0
    """Measured speed of the link that the pages probably cross; 0: none."""
    predicted_s: float = 0.0
    """Predicted seconds from arrival to the last token."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """One sequence to generate. A client's request with ``n`` choices becomes ``n`` of these."""

    id: str
    """Internal id, unique; not the client's."""
    prompt: tuple[int, ...]
    """Token ids of the prompt."""
    sampling: Sampling
    """Sampling parameters."""
    reply_to: str
    """Address of the ingress that receives the tokens."""
    output_tokens: tuple[int, ...] = ()
    """Output tokens that the client has received; generation continues after them."""
    attempt: int = 0
    """Number of this attempt. Attempts after the first are queued first and never refused."""
    skipped: int = 0
    """First tokens of the sequence that are not computed: they precede the context window."""
    goes_on: bool = False
    """Whether generation continues after ``max_tokens`` in the next context window."""
    cache_salt: str = ""
    """Requests share cached prefixes only if their salts are equal."""
    tenant: str = ""
    """Digest of the client's API key: identifies the tenant for fair queueing and cache quotas."""
    priority: int = 0
    """Priority among the requests of the tenant: lower runs sooner."""
    weight: float = 1.0
    """The tenant's weight in fair queueing."""
    slo: Slo = NO_SLO
    """Deadlines; a request that would miss them is refused."""
    traceparent: str = ""
    """W3C trace context that the client sent; empty: none."""
    session: str = ""
    """The client's id of the conversation; its cached prefixes are protected from eviction for
    ``session_ttl_s``."""
    cached_at_most: int | None = None
    """Maximum tokens taken from a cached prefix; None: no limit."""
    plugin_overrides: tuple[PluginOverride, ...] = ()
    """Plug-in settings of this request, where they differ from the server's."""
    floor: Floor = "low"
    """The strictest floor of the server, the key and the request."""
    method: str = ""
    """Name of its compression method; empty: the server's default."""
    max_kl: float = 0.0
    """The strictest limit of the server, the key and the request on the KL of its method to the
    full cache; 0: none."""
    adapts: bool = False
    """Whether the router is to choose the method, by load."""
    choice: MethodChoice | None = None
    """What it chose, in all attempts. The router sets ``method`` by it."""
    images: tuple[ImageSpan, ...] = ()
    """Images of the prompt, in order. Such a request is never computed in context windows."""

    @property
    def known_keys(self) -> tuple[int, ...]:
        """The ``known`` tokens as the prefix cache sees them: those of an image cover its content.

        Everything that compares beginnings of prompts uses these."""
        return content_keys(self.known, self.images) if self.images else self.known

    @property
    def segments(self) -> tuple[Segment, ...]:
        """Segments of the prompt that are no text."""
        return image_segments(self.images)

    @property
    def feature_bytes(self) -> int:
        """Bytes of the features of its images."""
        return sum(image.feature_bytes for image in self.images)

    @property
    def known(self) -> tuple[int, ...]:
        """Tokens of the sequence in the current window: prompt and output so far."""
        return (self.prompt + self.output_tokens)[self.skipped :]

    @property
    def known_tokens(self) -> int:
        """Number of ``known`` tokens."""
        return len(self.prompt) + len(self.output_tokens) - self.skipped

    @property
    def prompt_key(self) -> PromptKey:
        """Equal for requests whose prompts have the same keys and values."""
        limit, own = self.cached_at_most, self.known_prompt_tokens
        return (self.method, self.cache_salt, limit, own, self.known_keys)

    @property
    def is_scored(self) -> bool:
        """Whether log probabilities of its prompt are still to be computed.

        They are those of the model, so the prompt neither reads nor joins the prefix cache.
        """
        return self.sampling.prompt_logprobs >= 0 and not self.output_tokens

    @property
    def known_prompt_tokens(self) -> int:
        """How many of the ``known`` tokens are of the prompt."""
        return max(0, len(self.prompt) - self.skipped)


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenLogprob:
    """One token's log probability and the most likely alternatives."""

    token: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenRank:
    """Log probability and rank of one prompt token, given those before it."""

    logprob: float
    rank: int
    """1: the most likely token."""
    top: tuple[tuple[int, float], ...]
    """The most likely tokens there with their log probabilities, best first."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptLogprobs:
    """Log probabilities of a prompt: a row for each token but the first. Little-endian arrays."""

    top: int
    """Alternatives of each row."""
    ids: bytes
    """int32 [rows, top], most likely first."""
    logprobs: bytes
    """float32 [rows, 1 + top]: of the prompt's own token, then of the alternatives."""
    ranks: bytes
    """int32 [rows]: of the prompt's own token."""

    def rows(self) -> Iterator[TokenRank]:
        """Raises: MessageError if the arrays do not fit together"""
        count, top = len(self.ranks) // 4, self.top
        sizes = (len(self.ranks), len(self.ids), len(self.logprobs))
        if top < 0 or sizes != (4 * count, 4 * count * top, 4 * count * (1 + top)):
            raise MessageError(f"log probabilities of a prompt: {sizes} bytes for top={top}")
        ids = struct.iter_unpack(f"<{top}i", self.ids) if top else repeat((), count)
        values = struct.iter_unpack(f"<f{top}f", self.logprobs)
        for row, (own, *best), (rank,) in zip(
            ids, values, struct.iter_unpack("<i", self.ranks), strict=True
        ):
            yield TokenRank(logprob=own, rank=rank, top=tuple(zip(row, best, strict=True)))


@dataclass(frozen=True, slots=True, kw_only=True)
class ModalityReport:
    """Tokens and bytes of one modality of a prompt, before and after compression."""

    modality: Modality
    tokens: int
    stored_tokens: float
    """Tokens that the request's own pages hold, the mean over head rows."""
    raw_bytes: int
    """As in ``CompressionReport``."""
    stored_bytes: int
    """Bytes of the places in pages that its tokens take; those of text are the rest of the
    request's, places that are empty included."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ClassShares:
    """Shares of the tokens of a compressed prompt by what became of them, which add up to 1.

    Means over head rows, since each of them has classes of its own.

    Source: DiffKV, figure 12
    """

    recent: float
    """The sink and the newest tokens; all of them if the policy keeps 16 bits."""
    high: float
    """Those in high pages, and in pages of a cached prefix."""
    low: float = 0.0
    merged: float = 0.0
    """Tokens of chunks that became one token each, or of which a rule made fewer."""
    pruned: float = 0.0
    """Tokens that no page holds, those before a sliding window included."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CompressionReport:
    """Policy and bytes of one compressed request."""

    policy: str
    """The policy, such as ``uniform:k8v4``."""
    raw_bytes: int
    """Bytes of the raw 16-bit keys and values."""
    stored_bytes: int
    """Bytes of the pages that hold them now, for this request alone."""
    shared_bytes: int = 0
    """Bytes of shared pages of a cached prefix that the request reads."""
    lowered_tokens: int = 0
    """High tokens that became low because memory was short, per head row, rounded up."""
    modalities: tuple[ModalityReport, ...] = ()
    """Text and images of a prompt that has images; empty for text alone."""
    classes: ClassShares | None = None
    """Shares of the prompt's tokens by class; None: the stage did not count them."""

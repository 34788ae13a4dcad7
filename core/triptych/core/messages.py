# msgpack has no type hints; nothing untyped leaves this module.
# pyright: reportUnknownMemberType=false
"""Messages between processes: frozen dataclasses, encoded as msgpack, with every field checked."""

import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, fields, is_dataclass, replace
from itertools import repeat
from typing import Any, Literal, TypeVar, cast

import msgpack

from triptych.core.errors import MessageError, TriptychError
from triptych.core.handles import KVHandle
from triptych.core.schema import PackedField, SchemaError, build

WIRE_VERSION = 6
"""Changes whenever a message gets another name or shape: 2 renamed the messages of preemption,
checkpoints and borrowed cache memory; 3 added the epoch of a registration; 4 the children of a
``Submit``; 5 page limits, evictions, and the prompt's length of a ``Prefix``; 6 small pages."""
MAX_FRAME_BYTES = 64 << 20
MAX_SUBMIT_TOKENS = 1 << 18
"""Token ids of prompts in one ``Submit`` of several prompts."""

Message = Any
"""An instance of a class decorated with ``@message``."""

_KINDS: dict[str, type] = {}
C = TypeVar("C", bound=type)


ROUTER = "router"
"""The address of the router, wherever it runs."""

POOL = "pool"
"""The pool's address; the router sends it ``Expel`` and ``BorrowCacheMemory``."""


@dataclass(frozen=True, slots=True)
class Send:
    """A message and its destination; the caller of the state machine delivers it."""

    to: str
    message: Message


def message(cls: C) -> C:
    """Register a dataclass as a message; its class name is its tag on the wire."""
    if cls.__name__ in _KINDS:
        raise TypeError(f"two messages are called {cls.__name__}")
    _KINDS[cls.__name__] = cls
    return cls


def pack(messages: Sequence[Message]) -> bytes:
    """Encode messages into one frame: ``[version, [tag, fields], ...]``."""
    frame = [WIRE_VERSION, *([type(item).__name__, _plain(item)] for item in messages)]
    return cast("bytes", msgpack.packb(frame, default=_pack_field))


def _pack_field(value: object) -> bytes:
    if isinstance(value, PackedField):
        return value.pack()
    raise TypeError(f"{type(value).__name__} is not a type of messages")


def unpack(frame: bytes) -> list[Message]:
    """Decode a frame, trusting nothing in it.

    Raises: MessageError for a wrong version, an unknown tag, a missing, unknown or
        ill-typed field, or bytes that are not msgpack
    """
    if len(frame) > MAX_FRAME_BYTES:
        raise MessageError(f"frame of {len(frame)} bytes: the limit is {MAX_FRAME_BYTES}")
    try:
        body = cast("object", msgpack.unpackb(frame, strict_map_key=True, raw=False))
    except Exception as error:  # msgpack raises several unrelated types
        raise MessageError(f"not a msgpack frame: {error}") from error
    items = cast("list[object]", body) if isinstance(body, list) else []
    if not items or items[0] != WIRE_VERSION:
        sent = f"wire version {items[0]!r:.20}" if items else "no wire version"
        expected = f"this process reads version {WIRE_VERSION}"
        raise MessageError(f"{sent}: {expected}; run one release of Triptych in all processes")
    return [_revive(item) for item in items[1:]]


def _revive(item: object) -> Message:
    if not (isinstance(item, list) and len(cast("list[object]", item)) == 2):
        raise MessageError("expected [tag, fields]")
    tag, data = cast("list[object]", item)
    kind = _KINDS.get(tag) if isinstance(tag, str) else None
    if kind is None:
        raise MessageError(f"unknown message {tag!r}")
    try:
        return cast("Message", build(kind, data, cast("str", tag)))
    except (SchemaError, ValueError) as error:
        raise MessageError(str(error)) from error


_SCALARS = {int, float, str, bool, bytes, type(None)}


def _plain(value: object) -> object:
    if is_dataclass(value):
        return {f.name: _plain(getattr(value, f.name)) for f in fields(value)}
    if isinstance(value, tuple | list):
        if set(map(type, cast("list[object]", value))) <= _SCALARS:  # such as the ids of a prompt
            return cast("object", value)
        return [_plain(item) for item in cast("list[object]", value)]
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in cast("dict[Any, object]", value).items()}
    return value


# ------------------------------------------------------------------ the request

FinishReason = Literal["stop", "length"]
Stage = Literal["prefill", "compress", "decode"]
STAGES: tuple[Stage, ...] = ("prefill", "compress", "decode")
"""In the order of a request."""


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

    @property
    def known(self) -> tuple[int, ...]:
        """Tokens of the sequence in the current window: prompt and output so far."""
        return (self.prompt + self.output_tokens)[self.skipped :]

    @property
    def known_tokens(self) -> int:
        """Number of ``known`` tokens."""
        return len(self.prompt) + len(self.output_tokens) - self.skipped

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


# ------------------------------------------------------------------ tokens to the ingress


@message
@dataclass(frozen=True, slots=True, kw_only=True)
class Tokens:
    """New tokens of one request, sent from the stage that sampled them directly to the ingress."""

    request: str
    index: int
    """Index of the first of them in the output."""
    tokens: tuple[int, ...]
    text: str
    """Text of these tokens. Text that may become part of a stop string is held back."""
    logprobs: tuple[TokenLogprob, ...] = ()
    finish: FinishReason | None = None
    stop: str | int | None = None
    """The stop text or token id that ended the answer."""
    ended_by: str = ""
    """The plug-in that ended it, if one did."""
    compression: CompressionReport | None = None
    cached_tokens: int = 0
    """With the first token: tokens of the prompt that were not computed again."""
    prompt_logprobs: PromptLogprobs | None = None
    """With the first token, if the request asks for them."""


@message
@dataclass(frozen=True, slots=True, kw_only=True)
class Failed:
    """The request ends here with an error; OpenAI's fields."""

    request: str
    message: str
    kind: str
    code: str | None
    status: int
    retry_after_s: float | None = None
    resumable: bool = False
    """Whether another attempt may go on from the tokens that the client has."""


def failed(request: str, error: TriptychError) -> Failed:
    """The ``Failed`` message for a request that ends with ``error``."""
    return Failed(
        request=request,
        message=str(error),
        kind=error.kind,
        code=error.code,
        status=error.http_status,
        retry_after_s=getattr(error, "retry_after_s", None),
        resumable=error.resumable,
    )


# ------------------------------------------------------------------ ingress and router


@dataclass(frozen=True, slots=True, kw_only=True)
class ChildRequest:
    """A further sequence of a client's request: what differs from its first one."""

    id: str
    seed: int
    max_tokens: int
    prompt_logprobs: int = -1
    prompt: tuple[int, ...] | None = None
    """Token ids of its prompt; None: the prompt of the sequence before."""

    def after(self, before: Request) -> Request:
        """The request that this stands for; ``before``: the sequence before."""
        sampling = replace(
            before.sampling,
            seed=self.seed,
            max_tokens=self.max_tokens,
            prompt_logprobs=self.prompt_logprobs,
        )
        prompt = before.prompt if self.prompt is None else self.prompt
        return replace(before, id=self.id, prompt=prompt, sampling=sampling)

    @classmethod
    def of(cls, request: Request, before: Request) -> "ChildRequest | None":
        """The child that stands for a request; None if it differs in more."""
        sampling = request.sampling
        child = cls(
            id=request.id,
            seed=sampling.seed,
            max_tokens=sampling.max_tokens,
            prompt_logprobs=sampling.prompt_logprobs,
            prompt=None if request.prompt == before.prompt else request.prompt,
        )
        return child if child.after(before) == request else None


@message
@dataclass(frozen=True, slots=True, kw_only=True)
class Submit:
    """Ingress to router: take these sequences. The answers are tokens, or ``Failed``, for each.

    What the sequences of one client's request share, such as its grammar and ``logit_bias``, is
    sent once.
    """

    request: Request
    """The first sequence."""
    children: tuple[ChildRequest, ...] = ()
    """The others, in order."""

    @property
    def requests(self) -> tuple[Request, ...]:
        """All sequences."""
        found = [self.request]
        for child in self.children:
            found.append(child.after(found[-1]))
        return tuple(found)


def submits(requests: Sequence[Request]) -> list[Submit]:
    """The fewest messages that submit these requests; each has at most ``MAX_SUBMIT_TOKENS`` ids
    of prompts, or one prompt.
    """
    groups = list[tuple[Request, list[ChildRequest]]]()
    before, tokens = None, 0
    for request in requests:
        child = None if before is None else ChildRequest.of(request, before)
        tokens += 0 if child is None or child.prompt is None else len(child.prompt)
        if child is None or tokens > MAX_SUBMIT_TOKENS:
            groups.append((request, []))
            tokens = len(request.prompt)
        else:
            groups[-1][1].append(child)
        before = request
    return [Submit(request=first, children=tuple(others)) for first, others in groups]


@message
@dataclass(frozen=True, slots=True, kw_only=True)
class Cancel:
    """Forget these requests and free what they hold. Ingress to router, router to workers."""

    requests: tuple[str, ...]


@message
@dataclass(frozen=True, slots=True, kw_only=True)
class Confirm:
    """Ingress to router: no tokens have come for these requests; do they still exist?

    The answer is ``Unknown`` with those that do not, or nothing.
    """

    requests: tuple[str, ...]


@message
@dataclass(frozen=True, slots=True, kw_only=True)
class Unknown:
    """Router to ingress: these requests have ended, or have never arrived."""

    requests: tuple[str, ...]


# ------------------------------------------------------------------ router and workers


@message
@dataclass(frozen=True, slots=True, kw_only=True)
class Register:
    """Worker or ingress to router: register this process.

    It is sent again after the connection was lost, or after ``RegisterAgain``.
    """

    name: str
    """Unique name of the process, new at each start."""
    address: str
    """Where its mailbox listens."""
    stages: tuple[Stage, ...] = ()
    """What it can do; empty for an ingress."""
    max_requests: int = 0
    """Requests that it holds at once (decode)."""
    arena: str = ""
    """The arena of its device, where it stores pages; empty: there is only one."""
    epoch: int = 0
    """A higher one than before: the process has dropped all requests that it had from this router
    (a worker), or has given up all attempts (an ingress)."""


@message
@dataclass(frozen=True, slots=True, kw_only=True)
class RegisterAgain:
    """Router to worker or ingress: messages came from it, and it is not registered."""


@message
@dataclass(frozen=True, slots=True, kw_only=True)
class Drain:
    """The application stops: refuse new requests, and finish those that run.

    The router's process sends it to its scheduler, and the router to all workers and ingresses.
    """

    timeout_s: float
    """Seconds after which the router fails the requests that still run."""


@message
@dataclass(frozen=True, slots=True, kw_only=True)
class Drained:
    """Router to worker or ingress, after ``Drain``: no request is left."""


@message
@dataclass(frozen=True, slots=True, kw_only=True)
class Prefill:
    """Router to prefill worker: read these prompts."""

    requests: tuple[Request, ...]
    encoders: tuple[str, ...] = ()
    """Address of the compressor that receives each prompt's layers as they are computed; empty: all
    layers are handed over at once."""
    reader: str = ""
    """Address of this worker, where those compressors reply."""

    def __post_init__(self) -> None:
        if self.encoders and len(self.encoders) != len(self.requests):
            raise ValueError(f"{len(self.encoders)} encoders for {len(self.requests)} requests")


@message
@dataclass(frozen=True, slots=True, kw_only=True)
class Prefilled:
    """Prefill worker to router: the prompt is read and the first token drawn."""

    request: str
    first_token: int
    handle: KVHandle | None
    """The raw pages, or those of the last layers if others went to a compressor before; none if the
    answer ended with the first token."""
    token_s: float = 0.0
    """Mean seconds to compute one token of the prompt that was not cached."""
    cached_tokens: int = 0
    """Prompt tokens taken from the prefix cache."""


@message
@dataclass(frozen=True, slots=True, kw_only=True)
class Expect:
    """Router to compressor: the prefill worker will send layers of these prompts. Layers of other
    prompts are refused: after ``Cancel``, no router would ever ask for them."""

    requests: tuple[str, ...]


@message
@dataclass(frozen=True, slots=True, kw_only=True)
class Layers:
    """Prefill worker to compressor: these layers of a prompt are read, encode them."""

    request: str
    first: int
    """Index of the first layer. Layers arrive in order; the last ones come with ``Compress``."""
    handle: KVHandle
    """Their raw pages; ``tokens`` is the whole prompt."""
    reader: str
    """Address that receives ``LayersEncoded``."""


@message
@dataclass(frozen=True, slots=True, kw_only=True)
class LayersEncoded:
    """Compressor to prefill worker: the raw pages of some layers are free."""

    request: str
    first: int
    """``first`` of the ``Layers`` message."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Prefix:
    """A prompt whose blocks may be added to the prefix cache, with the salt of their key."""

    tokens: bytes
    """All tokens of the prompt, packed by ``pack_tokens``."""
    cache_salt: str
    tenant: str
    token_s: float
    """Seconds to compute one token."""
    session: str = ""
    """Conversation id; empty: none."""
    prompt_tokens: int = 0
    """How many of ``tokens`` are of the prompt; the rest is output of an earlier attempt."""
    cached_tokens: int = 0
    """First tokens that came from the prefix cache; their pages may be shared."""


def pack_tokens(tokens: Sequence[int]) -> bytes:
    """Token ids as little-endian int32."""
    return struct.pack(f"<{len(tokens)}i", *tokens)


@dataclass(frozen=True, slots=True, kw_only=True)
class CompressItem:
    request: str
    handle: KVHandle
    prefix: Prefix | None = None
    """Prompt to add to the prefix cache; None: nothing is added."""


@message
@dataclass(frozen=True, slots=True, kw_only=True)
class Compress:
    """Router to compressor: plan, and later encode, these requests."""

    items: tuple[CompressItem, ...]


@message
@dataclass(frozen=True, slots=True, kw_only=True)
class Planned:
    """Compressor to router: exactly this many pages will hold the request."""

    request: str
    pages: int
    """Pages of this request alone."""
    shared: int = 0
    """Shared pages of a cached prefix that it reads in place."""


@message
@dataclass(frozen=True, slots=True, kw_only=True)
class Encode:
    """Router to compressor: decode workers were chosen, encode into this arena."""

    requests: tuple[str, ...]
    arena: str


@message
@dataclass(frozen=True, slots=True, kw_only=True)
class Compressed:
    """Compressor to router: the pages are written and committed."""

    request: str
    handle: KVHandle
    report: CompressionReport


@message
@dataclass(frozen=True, slots=True, kw_only=True)
class Join:
    """Router to decode worker: continue this request from its pages."""

    request: Request
    output_tokens: tuple[int, ...]
    """Output tokens so far, after those of ``request``. The pages hold all but the last."""
    handle: KVHandle
    report: CompressionReport
    previous_worker: str = ""
    """Name of the decode worker that the request migrates from, if any; the router is then told
    when the pages have arrived."""
    token_s: float = 0.0
    """Seconds to compute one prompt token."""
    age_s: float = 0.0
    """Seconds since the first of ``output_tokens`` was drawn."""
    memory: tuple[float, ...] = ()
    """State of plug-ins for this request; empty: none yet."""
    logprobs: tuple[TokenLogprob, ...] = ()
    """Log probabilities of the newest ``output_tokens``, oldest first: their messages may be lost
    with a worker. Empty if the request asks for none."""

    def __post_init__(self) -> None:
        if len(self.logprobs) > len(self.output_tokens):
            raise ValueError(
                f"{len(self.logprobs)} log probabilities of {len(self.output_tokens)} tokens"
            )
        if not 1 <= len(self.output_tokens) <= self.handle.tokens + 1:
            raise ValueError(
                f"{len(self.output_tokens)} output tokens behind {self.handle.tokens} tokens"
            )


@message
@dataclass(frozen=True, slots=True, kw_only=True)
class Preempt:
    """Router to decode worker: put these requests on offer for another one, as they are now."""

    requests: tuple[str, ...]


@message
@dataclass(frozen=True, slots=True, kw_only=True)
class Preempted:
    """Decode worker to router: the request stopped here, and can continue from its pages."""

    request: str
    output_tokens: tuple[int, ...]
    """As in ``Join``."""
    handle: KVHandle
    memory: tuple[float, ...] = ()
    """As in ``Join``."""
    logprobs: tuple[TokenLogprob, ...] = ()
    """As in ``Join``."""


@message
@dataclass(frozen=True, slots=True, kw_only=True)
class PageLimit:
    """Router to decode worker: the most pages that a request may hold, until the next limit.

    The first one comes before ``Join`` or ``Resume``. A request that would need more pauses.
    """

    request: str
    pages: int
    """Pages of its own, without shared ones; 0: no limit."""
    tokens: int = 0
    """Most tokens of the sequence that they may hold; 0: no limit."""


EARLY_TOKENS = 8
"""Tokens before its limit at which a running request asks for more."""


@message
@dataclass(frozen=True, slots=True, kw_only=True)
class PagesWanted:
    """Decode worker to router: a request is near its page limit, or paused."""

    request: str
    tokens: int
    """Tokens of the sequence that its pages hold."""
    pages: int
    """Pages that it holds, without shared ones."""
    wanted: int = 0
    """More pages that its next token needs; 0: not known yet."""
    is_exhausted: bool = False
    """Whether the limit allows them and the pool had too few."""


@message
@dataclass(frozen=True, slots=True, kw_only=True)
class Evict:
    """Router to decode worker: free the pages of a request that runs here or is on offer."""

    request: str
    number: int
    """Number of this eviction of the request; the answer repeats it."""


@message
@dataclass(frozen=True, slots=True, kw_only=True)
class Evicted:
    """Decode worker to router: the request holds nothing here any more."""

    request: str
    number: int
    output_tokens: tuple[int, ...] = ()
    """As in ``Join``; empty if it did not run here."""


@message
@dataclass(frozen=True, slots=True, kw_only=True)
class Fetched:
    """Worker to router: pages were copied here from another node, and released there."""

    request: str


@message
@dataclass(frozen=True, slots=True, kw_only=True)
class Resume:
    """Router to decode worker: take over a request from a dead one, as that one left it."""

    previous_worker: str
    """Name of the worker that died."""
    join: Join
    """The dead worker's ``Join``, if it had not received it; the takeover worker runs it."""


@message
@dataclass(frozen=True, slots=True, kw_only=True)
class Resumed:
    """Decode worker to router: the request goes on here, and the dead one has nothing of it."""

    request: str


@message
@dataclass(frozen=True, slots=True, kw_only=True)
class Expel:
    """Router to pool: no worker will take over further requests of this dead worker; free its
    pages."""

    worker: str


@message
@dataclass(frozen=True, slots=True, kw_only=True)
class BorrowCacheMemory:
    """Router to pool: of the memory for prefixes, requests are to have so much, in all."""

    bytes: int


@message
@dataclass(frozen=True, slots=True, kw_only=True)
class CacheMemoryBorrowed:
    """Pool to router: so much of it requests may have from now on."""

    arena: str
    bytes: int


@message
@dataclass(frozen=True, slots=True, kw_only=True)
class Finished:
    """Worker to router: the request left this worker and holds nothing here any more."""

    request: str
    tokens: int
    """Tokens of the answer."""
    error: Failed | None = None
    """Error message; the router forwards it to the client."""


@message
@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """Worker to router, at least twice a second: what it holds and what is free."""

    name: str
    running: int
    waiting: int
    pages_held: int
    busy_s: float
    """Seconds of compute since the worker started."""
    step_age_s: float = 0.0
    """Seconds that its present step has taken so far."""
    longest_step_s: float = 0.0
    """Seconds that the longest of its last steps took; 0 before the first."""
    bytes_copied: int = 0
    """Bytes of keys and values that were copied to bring them here from another stage."""
    prefixes_skipped: dict[str, int] = field(default_factory=dict[str, int])
    """Prompts of which it could not have the beginning kept, by kind of error."""
    transfers_resumed: int = 0
    """Times that a broken transfer from another node went on."""
    chunks_refused: int = 0
    """Parts of such transfers that came damaged."""


def requests_in(message: Message) -> tuple[Request, ...]:
    """The requests that a message to a worker contains whole."""
    match message:
        case Prefill(requests=requests):
            return requests
        case Join(request=request) | Resume(join=Join(request=request)):
            return (request,)
        case _:
            return ()

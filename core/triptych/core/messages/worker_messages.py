"""Messages between the router and the workers."""

import struct
from collections.abc import Sequence
from dataclasses import dataclass, field

from triptych.core.handles import KVHandle
from triptych.core.images import Segment
from triptych.core.messages.client_messages import Failed
from triptych.core.messages.request import (
    CompressionReport,
    Floor,
    Request,
    Stage,
    TokenLogprob,
)
from triptych.core.messages.wire import (
    Message,
    message,
)


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
    arenas: tuple[str, ...] = ()
    """Where to store the raw pages of each prompt; empty: at the worker's home."""

    def __post_init__(self) -> None:
        if self.encoders and len(self.encoders) != len(self.requests):
            raise ValueError(f"{len(self.encoders)} encoders for {len(self.requests)} requests")
        if self.arenas and len(self.arenas) != len(self.requests):
            raise ValueError(f"{len(self.arenas)} arenas for {len(self.requests)} requests")


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
    floor: Floor = "low"
    """As in ``Request``."""
    method: str = ""
    """As in ``Request``."""
    segments: tuple[Segment, ...] = ()
    """Those of the prompt that are no text, in order."""


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
    floor: Floor = "low"
    """As in ``Request``."""
    method: str = ""
    """As in ``Request``."""
    segments: tuple[Segment, ...] = ()
    """As in ``Layers``."""


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
    lowers: bool = False
    """Whether the worker lowers the request to stay within the limit, without asking."""


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
class Lower:
    """Router to decode worker: memory is short, so store high tokens of a request as low ones.

    The worker lowers its own page limit by the pages that it frees.
    """

    request: str
    number: int
    """Number of this message for the request; the answer repeats it."""
    pages: int
    """Pages that are to be free after it, at least."""


@message
@dataclass(frozen=True, slots=True, kw_only=True)
class Lowered:
    """Decode worker to router: what ``Lower`` did, nothing included; or what the worker did to keep
    a request within a limit with ``lowers``."""

    request: str
    number: int = 0
    """That of ``Lower``; 0: there was none."""
    freed: int = 0
    """Pages that are free now."""
    pages: int = 0
    """Pages that the request holds now, without shared ones; only with ``freed``."""
    tokens: int = 0
    """Tokens of the sequence that they hold."""
    lowered_tokens: int = 0
    """As in ``CompressionReport``."""


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
    """Seconds that its present step has taken so far, without those of compiling kernels."""
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
    link_bytes_s: float = 0.0
    """Speed of such transfers together, a moving mean; 0: there were none."""


def requests_in(message: Message) -> tuple[Request, ...]:
    """The requests that a message to a worker contains whole."""
    match message:
        case Prefill(requests=requests):
            return requests
        case Join(request=request) | Resume(join=Join(request=request)):
            return (request,)
        case _:
            return ()

"""Errors of Triptych, with their HTTP statuses and whether a retry can help."""

from typing import ClassVar


class TriptychError(Exception):
    """Base class: catch this to catch anything we raise deliberately.

    Subclasses pass their arguments straight to ``super().__init__`` so that they
    survive pickling between Ray actors, and build the sentence in ``__str__``.
    """

    http_status: ClassVar[int] = 500
    retryable: ClassVar[bool] = False
    kind: ClassVar[str] = "server_error"
    """OpenAI's ``error.type``."""
    code: ClassVar[str | None] = "internal_error"
    """OpenAI's ``error.code``."""
    resumable: ClassVar[bool] = False
    """Whether the request can be resumed elsewhere from its output tokens."""


class ConfigError(TriptychError, ValueError):
    """A configuration value is missing, misspelt or out of range."""


class ModelError(TriptychError):
    """A model cannot be found, fetched, read or run."""


class ModelNotFetched(ModelError):
    """A model that can be downloaded is not on this machine yet."""


class PluginError(TriptychError):
    """A plug-in violates its interface."""

    def __init__(self, plugin: str, what: str) -> None:
        super().__init__(plugin, what)
        self.plugin, self.what = plugin, what

    def __str__(self) -> str:
        return f"plug-in {self.plugin!r}: {self.what}"


class MessageError(TriptychError):
    """A frame from a peer is not a valid message; it is refused."""


# ------------------------------------------------------------------ the page pool


class PoolError(TriptychError):
    """Base class of the page pool's errors."""


class PoolExhausted(PoolError):
    """The pool has fewer free pages than the caller needs; retry after backing off."""

    http_status = 503
    retryable = True
    kind = "service_unavailable"
    code = "overloaded"

    def __init__(self, wanted: int, free: int) -> None:
        super().__init__(wanted, free)
        self.wanted, self.free = wanted, free

    def __str__(self) -> str:
        return (
            f"{self.wanted} pages wanted, {self.free} free: "
            "raise pool.kv_cache_memory_bytes or lower max_tokens"
        )


class PageLimitReached(PoolError):
    """A request needs more pages than are booked for it; it pauses until more are."""

    def __init__(self, wanted: int) -> None:
        super().__init__(wanted)
        self.wanted = wanted

    def __str__(self) -> str:
        return f"{self.wanted} more pages wanted than are booked"


class StaleHandle(PoolError):
    """The lease of the handle has ended: its pages are freed or have another owner."""

    resumable = True

    def __init__(self, lease: int, reason: str) -> None:
        super().__init__(lease, reason)
        self.lease, self.reason = lease, reason

    def __str__(self) -> str:
        return f"lease {self.lease}: {self.reason}"


class NotHeld(PoolError):
    """A worker named pages that it does not hold; nothing was changed."""

    def __init__(self, worker: str, pages: int) -> None:
        super().__init__(worker, pages)
        self.worker, self.pages = worker, pages

    def __str__(self) -> str:
        return f"worker {self.worker!r} does not hold {self.pages} of the pages it named"


class WritesPending(PoolError):
    """A device still has queued writes of a dead worker: its pages cannot have an owner yet."""

    http_status = 503
    retryable = True
    kind = "service_unavailable"
    code = "worker_lost"
    resumable = True

    def __init__(self, worker: str) -> None:
        super().__init__(worker)
        self.worker = worker

    def __str__(self) -> str:
        return f"a device still has queued writes of worker {self.worker!r}: try again"


class NotRegistered(PoolError):
    """The pool does not know this worker, so the worker holds nothing: it must connect again.

    Its heartbeat stopped for longer than the lease, or the pool was started anew.
    """

    http_status = 503
    retryable = True
    kind = "service_unavailable"
    code = "worker_lost"
    resumable = True

    def __init__(self, worker: str) -> None:
        super().__init__(worker)
        self.worker = worker

    def __str__(self) -> str:
        return (
            f"worker {self.worker!r} is not registered with the pool: its lease ran out, or the "
            "pool was started anew; its pages were taken back, connect again"
        )


class PoolUnavailable(PoolError):
    """The pool process does not answer: it is starting, restarting or gone."""

    http_status = 503
    retryable = True
    kind = "service_unavailable"
    code = "overloaded"
    resumable = True


class AccessRefused(PoolUnavailable):
    """Authentication between processes of two nodes failed."""

    code = "access_refused"

    def __init__(self, address: str, reason: str) -> None:
        super().__init__(address, reason)
        self.address, self.reason = address, reason

    def __str__(self) -> str:
        return (
            f"{self.address}: {self.reason}; network.token_file and network.tls_*_file must be the "
            "same on all nodes"
        )


# ------------------------------------------------------------------ requests


class RequestError(TriptychError):
    """The request itself is wrong; sending it again changes nothing."""

    http_status = 400
    kind = "invalid_request_error"
    code = "invalid_value"

    def __init__(self, message: str, param: str | None = None) -> None:
        super().__init__(message, param)
        self.message, self.param = message, param

    def __str__(self) -> str:
        return self.message


class InvalidKey(RequestError):
    """The client has no API key, or a wrong one."""

    http_status = 401
    kind = "authentication_error"
    code = "invalid_api_key"


class NotAllowed(RequestError):
    """The client's key does not permit this."""

    http_status = 403
    kind = "permission_error"
    code = "admin_only"


class RequestNotFound(RequestError):
    """No trace of a request with this id exists."""

    http_status = 404
    code = "request_not_found"


class ModelNotFound(RequestError):
    """The request names a model that this server does not serve."""

    http_status = 404
    code = "model_not_found"


class UnknownMethod(RequestError):
    """The request names a compression method that this server does not offer."""

    code = "unknown_method"

    def __init__(self, method: str, offered: tuple[str, ...]) -> None:
        super(RequestError, self).__init__(method, offered)
        self.method, self.offered = method, offered
        names = ", ".join(map(repr, offered))
        self.message = f"no compression method {method[:64]!r}: this server offers {names}"
        self.param = "compression.method"


class FloorNotMet(RequestError):
    """No compression method that may serve the request is as near to the full cache as it asks."""

    code = "floor_not_met"

    def __init__(self, max_kl: float, methods: tuple[str, ...], best: str, kl: float) -> None:
        """``best``, ``kl``: the nearest of ``methods``; empty if none of them was measured."""
        super(RequestError, self).__init__(max_kl, methods, best, kl)
        self.max_kl, self.methods, self.best, self.kl = max_kl, methods, best, kl
        names = ", ".join(map(repr, methods))
        known = f"the nearest is {best!r} with {kl:g}" if best else "none of them was measured"
        self.message = (
            f"compression.max_kl={max_kl:g} (of the request, its key or the server): of {names} no "
            f"method has so small a KL to the full cache at this length; {known}: raise the limit, "
            "name another method, or ask for one to be offered (compressor.methods)"
        )
        self.param = "compression.max_kl"


class PromptTooLong(RequestError):
    """Prompt and output exceed the model's context or the server's memory."""

    code = "context_length_exceeded"


class GrammarError(RequestError):
    """A grammar is invalid, matches nothing or costs too much, or the output violates it."""


class BodyTooLarge(RequestError):
    """The body of the HTTP request exceeds ``ingress.max_body_bytes``."""

    http_status = 413
    code = "request_too_large"


class RequestTooLarge(RequestError):
    """A request takes more bytes than a message between the stages may have."""

    http_status = 413
    code = "request_too_large"


class HeadersTooLarge(RequestError):
    """The URL or the headers of the HTTP request exceed the limit."""

    http_status = 431
    code = "request_too_large"


class BodyTooSlow(RequestError):
    """The body of the HTTP request did not arrive in time."""

    http_status = 408
    kind = "timeout_error"
    code = "timeout"


class Unsupported(RequestError):
    """The request is sound, but asks for something that this server cannot do.

    A 400 and not a 501: clients send again what got a 5xx, which would change nothing.
    """

    code = "unsupported"


class DeadlineExceeded(TriptychError):
    """The request exceeded ``ingress.request_timeout_s``."""

    http_status = 504
    kind = "timeout_error"
    code = "timeout"


class QueueFull(TriptychError):
    """The queue is full; retry after ``retry_after_s`` seconds."""

    http_status = 429
    retryable = True
    kind = "rate_limit_error"
    code = "rate_limit_exceeded"

    def __init__(self, waiting: int, limit: int, retry_after_s: float) -> None:
        super().__init__(waiting, limit, retry_after_s)
        self.waiting, self.limit, self.retry_after_s = waiting, limit, retry_after_s

    def __str__(self) -> str:
        return (
            f"{self.waiting} requests wait and the limit is {self.limit}: "
            f"retry in {self.retry_after_s:.0f} s"
        )


class TooManyRequests(TriptychError):
    """The rate limit of an API key is exceeded; retry after ``retry_after_s`` seconds."""

    http_status = 429
    retryable = True
    kind = "rate_limit_error"
    code = "rate_limit_exceeded"

    def __init__(self, limit: str, retry_after_s: float) -> None:
        super().__init__(limit, retry_after_s)
        self.limit, self.retry_after_s = limit, retry_after_s

    def __str__(self) -> str:
        return f"this API key is good for {self.limit}: retry in {self.retry_after_s:.0f} s"


class StageLost(TriptychError):
    """The worker that had this request died; the request may be sent again."""

    http_status = 503
    retryable = True
    kind = "service_unavailable"
    code = "worker_lost"
    resumable = True

    def __init__(self, stage: str) -> None:
        super().__init__(stage)
        self.stage = stage

    def __str__(self) -> str:
        return f"the {self.stage} worker died while it held this request: send it again"


class Overloaded(TriptychError):
    """A stage has no worker."""

    http_status = 503
    retryable = True
    kind = "service_unavailable"
    code = "overloaded"


class ShuttingDown(TriptychError):
    """The server stops or is redeployed, so it accepts no request; or the grace period is over."""

    http_status = 503
    retryable = True
    kind = "service_unavailable"
    code = "shutting_down"
    retry_after_s: ClassVar[float] = 5.0

    def __str__(self) -> str:
        return "the server is shutting down: send the request again"


class SloUnmeetable(TriptychError):
    """A request would miss its deadline, so it is not computed."""

    http_status = 503
    retryable = True
    kind = "service_unavailable"
    code = "slo_unmeetable"

    def __init__(self, what: str, asked_s: float, predicted_s: float, retry_after_s: float) -> None:
        super().__init__(what, asked_s, predicted_s, retry_after_s)
        self.what, self.asked_s, self.predicted_s = what, asked_s, predicted_s
        self.retry_after_s = retry_after_s

    def __str__(self) -> str:
        return (
            f"{self.what}={self.asked_s * 1e3:.0f}: as fast as the server is now it would take "
            f"{self.predicted_s * 1e3:.0f} ms, so it was not begun: retry in "
            f"{self.retry_after_s:.0f} s, or ask for less"
        )


class Cancelled(TriptychError):
    """The client disconnected or cancelled."""

    http_status = 499
    kind = "cancelled"
    code = "cancelled"


# ------------------------------------------------------------------ the command line


class BenchmarkError(TriptychError):
    """The server under test cannot be reached, or answers no request of the benchmark."""

"""Retries at the ingress: attempts at a request until its output is complete."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from math import inf
from typing import Literal

from triptych.core.messages import Failed, Request, Tokens
from triptych.router.frontend.context_windows import Windows

MOST_EARLY = 64
"""Tokens ahead of one that is missing, of an answer with log probabilities: more do not overtake
it."""
MAX_EARLY = 4096
"""Messages ahead of a missing token of any answer; with more, the attempt is lost."""
GAP_S = 3.0
"""Time after which a token that others have overtaken counts as lost."""
QUIET_S = 5.0
"""Time without new tokens after which the router is asked whether it still has the request."""
MAX_ATTEMPTS = 6
"""Attempts after which a request fails: it may be what kills its workers."""
FIRST_DELAY_S = 0.5
"""Wait before the third attempt; it doubles from there. The second one begins at once."""


Progress = Literal["moves", "quiet", "torn"]
"""Of an attempt: whether tokens come, none have come for ``QUIET_S``, or one is lost."""


@dataclass(eq=False)
class RequestAttempts:
    """A request, the output that its client has received, and the present attempt.

    When an attempt is lost, or at the end of the model's window, the next one goes on behind the
    tokens that the client has, so the client sees neither a gap nor a repeat. Each attempt has an
    id of its own: what workers still say of an earlier one is nobody's any more.
    """

    request: Request
    tell: Callable[[Tokens | Failed], None]
    """Sends a message to the client."""
    windows: Windows | None = None
    """Windows for a sequence beyond the model's context; None: not supported."""
    output_tokens: list[int] = field(default_factory=list[int])
    attempt: int = 0
    lost: int = 0
    """Attempts that were lost."""
    is_at_window_end: bool = False
    """Whether the present attempt reached the end of its window and the output continues."""
    _start: tuple[int, ...] = ()
    """Output tokens before the present attempt."""
    _cached: int | None = None
    """Tokens of the prompt that were cached, as the first one behind ``_start`` told."""
    _refusal: Failed | None = None
    """The refusal of a shard; of several, the one with the earliest retry."""
    _early: dict[int, Tokens] = field(default_factory=dict[int, Tokens])
    """Tokens that overtook those before them: two workers send in turn, on two connections."""
    _mark: tuple[int, int] = (-1, 0)
    """Attempt and output tokens when they last changed, as ``progress`` saw it."""
    _since: float = 0.0
    _gap_since: float = inf
    """When ``progress`` first saw the present gap; infinity without one."""
    _is_unknown: bool = False
    """Whether the router does not know it, as of the last answer since ``_mark``."""

    @property
    def id(self) -> str:
        """The id of the present attempt."""
        name = self.request.id
        return f"{name}~{self.attempt}" if self.attempt else name

    @property
    def delay_s(self) -> float:
        """Delay before the present attempt; it grows with lost attempts."""
        return 0.0 if self.lost < 2 else float(FIRST_DELAY_S * 2 ** (self.lost - 2))

    def present(self) -> Request:
        """The present attempt, as the router is to see it."""
        request = replace(
            self.request,
            id=self.id,
            output_tokens=self._start,
            attempt=self.attempt,
            cached_at_most=self._cached,
        )
        return request if self.windows is None else self.windows.cut(request)

    def hear(self, message: Tokens) -> bool:
        """Pass new tokens to the client in order; returns whether that was the end.

        A takeover worker sends again what its predecessor may not have delivered.
        """
        if message.index < len(self.output_tokens):
            return False  # a takeover worker sends again what the client has
        self._early[message.index] = message
        while (item := self._early.pop(len(self.output_tokens), None)) is not None:
            if len(self.output_tokens) == len(self._start):
                self._cached = item.cached_tokens
            if item.choice is not None:  # later attempts have the same compression method
                self.request = replace(self.request, choice=item.choice)
            self.output_tokens += item.tokens
            if item.finish == "length" and self.present().goes_on:
                self.is_at_window_end = True
                self.tell(replace(item, request=self.request.id, finish=None))
                return False
            self.tell(self._for_client(item))
            if item.finish is not None:
                return True
        return False

    def _for_client(self, item: Tokens) -> Tokens:
        """The item under the client's name of the request, which the first attempt has, too."""
        name = self.request.id
        return item if item.request == name else replace(item, request=name)

    @property
    def is_torn(self) -> bool:
        """Whether a token is missing that will not come: the end is here, or tokens far ahead are.

        A takeover worker sends all tokens again, but only the newest log probabilities. So a gap in
        an answer without them may close for ``GAP_S`` (see ``progress``).
        """
        if not self._early:
            return False
        early = self._early.values()
        if not self.request.sampling.reports_logprobs:
            return len(early) > MAX_EARLY
        return len(early) > MOST_EARLY or any(item.finish is not None for item in early)

    def progress(self, now: float) -> Progress:
        """Whether the present attempt makes progress; to be called about once a second."""
        mark = (self.attempt, len(self.output_tokens))
        if mark != self._mark:
            self._mark, self._since, self._gap_since, self._is_unknown = mark, now, inf, False
        self._gap_since = min(self._gap_since, now) if self._early else inf
        if now - self._gap_since >= GAP_S:
            return "torn"
        return "quiet" if now - self._since >= QUIET_S else "moves"

    def unknown(self) -> bool:
        """The router does not know the present attempt; whether it said so before.

        The last tokens may be under way the first time.
        """
        was_unknown, self._is_unknown = self._is_unknown, True
        return was_unknown

    def begin_again(self) -> None:
        """Give up the present attempt for another one, or follow it with the next window's.

        If it got no further than the token that the prefill draws, the next one does just the
        same again: decode would read that token from compressed pages, another prefill not. Nor
        may it read a prefix that was kept of the first attempt meanwhile.
        """
        self.attempt += 1
        self.lost += not self.is_at_window_end
        if self.is_at_window_end or len(self.output_tokens) > len(self._start) + 1:
            self._start, self._cached = tuple(self.output_tokens), None
        self.is_at_window_end = False
        self._early.clear()

    @property
    def is_untouched(self) -> bool:
        """Whether the present attempt has no output yet."""
        return len(self.output_tokens) == len(self._start) and not self._early

    def refused(self, refusal: Failed) -> Failed:
        """A router would not take it; returns what to tell the client if all others say so, too."""
        before = self._refusal
        if before is None or _again_in_s(refusal) < _again_in_s(before):
            self._refusal = refusal
        return self._refusal or refusal

    def fail(self, failure: Failed) -> None:
        """Send the final error to the client."""
        self.tell(replace(failure, request=self.request.id))


def _again_in_s(refusal: Failed) -> float:
    """Seconds until a retry after this refusal."""
    return inf if refusal.retry_after_s is None else refusal.retry_after_s


@dataclass
class AttemptTable:
    """All requests of one ingress, by the id of their present attempt."""

    windows: Windows | None = None
    """Windows for sequences beyond the model's context."""
    _by_id: dict[str, RequestAttempts] = field(default_factory=dict[str, RequestAttempts])

    def __iter__(self) -> Iterator[RequestAttempts]:
        return iter(list(self._by_id.values()))

    def get(self, attempt: str) -> RequestAttempts | None:
        return self._by_id.get(attempt)

    def start(self, request: Request, tell: Callable[[Tokens | Failed], None]) -> RequestAttempts:
        request_attempts = self._by_id[request.id] = RequestAttempts(request, tell, self.windows)
        return request_attempts

    def again(self, request_attempts: RequestAttempts) -> bool:
        """Begin another attempt; False if too many were lost."""
        if not request_attempts.is_at_window_end and request_attempts.lost + 1 >= MAX_ATTEMPTS:
            return False
        del self._by_id[request_attempts.id]
        request_attempts.begin_again()
        self._by_id[request_attempts.id] = request_attempts
        return True

    def end(self, request_attempts: RequestAttempts) -> None:
        self._by_id.pop(request_attempts.id, None)

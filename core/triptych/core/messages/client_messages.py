"""Messages of the ingress: requests to the router, and tokens from the workers."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from triptych.core.errors import TriptychError
from triptych.core.messages.request import (
    CompressionReport,
    FinishReason,
    MethodChoice,
    PromptLogprobs,
    Request,
    TokenLogprob,
)
from triptych.core.messages.wire import message

MAX_SUBMIT_TOKENS = 1 << 18
"""Token ids of prompts in one ``Submit`` of several prompts."""


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
    choice: MethodChoice | None = None
    """With the first token, if the router chose the compression method."""


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
    """Ingress or worker to router: requests that may have ended without its knowledge.

    An ingress names those without new tokens; the answer is ``Unknown`` with those that have ended.
    A worker names all that it holds; the answer is ``Cancel`` with those that it should not hold.
    There is no answer if there is nothing to say.
    """

    requests: tuple[str, ...]


@message
@dataclass(frozen=True, slots=True, kw_only=True)
class Unknown:
    """Router to ingress: these requests have ended, or have never arrived."""

    requests: tuple[str, ...]

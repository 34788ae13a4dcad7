"""Output state of a request: tokens, text, finish reason and the messages to the client."""

from dataclasses import dataclass, field, replace
from functools import cached_property

from triptych.core.messages import (
    CompressionReport,
    FinishReason,
    PromptLogprobs,
    Request,
    Send,
    TokenLogprob,
    Tokens,
)
from triptych.workers.models.load import LoadedModel
from triptych.workers.sampling.detokenizer import IncrementalDetokenizer
from triptych.workers.sampling.grammar import GrammarMatcherFactory
from triptych.workers.sampling.sampler import Drawn, SamplerRow

PROMPT_TAIL_TOKENS = 8
"""Prompt tokens that the detokenizer needs for the text of the first output token."""


@dataclass(eq=False)
class OutputProcessor:
    """Turns sampled tokens of one request into messages. Decode rebuilds it from all tokens."""

    request: Request
    sampler_row: SamplerRow
    text: IncrementalDetokenizer
    end_ids: frozenset[int]
    limit: int
    """Most output tokens: the request's ``max_tokens``, or what is left of the context."""
    tokens: list[int] = field(default_factory=list[int])
    finish: FinishReason | None = None
    report: CompressionReport | None = None
    """What compression did to the request; sent with the next tokens whenever it changes."""
    is_reported: bool = False
    cached_tokens: int = 0
    """Prompt tokens from the prefix cache; sent once, too."""
    prompt_logprobs: PromptLogprobs | None = None
    """Log probabilities of the prompt; sent once, too."""
    ended_by: str = ""
    """The plug-in that ended the output, if any."""

    def push(self, drawn: Drawn, ended_by: str = "") -> Send:
        """Add a sampled token; the message for the ingress.

        ``ended_by``: the plug-in that ends the output with this token, if nothing else does. It
        is ignored before ``min_tokens`` and in guided decoding.

        Raises: ModelError if the row's logits were not numbers; GrammarError if no token may follow
        """
        index = len(self.tokens)
        token, sampling = drawn.checked_token(), self.request.sampling
        may_end = index + 1 >= sampling.min_tokens and not sampling.grammar
        text, stop = self._advance(token, ended_by if may_end else "")
        report, self.is_reported = None if self.is_reported else self.report, True
        cached, self.cached_tokens = self.cached_tokens, 0
        of_prompt, self.prompt_logprobs = self.prompt_logprobs, None
        message = Tokens(
            request=self.request.id,
            index=index,
            tokens=(drawn.token,),
            text=text,
            logprobs=self.logprobs(drawn),
            finish=self.finish,
            stop=stop,
            ended_by=self.ended_by,
            compression=report,
            cached_tokens=cached,
            prompt_logprobs=of_prompt,
            choice=self.request.choice if index == len(self.request.output_tokens) else None,
        )
        return Send(self.request.reply_to, message)

    def note_lowered(self, tokens: int) -> None:
        """Report that ``tokens`` high tokens of a head row were lowered, from the next token on."""
        if self.report is not None and tokens != self.report.lowered_tokens:
            self.report, self.is_reported = replace(self.report, lowered_tokens=tokens), False

    def replay(
        self, token: int, ended_by: str = "", logprobs: tuple[TokenLogprob, ...] = ()
    ) -> Send:
        """Add a token that a previous worker sampled; the message that repeats it to the ingress.

        The worker can have died before its message arrived. ``ended_by``: the plug-in that ended
        the output with it; ``logprobs``: its log probabilities, if known.
        """
        index = len(self.tokens)
        text, stop = self._advance(token, ended_by)
        message = Tokens(
            request=self.request.id,
            index=index,
            tokens=(token,),
            text=text,
            logprobs=logprobs,
            finish=self.finish,
            stop=stop,
            ended_by=self.ended_by,
        )
        return Send(self.request.reply_to, message)

    def _advance(self, token: int, ended_by: str) -> tuple[str, str | int | None]:
        self.tokens.append(token)
        self.sampler_row.append(token)
        if token in self.end_ids:
            self.finish = "stop"
            return self.text.finish(), token
        piece = self.text.push(token)
        if piece.stop is not None:
            self.finish = "stop"
        elif len(self.tokens) >= self.limit:
            self.finish = "length"
            held = "" if self.request.goes_on else self.text.finish()
            return piece.text + held, None
        elif ended_by:
            self.finish, self.ended_by = "stop", ended_by
            return piece.text + self.text.finish(), None
        return piece.text, piece.stop

    def logprobs(self, drawn: Drawn) -> tuple[TokenLogprob, ...]:
        """Log probabilities of a sampled token for the client; empty if it did not ask for them."""
        if self.request.sampling.logprobs < 0 or drawn.logprob is None:
            return ()
        return (TokenLogprob(token=drawn.token, logprob=drawn.logprob, top=drawn.top),)


@dataclass(frozen=True)
class OutputFactory:
    """Makes output processors for one model."""

    model: LoadedModel
    context_tokens: int

    @cached_property
    def grammars(self) -> GrammarMatcherFactory:
        return GrammarMatcherFactory(self.model)

    def start(self, request: Request) -> OutputProcessor:
        """An output processor that continues after the tokens that the client has already."""
        sampling = request.sampling
        own = frozenset[int]() if sampling.ignore_eos else frozenset(self.model.eos_token_ids)
        output = OutputProcessor(
            request=request,
            sampler_row=SamplerRow(
                sampling,
                request.prompt,
                self.model.eos_token_ids,
                grammar=self.grammars.start(sampling.grammar) if sampling.grammar else None,
            ),
            text=IncrementalDetokenizer(
                self.model.tokenizer, sampling, request.prompt[-PROMPT_TAIL_TOKENS:]
            ),
            end_ids=own | frozenset(sampling.stop_token_ids),
            limit=min(
                sampling.max_tokens, self.context_tokens + request.skipped - len(request.prompt)
            ),
        )
        for token in request.output_tokens:
            output.replay(token)
        return output

"""One answer as it grows: tokens, text, when it ends, what the client is told."""

from dataclasses import dataclass, field
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
"""Tokens of the prompt that decide how the first token of the answer is written."""


@dataclass(eq=False)
class OutputProcessor:
    """State of one answer. The decode stage rebuilds it from the first token."""

    request: Request
    sampler_row: SamplerRow
    text: IncrementalDetokenizer
    end_ids: frozenset[int]
    limit: int
    """Tokens at most: what the request asks for, or what is left of the context."""
    tokens: list[int] = field(default_factory=list[int])
    finish: FinishReason | None = None
    report: CompressionReport | None = None
    """Told to the client with the next tokens, once."""
    cached_tokens: int = 0
    """Tokens of the prompt that were not computed again; told once, too."""
    prompt_logprobs: PromptLogprobs | None = None
    """How likely the tokens of the prompt were; told once, too."""
    ended_by: str = ""
    """The plug-in that ended it, if one did."""

    def push(self, drawn: Drawn, ended_by: str = "") -> Send:
        """Take a drawn token; what comes back goes to the ingress.

        ``ended_by``: the plug-in that wants the answer to end with it, unless that ends it anyway.
        It has no say before ``min_tokens``, nor in an answer that must keep to a grammar.

        Raises: ModelError if the row's logits were not numbers; GrammarError if no token may follow
        """
        index = len(self.tokens)
        token, sampling = drawn.checked_token(), self.request.sampling
        may_end = index + 1 >= sampling.min_tokens and not sampling.grammar
        text, stop = self._advance(token, ended_by if may_end else "")
        report, self.report = self.report, None
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
        )
        return Send(self.request.reply_to, message)

    def replay(
        self, token: int, ended_by: str = "", logprobs: tuple[TokenLogprob, ...] = ()
    ) -> Send:
        """Take a token that an earlier worker drew; what comes back repeats it to the ingress.

        The worker may have died before it got the token through. ``ended_by``: the plug-in that
        ended the answer with it; ``logprobs``: how likely it was, if that is known.
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
        """How likely a drawn token is, as the client is told; nothing if it did not ask."""
        if self.request.sampling.logprobs < 0 or drawn.logprob is None:
            return ()
        return (TokenLogprob(token=drawn.token, logprob=drawn.logprob, top=drawn.top),)


@dataclass(frozen=True)
class OutputFactory:
    """Makes answers for one model."""

    model: LoadedModel
    context_tokens: int

    @cached_property
    def _grammars(self) -> GrammarMatcherFactory:
        return GrammarMatcherFactory(self.model)

    def start(self, request: Request) -> OutputProcessor:
        """An answer that goes on behind what its client has already."""
        sampling = request.sampling
        own = frozenset[int]() if sampling.ignore_eos else frozenset(self.model.eos_token_ids)
        answer = OutputProcessor(
            request=request,
            sampler_row=SamplerRow(
                sampling,
                request.prompt,
                self.model.eos_token_ids,
                grammar=self._grammars.start(sampling.grammar) if sampling.grammar else None,
            ),
            text=IncrementalDetokenizer(
                self.model.tokenizer, sampling, request.prompt[-PROMPT_TAIL_TOKENS:]
            ),
            end_ids=own | frozenset(sampling.stop_token_ids),
            limit=min(
                sampling.max_tokens, self.context_tokens + request.skipped - len(request.prompt)
            ),
        )
        for token in request.said:
            answer.replay(token)
        return answer

"""OpenAI's responses, whole and as chunks, built from the tokens of each choice."""

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from types import MappingProxyType
from typing import ClassVar

from triptych.core.messages import (
    CompressionReport,
    FinishReason,
    Floor,
    MethodChoice,
    PromptLogprobs,
    TokenLogprob,
    TokenRank,
    Tokens,
)
from triptych.core.profile import Fidelity
from triptych.deployments.http.openai.chat_logprobs import ChatLogprobs, finite_logprob
from triptych.deployments.http.openai.reasoning_parser import ReasoningParser
from triptych.deployments.http.openai.request_builder import Job
from triptych.deployments.http.openai.tool_parser import ParsedCall, call_parser
from triptych.deployments.http.tokenizer import TextCodec

Json = dict[str, object]

NOT_MEASURED: Mapping[str, Fidelity] = MappingProxyType({})


@dataclass(slots=True, kw_only=True)
class Choice:
    """The output of one choice so far."""

    index: int
    echo: str = ""
    texts: list[str] = field(default_factory=list[str])
    logprobs: list[TokenLogprob] = field(default_factory=list[TokenLogprob])
    ids: list[int] = field(default_factory=list[int])
    unsent_ids: list[int] = field(default_factory=list[int])
    """Ids of tokens that are in no event yet, as they had no text."""
    chars: int = 0
    """Characters of the tokens whose log probabilities were reported."""
    opened: bool = False
    """Whether a stream has had an event of this choice."""
    finish: FinishReason | None = None
    stop: str | int | None = None
    ended_by: str = ""
    """The plug-in that ended the choice, if one did."""
    compression: CompressionReport | None = None
    floor: Floor = "low"
    """The floor in force."""
    choice: MethodChoice | None = None
    """Why the router chose the compression method; None: it did not."""
    cached_tokens: int = 0
    """Tokens of its prompt that were in the prefix cache."""
    prompt_logprobs: PromptLogprobs | None = None
    """Log probabilities of its prompt, if it is the first choice of that prompt."""

    @property
    def ending(self) -> Json:
        """The stop string or token, and the plug-in if one ended the choice."""
        ending: Json = {"stop_reason": self.stop}
        return ending | {"ended_by": self.ended_by} if self.ended_by else ending

    def add(self, item: Tokens) -> None:
        """Add new tokens."""
        self.texts.append(item.text)
        self.logprobs += item.logprobs
        self.ids += item.tokens
        self.finish, self.stop, self.ended_by = item.finish, item.stop, item.ended_by
        if item.compression is not None:
            before = self.compression.lowered_tokens if self.compression else 0
            most = max(before, item.compression.lowered_tokens)  # it may be computed again
            self.compression = replace(item.compression, lowered_tokens=most)
        self.cached_tokens = max(self.cached_tokens, item.cached_tokens)
        self.prompt_logprobs = item.prompt_logprobs or self.prompt_logprobs
        self.choice = item.choice or self.choice


def usage(
    prompt_tokens: int,
    choices: Sequence[Choice],
    choices_each: int = 1,
    fidelity: Mapping[str, Fidelity] = NOT_MEASURED,
    measured_on: str = "",
) -> Json:
    """OpenAI's ``usage``, with compression's result if it is known, and its error if measured.

    A prompt counts once, with the largest number of cached tokens of its ``choices_each`` choices.
    """
    answer_tokens = sum(len(choice.ids) for choice in choices)
    counts: Json = {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": answer_tokens,
        "total_tokens": prompt_tokens + answer_tokens,
        "prompt_tokens_details": {"cached_tokens": _cached_tokens(choices, choices_each)},
    }
    compression = _compression(choices)
    if compression:
        measured = _fidelity_of(compression, fidelity)
        compression["estimated_error"] = _estimate(measured, measured_on)
    return counts | {"compression": compression} if compression else counts


def _fidelity_of(compression: Json, fidelity: Mapping[str, Fidelity]) -> Fidelity | None:
    """The measured error of the method in a result; None if nobody measured it, or its tokens were
    lowered."""
    is_lowered = bool(compression["lowered_tokens"])
    return None if is_lowered else fidelity.get(str(compression["method"]))


def _estimate(fidelity: Fidelity | None, measured_on: str) -> Json | None:
    """The measured error and the setting in which it was measured; None: nobody measured it."""
    if fidelity is None:
        return None
    return {
        "kl": fidelity.kl,
        "top1_agreement": fidelity.top1_agreement,
        "measured_at_tokens": fidelity.context,
        "measured_ratio": round(1 / fidelity.bytes_ratio, 3),
        "measured_on": measured_on,
    }


def _compression(choices: Sequence[Choice]) -> Json:
    """The result of compression over all choices; empty if no stage reported it.

    The ratio counts shared bytes for each choice, so it is the ratio of compression alone. Bytes
    that sharing saves are reported separately.
    """
    reports = [choice.compression for choice in choices if choice.compression]
    if not reports:
        return {}
    raw = sum(report.raw_bytes for report in reports)
    stored = sum(report.stored_bytes for report in reports)
    shared = sum(report.shared_bytes for report in reports)
    result: Json = {
        "method": reports[0].policy,
        "policy": reports[0].policy,
        "ratio": round(raw / max(stored + shared, 1), 3),
        "raw_bytes": raw,
        "stored_bytes": stored,
        "floor": choices[0].floor,
        "lowered_tokens": sum(report.lowered_tokens for report in reports),
    }
    if shared:
        result["shared_bytes"] = shared
    if choices[0].choice is not None:
        result["choice"] = asdict(choices[0].choice)
    if reports[0].modalities:
        result["modalities"] = _modalities(reports)
    if classes := _classes(reports):
        result["classes"] = classes
    return result


def _classes(reports: Sequence[CompressionReport]) -> Json:
    """Shares of the tokens of all prompts by class; empty if no stage counted them.

    A choice weighs as much as its prompt is long.
    """
    counted = [(one.raw_bytes, asdict(one.classes)) for one in reports if one.classes]
    total = sum(raw for raw, _ in counted)
    return {
        name: round(sum(raw * shares[name] for raw, shares in counted) / total, 4)
        for name in (counted[0][1] if counted else ())
    }


def _modalities(reports: Sequence[CompressionReport]) -> Json:
    """Tokens and bytes by modality, added up over all choices."""
    columns = zip(*(report.modalities for report in reports), strict=True)
    return {
        same[0].modality: {
            "tokens": sum(one.tokens for one in same),
            "stored_tokens": round(sum(one.stored_tokens for one in same), 2),
            "raw_bytes": sum(one.raw_bytes for one in same),
            "stored_bytes": sum(one.stored_bytes for one in same),
        }
        for same in columns
    }


def _cached_tokens(choices: Sequence[Choice], choices_each: int) -> int:
    return sum(
        max(choice.cached_tokens for choice in choices[first : first + choices_each])
        for first in range(0, len(choices), choices_each)
    )


class ResponseBuilder(ABC):
    """Builds the response to one client request. Subclasses define the JSON of a choice."""

    object: ClassVar[str]
    chunk_object: ClassVar[str]

    def __init__(self, job: Job, codec: TextCodec, warning: str = "") -> None:
        """``warning``: about the request, for the header ``X-Triptych-Warning``."""
        self.job, self.warning = job, warning
        self._codec = codec
        self.choices = [
            Choice(
                index=index,
                echo=job.echo[index] if job.echo else "",
                floor=job.requests[index].floor,
            )
            for index in range(len(job.requests))
        ]

    @property
    def is_long(self) -> bool:
        """Whether building the response may take a second, as with prompt log probabilities."""
        return max(self.job.prompt_logprobs, self.job.echo_logprobs) >= 0

    def whole(self) -> Json:
        """The response of a request without streaming."""
        choices = [self._choice(choice) | self._ids(choice) for choice in self.choices]
        return self._frame(self.object, choices) | {"usage": self._usage()}

    def headers(self) -> dict[str, str]:
        """Response headers with the result of compression and the number of cached tokens."""
        cached = _cached_tokens(self.choices, self.job.choices_each)
        headers = self.first_headers() | {"x-triptych-cached-tokens": str(cached)}
        if compression := _compression(self.choices):
            headers["x-triptych-compression-method"] = str(compression["method"])
            headers["x-triptych-compression-policy"] = str(compression["policy"])
            headers["x-triptych-compression-ratio"] = str(compression["ratio"])
            headers["x-triptych-lowered-tokens"] = str(compression["lowered_tokens"])
            if measured := _fidelity_of(compression, self.job.fidelity):
                headers["x-triptych-estimated-kl"] = str(measured.kl)
            if choice := self.choices[0].choice:
                headers["x-triptych-method-choice"] = choice.reason
        return headers

    def first_headers(self) -> dict[str, str]:
        """The headers that are known before the first token."""
        return {"x-triptych-warning": self.warning} if self.warning else {}

    def chunks(self, choice: Choice, item: Tokens) -> Iterator[Json]:
        """The events for ``item``, which was added to ``choice`` already."""
        choice.unsent_ids += item.tokens
        for part in self._parts(choice, item):
            if self.job.token_ids:
                part["token_ids"], choice.unsent_ids = choice.unsent_ids, []
            chunk = self._frame(self.chunk_object, [part])
            if self.job.continuous_usage:
                chunk["usage"] = self._usage()
            elif self.job.include_usage:
                chunk["usage"] = None
            yield chunk

    def _ids(self, choice: Choice) -> Json:
        if not self.job.token_ids:
            return {}
        prompt = self.job.requests[choice.index].prompt
        return {"prompt_token_ids": list(prompt), "token_ids": choice.ids}

    def usage_chunk(self) -> Json:
        """The last event of a stream with ``include_usage``."""
        return self._frame(self.chunk_object, []) | {"usage": self._usage()}

    def _prompt_rows(self, choice: Choice) -> list[TokenRank]:
        """Log probabilities of the prompt's tokens without the first, which has none."""
        first = self.choices[choice.index - choice.index % self.job.choices_each]
        found = choice.prompt_logprobs or first.prompt_logprobs
        return list(found.rows()) if found else []

    def _prompt_logprobs(self, choice: Choice) -> Json:
        """vLLM's ``prompt_logprobs``: each prompt token and its alternatives."""
        top = self.job.prompt_logprobs
        if top < 0:
            return {}
        tokens = self.job.requests[choice.index].prompt[1:]
        rows = zip(tokens, self._prompt_rows(choice), strict=True)
        return {"prompt_logprobs": [None, *(self._ranked(token, row, top) for token, row in rows)]}

    def _ranked(self, token: int, row: TokenRank, top: int) -> Json:
        best = [(i, value, rank) for rank, (i, value) in enumerate(row.top[:top], 1)]
        return {
            str(one): {
                "logprob": finite_logprob(value),
                "rank": rank,
                "decoded_token": self._codec.token_bytes(one).decode("utf-8", errors="replace"),
            }
            for one, value, rank in [(token, row.logprob, row.rank), *best]
        }

    def _frame(self, kind: str, choices: list[Json]) -> Json:
        job = self.job
        frame: Json = {
            "id": job.id,
            "object": kind,
            "created": job.created,
            "model": job.model,
            "choices": choices,
        }
        return frame | {"system_fingerprint": job.fingerprint} if job.fingerprint else frame

    def _usage(self) -> Json:
        job = self.job
        return usage(
            job.prompt_tokens, self.choices, job.choices_each, job.fidelity, job.measured_on
        )

    @abstractmethod
    def _choice(self, choice: Choice) -> Json:
        """The JSON of a finished choice."""

    @abstractmethod
    def _parts(self, choice: Choice, item: Tokens) -> Iterator[Json]:
        """The JSON of ``choice`` in stream events for these tokens, one per event."""


class ChatResponseBuilder(ResponseBuilder):
    """``chat.completion``. All choices have one prompt, so its data stand beside the choices."""

    object = "chat.completion"
    chunk_object = "chat.completion.chunk"

    def __init__(self, job: Job, codec: TextCodec, warning: str = "") -> None:
        super().__init__(job, codec, warning)
        self._tool_parsers = [
            call_parser(job.tools, job.tool_format, calls_first=job.calls_first)
            for _ in job.requests
        ]
        self._reasoning_parsers = [ReasoningParser(job.thinking) for _ in job.requests]
        self._logprobs = [ChatLogprobs(codec, one.sampling) for one in job.requests]

    def whole(self) -> Json:
        return super().whole() | self._prompt_logprobs(self.choices[0])

    def _choice(self, choice: Choice) -> Json:
        output = "".join(choice.texts)
        reasoning, text, calls = self._read(choice, output, choice.finish)
        message: Json = {"role": "assistant", "content": text, "refusal": None}
        if reasoning:
            message |= {"content": text or None, "reasoning_content": reasoning}
        if calls:
            message |= {"content": text or None, "tool_calls": calls}
        return {
            "index": choice.index,
            "message": message,
            "logprobs": self._content(choice, output, choice.logprobs),
            "finish_reason": self._finish(choice),
            **choice.ending,
        }

    def _parts(self, choice: Choice, item: Tokens) -> Iterator[Json]:
        if not choice.opened:
            choice.opened = True
            yield self._part(choice, {"role": "assistant", "content": ""})
        reasoning, text, calls = self._read(choice, item.text, item.finish)
        logprobs = self._content(choice, item.text, item.logprobs)
        if reasoning:
            yield self._part(choice, {"reasoning_content": reasoning}, logprobs)
            logprobs = None
        if text or logprobs:
            yield self._part(choice, {"content": text}, logprobs)
        first = self._tool_parsers[choice.index].calls - len(calls)
        for index, call in enumerate(calls, first):
            yield self._part(choice, {"tool_calls": [{"index": index, **call}]})
        if item.finish:
            last = self._part(choice, {})
            yield last | {"finish_reason": self._finish(choice), **choice.ending}

    def _read(
        self, choice: Choice, text: str, finish: FinishReason | None
    ) -> tuple[str, str, list[Json]]:
        """The reasoning, the text and the tool calls that a piece of output adds."""
        parser = self._reasoning_parsers[choice.index]
        reasoning, text = parser.read(text, finish=finish)
        reasoning = reasoning if self.job.shows_reasoning else ""
        if not self.job.tools:
            return reasoning, text, []
        pieces = list(self._tool_parsers[choice.index].read(text, finish=finish))
        calls = [piece for piece in pieces if isinstance(piece, ParsedCall)]
        text = "".join(piece for piece in pieces if isinstance(piece, str))
        return (
            reasoning,
            text,
            [
                {
                    "id": call.id,
                    "type": "function",
                    "function": {"name": call.name, "arguments": call.arguments},
                }
                for call in calls
            ],
        )

    def _finish(self, choice: Choice) -> str | None:
        """OpenAI's ``finish_reason`` of a choice; ``length`` if it ends inside a tool call."""
        parser = self._tool_parsers[choice.index]
        if parser.is_cut:
            return "length"
        return "tool_calls" if parser.calls and choice.finish == "stop" else choice.finish

    def _part(self, choice: Choice, delta: Json, logprobs: Json | None = None) -> Json:
        return {
            "index": choice.index,
            "delta": delta,
            "logprobs": logprobs,
            "finish_reason": None,
        }

    def _content(self, choice: Choice, text: str, entries: Sequence[TokenLogprob]) -> Json | None:
        """The log probabilities that a piece of output completes; None if there are none."""
        logprobs = self._logprobs[choice.index]
        content = list(
            logprobs.finish(text, entries, choice.stop)
            if choice.finish
            else logprobs.push(text, entries)
        )
        return {"content": content, "refusal": None} if content else None


class CompletionResponseBuilder(ResponseBuilder):
    """``text_completion``."""

    object = "text_completion"
    chunk_object = "text_completion"

    def _choice(self, choice: Choice) -> Json:
        text = choice.echo + "".join(choice.texts)
        whole = self._part(choice, text, choice.logprobs, self._echoed(choice))
        return whole | self._prompt_logprobs(choice)

    def _parts(self, choice: Choice, item: Tokens) -> Iterator[Json]:
        text = item.text if choice.opened else choice.echo + item.text
        echoed = [] if choice.opened else self._echoed(choice)
        choice.opened = True
        if text or item.logprobs or item.finish:
            yield self._part(choice, text, item.logprobs, echoed)

    def _echoed(self, choice: Choice) -> list[TokenLogprob | int]:
        """The echoed log probabilities of the prompt; its first token has only an id."""
        top = self.job.echo_logprobs
        if top < 0:
            return []
        first, *rest = self.job.requests[choice.index].prompt
        rows = zip(rest, self._prompt_rows(choice), strict=True)
        return [
            first,
            *(
                TokenLogprob(token=token, logprob=row.logprob, top=row.top[:top])
                for token, row in rows
            ),
        ]

    def _part(
        self,
        choice: Choice,
        text: str,
        logprobs: Sequence[TokenLogprob],
        echoed: Sequence[TokenLogprob | int],
    ) -> Json:
        entries = [*echoed, *logprobs]
        return {
            "index": choice.index,
            "text": text,
            "logprobs": self._logprobs(choice, entries) if entries else None,
            "finish_reason": choice.finish,
            **choice.ending,
        }

    def _logprobs(self, choice: Choice, entries: Sequence[TokenLogprob | int]) -> Json:
        offsets, tokens = list[int](), list[str]()
        values, tops = list[float | None](), list[Json | None]()
        for entry in entries:
            token = entry if isinstance(entry, int) else entry.token
            offsets.append(choice.chars)
            choice.chars += _characters(self._codec.token_bytes(token))
            tokens.append(self._name(token))
            values.append(None if isinstance(entry, int) else finite_logprob(entry.logprob))
            tops.append(None if isinstance(entry, int) else self._top(entry))
        return {
            "text_offset": offsets,
            "token_logprobs": values,
            "tokens": tokens,
            "top_logprobs": tops,
        }

    def _top(self, entry: TokenLogprob) -> Json:
        best: Json = {self._name(token): finite_logprob(value) for token, value in entry.top}
        return best | {self._name(entry.token): finite_logprob(entry.logprob)}

    def _name(self, token: int) -> str:
        """A token's text, or its bytes in OpenAI's notation if they are not valid UTF-8."""
        raw = self._codec.token_bytes(token)
        try:
            return raw.decode()
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in raw)


def _characters(raw: bytes) -> int:
    """Number of characters that begin in these bytes, that is, of non-continuation bytes."""
    return sum(byte & 0xC0 != 0x80 for byte in raw)

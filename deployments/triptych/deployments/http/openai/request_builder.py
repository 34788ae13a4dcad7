"""Builds the engine's requests from a validated body."""

import secrets
import time
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from triptych.core.config import IngressConfig
from triptych.core.errors import (
    ModelNotFound,
    PromptTooLong,
    RequestError,
    UnknownMethod,
    Unsupported,
)
from triptych.core.images import Image, ImageSpan, expand_images
from triptych.core.messages import Floor, Request, Sampling, Slo
from triptych.core.methods.frontier import check_max_kl, nearest
from triptych.core.plugin_overrides import check_floor, check_scores, overrides_of
from triptych.core.profile import Fidelity
from triptych.deployments.grammars import process_compiler
from triptych.deployments.http.interfaces import AUTO, Engine, ModelCard
from triptych.deployments.http.keys import NO_CLIENT, Client
from triptych.deployments.http.openai.chat_images import (
    check_fields,
    image_sources,
    with_images,
)
from triptych.deployments.http.openai.chat_template import ALWAYS_TAKEN, ChatTemplate
from triptych.deployments.http.openai.guided_decoding import OutputConstraint, constraint_of
from triptych.deployments.http.openai.protocol import (
    ChatBody,
    CompletionBody,
    GenerationBody,
    Message,
    Rendering,
    Tool,
)
from triptych.deployments.http.openai.reasoning_parser import Thinking
from triptych.deployments.http.openai.tool_parser import (
    RESULT_ROLES,
    ToolFormat,
    calls_come_first,
    signature_of,
    tools_of,
    turns_of,
)
from triptych.deployments.http.openai.tool_parser import grammar_of as grammar_of_calls
from triptych.deployments.http.tokenizer import TextCodec
from triptych.deployments.images import process_decoder

DEFAULT_COMPLETION_TOKENS = 16
"""OpenAI's default of ``max_tokens`` for ``/v1/completions``."""

SEEDS = 2**63

TAIL_TOKENS = 16
"""Last tokens of a prompt, which show whether reasoning has begun."""

MAX_CUT = 8
"""Contexts that a prompt may have before ``truncate_prompt_tokens`` cuts it, if it is long."""

MAX_PROMPT_LOGPROBS = 200_000
"""Most log probabilities of prompts in one response; as JSON they take 16 MB."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """One client request, ready to run: one engine request per choice."""

    id: str
    created: int
    """Unix time in seconds."""
    model: str
    fingerprint: str = ""
    """``system_fingerprint`` of the answer; empty: none."""
    requests: tuple[Request, ...]
    prompt_tokens: int
    """Tokens of all prompts; each prompt counts once for all its choices."""
    stream: bool
    include_usage: bool
    """Send the usage as a last event of the stream."""
    continuous_usage: bool
    """Send the usage so far with each event."""
    token_ids: bool
    """Return the token ids of prompt and output beside the text, as vLLM does."""
    choices_each: int = 1
    """Choices of one prompt; they follow each other in ``requests``."""
    echo: tuple[str, ...]
    """Text of the prompt that each choice repeats before its output."""
    tools: frozenset[str] = frozenset()
    """Names of the tools that the output may call."""
    calls_first: bool = False
    """Whether an answer that does not begin with a call, after reasoning, has none."""
    tool_format: ToolFormat = ToolFormat.TAGS
    """How calls are written."""
    thinking: Thinking = Thinking.NO
    """How outputs begin."""
    shows_reasoning: bool = True
    prompt_logprobs: int = -1
    """Alternatives per token of the prompt to report, as vLLM does; -1: no report."""
    fidelity: Mapping[str, Fidelity] = field(default_factory=dict[str, Fidelity])
    """Measured error of compression methods at about this length; empty if none holds."""
    measured_on: str = ""
    """The model and the texts with which ``fidelity`` was measured."""
    is_prompt_alone: bool = False
    """Return only the prompt with its log probabilities, and no output tokens."""
    echo_logprobs: int = -1
    """Alternatives per prompt token in the echoed log probabilities; -1: none."""
    images: tuple[Image, ...] = ()
    """Images that the prompt names, in order."""


class RequestBuilder:
    """Checks a body against the model and the settings, and tokenizes its prompts."""

    def __init__(
        self, *, engine: Engine, codec: TextCodec, model: ModelCard, config: IngressConfig
    ) -> None:
        self._engine = engine
        self._codec = codec
        self._model = model
        self._config = config
        self._template = ChatTemplate(codec.tokenizer, model.reasoning)
        self.grammars = process_compiler()
        self.images = process_decoder(config.images)

    def warm_up(self) -> None:
        """Look at the chat template now instead of at the first chat; in a thread."""
        self._template.warm_up()

    def check_model(self, name: str | None) -> None:
        """Raises: ModelNotFound"""
        if name is not None and name not in self._model.names:
            names = ", ".join(map(repr, self._model.names))
            text = f"The model {name[:128]!r} does not exist. This server has {names}."
            raise ModelNotFound(text, "model")

    async def chat(self, body: ChatBody, client: Client = NO_CLIENT) -> Job:
        """Raises: RequestError naming the field that cannot be served"""
        self.check_model(body.model)
        self._check(body)
        if body.functions:
            raise Unsupported("functions: send them as tools", "functions")
        if body.top_logprobs and not body.logprobs:
            raise RequestError("top_logprobs needs logprobs: true", "top_logprobs")
        tools = tools_of(body)
        most = self._most_tokens(body)
        images = await self._images(body)
        prompt = await self.encode_messages(body.messages, body, tools, max_tokens=most)
        self.check_token_ids(prompt, "messages")
        spans: tuple[ImageSpan, ...] = ()
        if self._model.images is not None:
            prompt, spans = expand_images(prompt, images, self._model.images)
        prompt = self._truncated(prompt, body)
        logprobs = body.top_logprobs if body.logprobs else -1
        thinking = self._template.thinking(await self._codec.decode(prompt[-TAIL_TOKENS:]))
        sampling = await self._sampling(body, logprobs, tools, thinking)
        job = self._job("chatcmpl", body, [prompt], "messages", sampling)
        if images:
            job = self._with_images(job, images, spans, body)
        job = replace(
            job,
            tools=frozenset(tool.function.name for tool in tools),
            calls_first=bool(tools) and calls_come_first(body, constraint_of(body)),
            tool_format=self._tool_format(tools),
            thinking=thinking,
            shows_reasoning=body.include_reasoning,
        )
        job = self._with_prompt_logprobs(job, body)
        return self._owned(job, body, client)

    async def _images(self, body: ChatBody) -> tuple[Image, ...]:
        """The decoded images of all messages, in order.

        Raises: RequestError; Unsupported if the model reads none, or a field does not go with them
        """
        sources = image_sources(body.messages)
        if not sources:
            return ()
        if self._model.images is None:
            raise Unsupported(f"images: {self._model.images_reason}", sources[0].param)
        check_fields(body)
        return await self.images.decode(sources)

    def _with_images(
        self, job: Job, images: tuple[Image, ...], spans: tuple[ImageSpan, ...], body: ChatBody
    ) -> Job:
        """Add the images to the requests, which must fit the model's own context.

        Raises: PromptTooLong
        """
        wanted, name = body.answer_tokens
        most = self._model.window_tokens or self._model.context_tokens
        room = most - job.prompt_tokens
        if room < max(1, wanted or 1):
            param = "messages" if room < 1 else name
            raise PromptTooLong(_too_long(most, job.prompt_tokens, wanted, "messages"), param)
        requests = tuple(with_images(request, spans, room) for request in job.requests)
        return replace(job, requests=requests, images=images)

    async def completion(self, body: CompletionBody, client: Client = NO_CLIENT) -> Job:
        """Raises: RequestError naming the field that cannot be served"""
        self.check_model(body.model)
        self._check(body)
        if body.suffix:
            raise RequestError("this model cannot fill in before a suffix", "suffix")
        if body.max_tokens == 0 and not body.echo:
            text = "max_tokens=0: nothing would be answered; with echo: true the prompt is"
            raise RequestError(text, "max_tokens")
        if body.best_of > body.n:
            raise Unsupported("best_of larger than n", "best_of")
        given = await self._encode_prompts(body)
        for prompt in given:
            self.check_token_ids(prompt, "prompt")
        prompts = [self._truncated(prompt, body) for prompt in given]
        whole = body.prompts if prompts == given else prompts
        texts = await self._texts(whole) if body.echo else [""] * len(prompts)
        logprobs = -1 if body.logprobs is None else body.logprobs
        sampling = await self._sampling(body, logprobs)
        job = self._job("cmpl", body, prompts, "prompt", sampling, texts)
        job = replace(job, is_prompt_alone=body.max_tokens == 0)
        if body.echo and body.logprobs is not None:
            job = replace(job, echo_logprobs=logprobs)
        job = self._with_prompt_logprobs(job, body)
        return self._owned(job, body, client)

    def _with_prompt_logprobs(self, job: Job, body: GenerationBody) -> Job:
        """Request the log probabilities of each prompt from one of its choices.

        Raises: RequestError if a stream requests them, whose events have no field for them, or if
            they are too many
        """
        shown = -1 if body.prompt_logprobs is None else body.prompt_logprobs
        top, name = max(shown, job.echo_logprobs), "prompt_logprobs" if shown >= 0 else "logprobs"
        if top < 0:
            return job
        if shown >= 0 and job.stream:
            raise RequestError("prompt_logprobs come with whole answers: send stream: false", name)
        values = job.prompt_tokens * (1 + top)
        if values > MAX_PROMPT_LOGPROBS:
            text = (
                f"{name}={top} of {job.prompt_tokens} tokens of prompts are {values} values: at "
                f"most {MAX_PROMPT_LOGPROBS}; ask for fewer alternatives, or send shorter prompts"
            )
            raise RequestError(text, name)
        longest, window = max(len(one.prompt) for one in job.requests), self._model.window_tokens
        if 0 < window <= longest:
            text = (
                f"{name} of a prompt of {longest} tokens: this model reads less than {window} at "
                "once, and longer ones in windows; send parts that are shorter"
            )
            raise RequestError(text, name)
        # In a stream any choice of a prompt may have the first event.
        first = range(0, len(job.requests), 1 if job.stream else job.choices_each)
        requests = (
            replace(request, sampling=replace(request.sampling, prompt_logprobs=top))
            if index in first
            else request
            for index, request in enumerate(job.requests)
        )
        return replace(job, requests=tuple(requests), prompt_logprobs=shown)

    def _owned(self, job: Job, body: GenerationBody, client: Client) -> Job:
        """Set tenant, cache salt, session, weight, priority, SLOs, plug-ins, floor and compression
        method of the requests.

        The client's salt is "" or has a fixed length, so no two pairs of it and a body's are equal.

        Raises: RequestError if a method or a plug-in override is not offered, or the floor or the
            method forbids it, or no method meets the limit of KL
        """
        method, limit = self._method(body, client), self._max_kl(body, client)
        overrides = overrides_of(body.plugins, self._model.plugins)
        floor = strictest(self._model.floor, client.floor, body.compression.floor)
        check_floor(floor, self._model.plugins, overrides)
        adapts = method == AUTO
        names = self._model.adaptive if adapts else (method,)
        for tokens in {len(request.prompt) for request in job.requests}:
            check_max_kl(self._model.fidelity, names, limit, tokens)
        for name in filter(None, names):
            scoring = self._model.scoring_methods
            check_scores(name, scoring, self._model.plugins, overrides)
        salt = f"{'' if self._config.share_prefixes else client.salt}:{body.cache_salt or ''}"
        mine = {
            "cache_salt": salt,
            "tenant": client.tenant,
            "session": body.session_id or "",
            "weight": client.weight,
            "priority": body.priority,
            "slo": _slo(body),
            "plugin_overrides": overrides,
            "floor": floor,
            "method": "" if adapts or method in self._model.methods[:1] else method,
            "max_kl": limit,
            "adapts": adapts,
        }
        owned = tuple(replace(request, **mine) for request in job.requests)
        return replace(
            job,
            requests=owned,
            fidelity=self._fidelity(owned, floor),
            measured_on=self._model.measured_on,
        )

    async def encode_messages(
        self,
        messages: Sequence[Message],
        how: Rendering,
        tools: Sequence[Tool] = (),
        *,
        max_tokens: int | None = None,
    ) -> list[int]:
        if how.chat_template is not None:
            raise Unsupported("chat_template: templates come with the model", "chat_template")
        if how.continue_final_message and how.add_generation_prompt:
            text = "continue_final_message needs add_generation_prompt: false"
            raise RequestError(text, "continue_final_message")
        native = self._template.tool_format if self._has_calls(messages, tools) else None
        turns = turns_of(messages, tools, native)
        # The template only adds tokens, so this rejects nothing that fits.
        self._codec.check_length(sum(len(one.text) for one in messages), "messages")
        if how.continue_final_message and messages[-1].images:
            text = "continue_final_message: the last message has an image"
            raise RequestError(text, "continue_final_message")
        if self._codec.has_template and self._template.takes_parts:
            turns = [_with_parts(turn) for turn in turns]
        return await self._codec.encode_chat(
            turns,
            add_generation_prompt=how.add_generation_prompt,
            continue_final=how.continue_final_message,
            options=self._options(how),
            tools=[signature_of(tool) for tool in tools] if native and tools else None,
            max_tokens=max_tokens,
        )

    def _tool_format(self, tools: Sequence[Tool]) -> ToolFormat:
        """How calls are written; models are told of tags if their template has no form."""
        return (self._template.tool_format if tools else None) or ToolFormat.TAGS

    @staticmethod
    def _has_calls(messages: Sequence[Message], tools: Sequence[Tool]) -> bool:
        """Whether there are tools, calls or results for the template."""
        return bool(tools) or any(one.calls or one.role in RESULT_ROLES for one in messages)

    def _options(self, how: Rendering) -> dict[str, object]:
        """Variables of the template.

        Raises: RequestError for one that the template does not have
        """
        given, field = how.chat_template_kwargs, "chat_template_kwargs"
        for name, value in given.items():
            if name in ALWAYS_TAKEN:
                if value is not None and not isinstance(value, bool):
                    raise RequestError(f"{field}.{name}: expected true or false", f"{field}.{name}")
            elif name not in self._template.variables:
                shown = name[:64]
                text = f"{field}.{shown}: the model's chat template has no such variable"
                raise RequestError(text, f"{field}.{shown}")
        found = {name: value for name, value in given.items() if value is not None}
        if how.documents:
            if not self._template.takes_documents:
                text = "documents: the model's chat template has none; put them into messages"
                raise Unsupported(text, "documents")
            found["documents"] = how.documents
        return {**self._template.effort(how.reasoning_effort), **found}

    def _truncated(self, prompt: list[int], body: GenerationBody) -> list[int]:
        """The last ``truncate_prompt_tokens`` tokens of a prompt.

        Raises: RequestError if none is left
        """
        keep = body.truncate_prompt_tokens
        if keep is None:
            return prompt
        if keep == 0:
            text = "truncate_prompt_tokens=0: it leaves nothing of the prompt"
            raise RequestError(text, "truncate_prompt_tokens")
        if keep < 0:
            keep = max(1, self._model.max_model_len - max(body.answer_tokens[0] or 1, 1))
        return prompt[len(prompt) - keep :] if keep < len(prompt) else prompt

    async def _encode_prompts(self, body: CompletionBody) -> list[list[int]]:
        texts = [prompt for prompt in body.prompts if isinstance(prompt, str)]
        for text in texts:
            self._codec.check_length(len(text), "prompt")
        if texts:
            return await self._codec.encode_all(texts, max_tokens=self._most_tokens(body))
        return [prompt for prompt in body.prompts if not isinstance(prompt, str)]

    def _most_tokens(self, body: GenerationBody) -> int:
        """The tokens up to which a prompt is encoded; fewer if it is not to be truncated."""
        is_cut = body.truncate_prompt_tokens is not None
        return self._model.max_model_len * (MAX_CUT if is_cut else 1)

    def check_token_ids(self, ids: Sequence[int], param: str) -> None:
        """Raises: RequestError if an id is outside of the vocabulary"""
        size = self._vocab_tokens
        if ids and max(ids) >= size:
            raise RequestError(f"token id {max(ids)}: the vocabulary has {size} tokens", param)

    @property
    def _vocab_tokens(self) -> int:
        """Token ids that tokenizer and model both have. Either can have more than the other."""
        known = self._codec.vocab_tokens
        return min(known, self._model.vocab_tokens or known)

    async def _texts(self, prompts: Sequence[str | list[int]]) -> list[str]:
        return [p if isinstance(p, str) else await self._codec.decode(p) for p in prompts]

    def _check(self, body: GenerationBody) -> None:
        if body.n > self._config.max_choices:
            raise RequestError(f"n={body.n}: at most {self._config.max_choices} choices", "n")
        if body.stream_options and not body.stream:
            raise RequestError("stream_options needs stream: true", "stream_options")
        self.check_token_ids(body.stop_token_ids, "stop_token_ids")
        ttft_ms, deadline_ms = body.ttft_slo_ms, body.deadline_ms
        if ttft_ms and deadline_ms and ttft_ms > deadline_ms:
            text = f"ttft_slo_ms={ttft_ms:g} is later than deadline_ms={deadline_ms:g}"
            raise RequestError(text, "ttft_slo_ms")

    def _job(
        self,
        prefix: str,
        body: GenerationBody,
        prompts: Sequence[Sequence[int]],
        param: str,
        sampling: Sampling,
        texts: Sequence[str] = ("",),
    ) -> Job:
        name = f"{prefix}-{uuid.uuid4().hex}"
        seed = secrets.randbelow(SEEDS) if body.seed is None else body.seed
        requests: list[Request] = []
        for prompt in prompts:
            limit = self._answer_tokens(body, len(prompt), param)
            for _ in range(body.n):
                index = len(requests)
                request = Request(
                    id=f"{name}-{index}",
                    prompt=tuple(prompt),
                    # Prefill samples a token in any case; with max_tokens=0 it is not returned.
                    sampling=replace(
                        sampling, max_tokens=max(limit, 1), seed=(seed + index) % SEEDS
                    ),
                    reply_to=self._engine.address,
                )
                requests.append(request)
        options = body.stream_options
        return Job(
            id=name,
            created=int(time.time()),
            model=self._model.name,
            fingerprint=self._model.fingerprint,
            requests=tuple(requests),
            prompt_tokens=sum(map(len, prompts)),
            stream=body.stream,
            include_usage=options is not None and options.include_usage,
            continuous_usage=options is not None and options.continuous_usage_stats,
            token_ids=body.return_token_ids,
            choices_each=body.n,
            echo=tuple(text for text in texts for _ in range(body.n)),
        )

    def _fidelity(self, requests: Sequence[Request], floor: Floor) -> dict[str, Fidelity]:
        """The measured error of each compression method.

        Empty if they enable a plug-in, or with another floor than it was measured with.
        """
        if floor != self._model.floor:
            return {}
        if any(switch.on for request in requests for switch in request.plugin_overrides):
            return {}
        longest = max(len(request.prompt) for request in requests)
        found = {name: nearest(each, longest) for name, each in self._model.fidelity.items()}
        return {name: one for name, one in found.items() if one is not None}

    def _max_kl(self, body: GenerationBody, client: Client) -> float:
        """The smallest limit of KL of the server, the key and a body; 0: none has one."""
        limits = (self._model.max_kl, client.max_kl, body.compression.max_kl or 0.0)
        return min(filter(None, limits), default=0.0)

    def _method(self, body: GenerationBody, client: Client) -> str:
        """The compression method of a body: its own, the key's, or the server's default.

        ``AUTO`` if the router is to choose it.

        Raises: UnknownMethod with the methods that the server offers
        """
        offered = self._model.offered
        default = AUTO if self._model.adaptive else "".join(offered[:1])
        name = body.compression.method or client.method or default
        if name and name not in offered:
            raise UnknownMethod(name, offered)
        return name

    def _answer_tokens(self, body: GenerationBody, prompt_tokens: int, param: str) -> int:
        """The most output tokens of a request.

        Raises: PromptTooLong with both numbers; RequestError for an empty prompt
        """
        if prompt_tokens == 0:
            raise RequestError("the prompt has no tokens", param)
        wanted, name = body.answer_tokens
        room = self._model.max_model_len - prompt_tokens
        if room < 1:
            most = self._model.max_model_len
            raise PromptTooLong(_too_long(most, prompt_tokens, wanted, param), param)
        if wanted is not None and prompt_tokens + wanted > self._model.context_tokens:
            most = self._model.context_tokens
            raise PromptTooLong(_too_long(most, prompt_tokens, wanted, param), name)
        default = room if isinstance(body, ChatBody) else DEFAULT_COMPLETION_TOKENS
        usual = min(room, int(self._model.sampling_defaults.get("max_tokens", default)))
        limit = usual if wanted is None else wanted
        if body.min_tokens > limit:
            text = f"min_tokens={body.min_tokens} is more than the answer may have: {limit}"
            raise RequestError(text, "min_tokens")
        return limit

    async def _grammar(
        self,
        body: GenerationBody,
        tools: Sequence[Tool],
        constraint: OutputConstraint | None,
        thinking: Thinking,
    ) -> str:
        """The grammar of the output; empty: it is free."""
        if tools and isinstance(body, ChatBody):
            form = self._tool_format(tools)
            return await grammar_of_calls(body, tools, self.grammars, constraint, thinking, form)
        return "" if constraint is None else await constraint.grammar(self.grammars, thinking)

    async def _sampling(
        self,
        body: GenerationBody,
        logprobs: int,
        tools: Sequence[Tool] = (),
        thinking: Thinking = Thinking.NO,
    ) -> Sampling:
        constraint = constraint_of(body)
        calls_first = isinstance(body, ChatBody) and calls_come_first(body, constraint)
        calls_first = calls_first and thinking is Thinking.NO
        grammar = await self._grammar(body, tools, constraint, thinking)
        return Sampling(
            grammar=grammar,
            tool_calls=bool(tools),
            tool_calls_first=bool(tools) and calls_first,
            temperature=self._value(body, "temperature", body.temperature),
            top_k=max(int(self._value(body, "top_k", body.top_k)), 0),
            top_p=self._value(body, "top_p", body.top_p),
            min_p=self._value(body, "min_p", body.min_p),
            repetition_penalty=self._value(body, "repetition_penalty", body.repetition_penalty),
            presence_penalty=float(body.presence_penalty),
            frequency_penalty=float(body.frequency_penalty),
            logit_bias=self._logit_bias(body.logit_bias),
            min_tokens=body.min_tokens,
            ignore_eos=body.ignore_eos and not grammar,
            stop=body.stops,
            include_stop=body.include_stop_str_in_output,
            stop_token_ids=tuple(body.stop_token_ids),
            logprobs=logprobs,
            skip_special_tokens=body.skip_special_tokens
            and not self._tool_format(tools).shows_special_tokens,
        )

    def _value(self, body: GenerationBody, name: str, given: float) -> float:
        """A field's value, or the model's default if the request leaves it out."""
        is_given = name in body.model_fields_set
        return float(given if is_given else self._model.sampling_defaults.get(name, given))

    def _logit_bias(self, bias: Mapping[str, float]) -> tuple[tuple[int, float], ...]:
        size = self._vocab_tokens
        for key in bias:
            fits = key.isascii() and key.isdigit() and len(key) <= 10 and int(key) < size
            if not fits:
                text = f"{key[:32]!r} is not a token id below {size}"
                raise RequestError(text, f"logit_bias.{key[:32]}")
        return tuple((int(key), float(value)) for key, value in bias.items())


def _with_parts(turn: dict[str, object]) -> dict[str, object]:
    """A message whose content is a list of parts."""
    if isinstance(turn["content"], list):
        return turn
    return {**turn, "content": [{"type": "text", "text": turn["content"]}]}


def strictest(*floors: Floor) -> Floor:
    """The highest of some floors."""
    return "high" if "high" in floors else "low"


def _slo(body: GenerationBody) -> Slo:
    return Slo(
        ttft_s=(body.ttft_slo_ms or 0.0) / 1e3,
        tpot_s=(body.tpot_slo_ms or 0.0) / 1e3,
        deadline_s=(body.deadline_ms or 0.0) / 1e3,
    )


def _too_long(most: int, prompt_tokens: int, wanted: int | None, param: str) -> str:
    # Clients recognise this error by the words of its first sentence.
    asked = (
        f"your {param} resulted in {prompt_tokens} tokens"
        if wanted is None
        else f"you requested {prompt_tokens + wanted} tokens "
        f"({prompt_tokens} in the {param}, {wanted} in the completion)"
    )
    return (
        f"This model's maximum context length is {most} tokens. However, {asked}. Please reduce "
        f"the length of the {param} or of the completion."
    )

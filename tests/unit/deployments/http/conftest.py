"""A real uvicorn on loopback, a tiny real tokenizer, and an engine that spells the alphabet."""

import asyncio
import struct
import threading
import time
from collections.abc import AsyncGenerator, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import httpx
import pytest
import uvicorn
from tokenizers import Tokenizer as RustTokenizer
from tokenizers import decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from triptych.core.config import IngressConfig
from triptych.core.images import Image
from triptych.core.messages import (
    ClassShares,
    CompressionReport,
    Failed,
    PromptLogprobs,
    Request,
    TokenLogprob,
    Tokens,
)
from triptych.deployments.http import Health, ModelCard, OpenAIServing, create_app
from triptych.deployments.http.interfaces import Engine

MODEL = "tiny"
CONTEXT_TOKENS = 2048
MAX_BODY_BYTES = 256 << 10
KEEP_ALIVE_S = 0.3

CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n"
    "{{ message['content'] | trim }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def make_tokenizer() -> PreTrainedTokenizerFast:
    """A byte-level BPE of about 300 tokens with a ChatML template."""
    rust = RustTokenizer(models.BPE())
    rust.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    rust.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=320,
        special_tokens=["<|endoftext|>", "<|im_start|>", "<|im_end|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    rust.train_from_iterator(
        ["the user and the assistant talk about the weather in | im _"], trainer
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=rust,
        eos_token="<|im_end|>",
        chat_template=CHAT_TEMPLATE,
    )


@pytest.fixture(scope="session")
def tokenizer() -> PreTrainedTokenizerFast:
    return make_tokenizer()


def make_engine(tokenizer: PreTrainedTokenizerFast) -> "FakeEngine":
    """One that knows the letters of the alphabet."""
    letters = [tokenizer.convert_tokens_to_ids(chr(ord("a") + i)) for i in range(26)]
    return FakeEngine(letters=letters)


@dataclass
class FakeEngine:
    """Answers any prompt with letters; which one comes first depends on the seed."""

    letters: list[int]
    """Token ids of a..z."""
    delay_s: float = 0.0
    first_delay_s: float = 0.0
    refusal: Exception | None = None
    """Raised before anything is generated."""
    crash: Exception | None = None
    """Raised after ``fail_after`` tokens."""
    failure: Failed | None = None
    """Yielded for the last request after ``fail_after`` tokens."""
    fail_after: int = 0
    health_state: Health = field(default_factory=lambda: Health(ok=True))
    held_back: int = 0
    """Tokens that come without text at first."""
    cached_tokens: int = 0
    """Told with the first token of each request."""
    script: str = ""
    """What it says instead of letters, a character a token."""
    stop_at: int = -1
    """The token that ends the answer as one of ``stop_token_ids`` does."""
    address: str = "ingress-0"
    calls: list[tuple[Request, ...]] = field(default_factory=list)
    images: Sequence[Image] = ()
    running: int = 0
    closed_at: float = 0.0

    async def health(self) -> Health:
        return self.health_state

    async def generate(
        self, requests: Sequence[Request], images: Sequence[Image] = ()
    ) -> AsyncGenerator[Tokens | Failed, None]:
        self.images = images
        self.calls.append(tuple(requests))
        self.running += 1
        try:
            if self.refusal:
                raise self.refusal
            await asyncio.sleep(self.first_delay_s)
            done: set[str] = set()
            texts = {request.id: "" for request in requests}
            step = 0
            while len(done) < len(requests):
                if step == self.fail_after and self.crash:
                    raise self.crash
                if step == self.fail_after and self.failure:
                    yield self.failure
                    return
                for request in requests:
                    if request.id not in done:
                        item = self._step(request, step, texts)
                        if item.finish:
                            done.add(request.id)
                        yield item
                step += 1
                await asyncio.sleep(self.delay_s)
        finally:
            self.running -= 1
            self.closed_at = time.monotonic()

    def _step(self, request: Request, step: int, texts: dict[str, str]) -> Tokens:
        sampling = request.sampling
        at = (sampling.seed + step) % 26
        token, text = self.letters[at], chr(ord("a") + at)
        if self.script:
            text = self.script[step : step + 1]
        stop = next((s for s in sampling.stop if (texts[request.id] + text).endswith(s)), None)
        texts[request.id] += text
        last = step + 1 == sampling.max_tokens
        logprobs = ()
        if sampling.logprobs >= 0:
            top = [(token, -0.5), (self.letters[(at + 1) % 26], float("-inf"))]
            logprobs = (
                TokenLogprob(token=token, logprob=-0.5, top=tuple(top[: sampling.logprobs])),
            )
        return Tokens(
            request=request.id,
            index=step,
            tokens=(token,),
            text="" if stop or step < self.held_back else text,
            logprobs=logprobs,
            finish="stop"
            if stop or step == self.stop_at or (self.script and not text)
            else "length"
            if last
            else None,
            stop=stop,
            cached_tokens=0 if step else self.cached_tokens,
            prompt_logprobs=None if step else scores(request),
            compression=CompressionReport(
                policy=request.method or "uniform:k8v4",
                raw_bytes=3000,
                stored_bytes=1000,
                classes=ClassShares(recent=0.25, high=0.5, low=0.125, pruned=0.125),
            )
            if last or stop
            else None,
        )


def scores(request: Request) -> PromptLogprobs | None:
    """Position i of the prompt has log probability -i; token 5 has -0.5 everywhere, 6 has none."""
    top, rows = request.sampling.prompt_logprobs, len(request.prompt) - 1
    if top < 0:
        return None
    best = [(5, -0.5), (6, float("-inf")), *((7 + i, -9.0) for i in range(18))][:top]
    values = [v for i in range(rows) for v in (-1.0 - i, *(value for _, value in best))]
    return PromptLogprobs(
        top=top,
        ids=struct.pack(f"<{rows * top}i", *(i for i, _ in best * rows)),
        logprobs=struct.pack(f"<{len(values)}f", *values),
        ranks=struct.pack(f"<{rows}i", *range(2, rows + 2)),
    )


@dataclass(frozen=True)
class Server:
    """Where the app listens."""

    url: str
    port: int


@dataclass
class LateEngine:
    """Passes to whichever fake engine the current test uses."""

    current: FakeEngine
    address: str = "ingress-0"

    def generate(
        self, requests: Sequence[Request], images: Sequence[Image] = ()
    ) -> AsyncGenerator[Tokens | Failed, None]:
        return self.current.generate(requests, images)

    async def health(self) -> Health:
        return await self.current.health()


async def fake_gauges() -> dict[str, float]:
    return {'triptych_pool_pages{state="free"}': 7, 'triptych_pool_pages{state="held"}': 1}


@pytest.fixture(scope="session")
def late_engine() -> LateEngine:
    return LateEngine(FakeEngine(letters=[]))


@pytest.fixture(scope="session")
def server(tokenizer: PreTrainedTokenizerFast, late_engine: LateEngine) -> Iterator[Server]:
    with serve_app(tokenizer, late_engine, request_timeout_s=1.5) as server:
        yield server


CARD = ModelCard(name=MODEL, context_tokens=CONTEXT_TOKENS, created=1_700_000_000)


def make_serving(
    engine: Engine,
    tokenizer: PreTrainedTokenizerFast,
    config: IngressConfig,
    card: ModelCard = CARD,
) -> OpenAIServing:
    return OpenAIServing(
        engine=engine, tokenizer=tokenizer, model=card, config=config, probe_age_s=0.0
    )


@contextmanager
def serve_app(
    tokenizer: PreTrainedTokenizerFast,
    engine: Engine,
    *,
    request_timeout_s: float = 60.0,
    card: ModelCard = CARD,
    **settings: bool,
) -> Iterator[Server]:
    """The app on a free port of loopback, on a thread of its own."""
    limits = {"max_body_bytes": MAX_BODY_BYTES, "max_choices": 4}
    config = IngressConfig(**limits, request_timeout_s=request_timeout_s, **settings)
    serving = make_serving(engine, tokenizer, config, card)
    app = create_app(serving, gauges=fake_gauges, keep_alive_s=KEEP_ALIVE_S)
    config = uvicorn.Config(app, host="127.0.0.1", port=0, log_level="warning", lifespan="off")
    uvicorn_server = uvicorn.Server(config)
    thread = threading.Thread(target=uvicorn_server.run, daemon=True)
    thread.start()
    while not uvicorn_server.started:
        time.sleep(0.01)
    port = uvicorn_server.servers[0].sockets[0].getsockname()[1]
    yield Server(url=f"http://127.0.0.1:{port}", port=port)
    uvicorn_server.should_exit = True
    thread.join(10)


@pytest.fixture
def engine(late_engine: LateEngine, tokenizer: PreTrainedTokenizerFast) -> FakeEngine:
    """A fresh engine behind the running server."""
    late_engine.current = make_engine(tokenizer)
    return late_engine.current


@pytest.fixture(scope="session")
def http(server: Server) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=server.url, timeout=10) as client:
        yield client

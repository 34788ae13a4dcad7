"""A small OpenAI-compatible server on loopback with known delays and known faults."""

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import uvicorn
from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, Response, StreamingResponse


@dataclass
class FakeOpenAI:
    """Answers with ``x`` tokens; each attribute is one way in which servers differ."""

    takes_token_ids: bool = True
    first_token_s: float = 0.0
    token_s: float = 0.0
    tokens_per_chunk: int = 1
    continuous_usage: bool = False
    template_tokens: int = 0
    """Tokens that a chat template or a start token adds to a text prompt."""
    fail_request: int = -1
    """This request, counted from 0, gets an error event after its first token."""
    break_request: int = -1
    """This one's stream ends without a word."""
    status: int = 200
    gauges: dict[str, float] = field(default_factory=dict)
    """What it says at ``/metrics``."""
    bodies: list[dict[str, Any]] = field(default_factory=list)
    running: int = 0
    most_running: int = 0

    def app(self) -> FastAPI:
        app = FastAPI()
        app.post("/v1/completions")(self.completions)
        app.post("/v1/chat/completions")(self.chat)
        app.get("/v1/models")(self.models)
        app.get("/metrics")(self.metrics)
        return app

    async def models(self) -> dict[str, Any]:
        return {"object": "list", "data": [{"id": "fake", "object": "model"}]}

    async def metrics(self) -> Response:
        return Response("".join(f"{name} {value}\n" for name, value in self.gauges.items()))

    async def completions(self, request: Request) -> Response:
        body = await request.json()
        return self._answer(body, body["prompt"], chat=False)

    async def chat(self, request: Request) -> Response:
        body = await request.json()
        return self._answer(body, body["messages"][0]["content"], chat=True)

    def _answer(self, body: dict[str, Any], prompt: str | list[int], *, chat: bool) -> Response:
        if self.status != 200 or (isinstance(prompt, list) and not self.takes_token_ids):
            status = self.status if self.status != 200 else 400
            return JSONResponse({"error": {"message": "no", "type": "x"}}, status_code=status)
        number = len(self.bodies)
        self.bodies.append(body)
        read = len(prompt) if isinstance(prompt, list) else len(prompt.split())
        read += 0 if isinstance(prompt, list) else self.template_tokens
        events = self._events(number, read, body["max_tokens"], chat=chat)
        return StreamingResponse(events, media_type="text/event-stream")

    async def _events(
        self, number: int, read: int, wanted: int, *, chat: bool
    ) -> AsyncIterator[str]:
        self.running += 1
        self.most_running = max(self.most_running, self.running)
        try:
            async for event in self._stream(number, read, wanted, chat=chat):
                yield event
        finally:
            self.running -= 1

    async def _stream(
        self, number: int, read: int, wanted: int, *, chat: bool
    ) -> AsyncIterator[str]:
        def event(choices: list[dict[str, Any]], usage: dict[str, int] | None = None) -> str:
            return f"data: {json.dumps({'choices': choices, 'usage': usage})}\n\n"

        def usage(written: int) -> dict[str, int]:
            return {"prompt_tokens": read, "completion_tokens": written}

        yield ": keep-alive\n\n"
        if chat:
            yield event([{"index": 0, "delta": {"role": "assistant", "content": ""}}])
        await asyncio.sleep(self.first_token_s)
        for done in range(0, wanted, self.tokens_per_chunk):
            if done:
                await asyncio.sleep(self.token_s)
                if number == self.break_request:
                    return
                if number == self.fail_request:
                    yield 'data: {"error": {"message": "lost", "type": "server_error"}}\n\n'
                    break
            count = min(self.tokens_per_chunk, wanted - done)
            part = {"delta": {"content": "x" * count}} if chat else {"text": "x" * count}
            so_far = usage(done + count) if self.continuous_usage else None
            yield event([{"index": 0, **part}], so_far)
        yield event([{"index": 0, "delta": {}, "text": "", "finish_reason": "length"}])
        yield event([], usage(wanted))
        yield "data: [DONE]\n\n"


@asynccontextmanager
async def serving(fake: FakeOpenAI) -> AsyncIterator[str]:
    """Serve on a free port of loopback; gives the URL."""
    config = uvicorn.Config(fake.app(), host="127.0.0.1", port=0, log_level="error", ws="none")
    server = uvicorn.Server(config)
    config.load()
    server.lifespan = config.lifespan_class(config)
    await server.startup()
    task = asyncio.create_task(server.main_loop())
    port = server.servers[0].sockets[0].getsockname()[1]
    try:
        yield f"http://127.0.0.1:{port}"
    finally:
        server.should_exit = True
        await task
        await server.shutdown()

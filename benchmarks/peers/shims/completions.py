"""``/v1/completions`` for engines without a server: token ids in, a stream of tokens out.

Runs in the environment of a peer, and imports nothing of Triptych.
"""

import asyncio
import json
from collections.abc import AsyncGenerator, Callable, Sequence
from typing import Any, Protocol

import uvicorn
from fastapi import FastAPI, Request
from fastapi.responses import StreamingResponse

OnTokens = Callable[[Sequence[int]], None]
"""Called from any thread with new tokens of an answer; with none at its end."""


class Engine(Protocol):
    """Batches requests in a thread of its own."""

    def submit(self, prompt: Sequence[int], output_tokens: int, on_tokens: OnTokens) -> None:
        """Begin an answer of exactly this length: greedy, and past the end token."""
        ...

    def text(self, tokens: Sequence[int]) -> str:
        """Text of some tokens."""
        ...


def serve(engine: Engine, port: int) -> None:
    """Answer requests until the process is interrupted."""

    async def completions(request: Request) -> StreamingResponse:
        events = answer(engine, await request.json())
        return StreamingResponse(events, media_type="text/event-stream")

    app = FastAPI()
    app.add_api_route("/health", lambda: {})
    app.add_api_route("/v1/completions", completions, methods=["POST"])
    uvicorn.run(app, host="127.0.0.1", port=port, log_level="warning")


async def answer(engine: Engine, body: dict[str, Any]) -> AsyncGenerator[bytes]:
    """Events of one answer; each has the number of tokens so far."""
    prompt, wanted, count = body["prompt"], body["max_tokens"], 0
    loop, arrived = asyncio.get_running_loop(), asyncio.Queue[Sequence[int]]()
    engine.submit(
        prompt, wanted, lambda new: loop.call_soon_threadsafe(arrived.put_nowait, new) and None
    )
    while tokens := await arrived.get():
        count += len(tokens)
        choice = {"index": 0, "text": engine.text(tokens), "finish_reason": None}
        usage = {"prompt_tokens": len(prompt), "completion_tokens": count}
        yield event(json.dumps({"choices": [choice], "usage": usage}))
    if count != wanted:
        yield event(json.dumps({"error": f"{count} of {wanted} tokens"}))
    yield event("[DONE]")


def event(data: str) -> bytes:
    return f"data: {data}\n\n".encode()

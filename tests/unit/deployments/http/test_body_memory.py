"""What a request that waits for its answer keeps of its body."""

import asyncio
import json
import tracemalloc
from collections.abc import Mapping

import pytest

from tests.unit.deployments.http.conftest import fake_gauges, make_engine, make_serving
from triptych.core.config import IngressConfig
from triptych.deployments.http import create_app

SIZE = 3 << 20


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions"])
async def test_the_body_of_a_request_that_waits_is_freed(
    tokenizer, path: str, stream: bool
) -> None:
    engine = make_engine(tokenizer)
    engine.first_delay_s = 3600
    app = create_app(make_serving(engine, tokenizer, IngressConfig()), gauges=fake_gauges)
    prompt = {"messages": [{"role": "user", "content": "a"}]} if "chat" in path else {"prompt": "a"}
    received = False

    async def receive() -> Mapping[str, object]:
        nonlocal received
        if received:
            await asyncio.Event().wait()
        received = True
        body = {**prompt, "max_tokens": 4, "stream": stream, "comment": "x" * SIZE}
        return {"type": "http.request", "body": json.dumps(body).encode(), "more_body": False}

    async def send(_message: Mapping[str, object]) -> None:
        pass

    headers = [(b"content-type", b"application/json"), (b"host", b"x")]
    scope = {
        "type": "http",
        "asgi": {"version": "3.0"},
        "http_version": "1.1",
        "method": "POST",
        "path": path,
        "raw_path": path.encode(),
        "query_string": b"",
        "root_path": "",
        "scheme": "http",
        "headers": headers,
        "client": ("127.0.0.1", 1),
        "server": ("127.0.0.1", 2),
    }
    tracemalloc.start()
    try:
        task = asyncio.create_task(app(scope, receive, send))
        async with asyncio.timeout(60):
            while not engine.running:  # noqa: ASYNC110  # what is awaited happens in the app
                await asyncio.sleep(0.01)
        assert tracemalloc.get_traced_memory()[1] > SIZE
        assert tracemalloc.get_traced_memory()[0] < SIZE // 2
    finally:
        tracemalloc.stop()
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)

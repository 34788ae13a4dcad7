"""``triptych chat`` prints what a server streams."""

import asyncio
import io
import threading
from collections.abc import Iterator
from concurrent.futures import Future

import pytest

from tests.unit.cli.conftest import Run
from tests.unit.cli.fake_openai import FakeOpenAI, serving


@pytest.fixture
def fake() -> FakeOpenAI:
    return FakeOpenAI()


@pytest.fixture
def url(fake: FakeOpenAI) -> Iterator[str]:
    """The fake server, on a thread of its own."""
    ready, done = Future[str](), threading.Event()

    async def serve() -> None:
        async with serving(fake) as url:
            ready.set_result(url)
            await asyncio.to_thread(done.wait)

    thread = threading.Thread(target=asyncio.run, args=(serve(),), daemon=True)
    thread.start()
    yield ready.result(10)
    done.set()
    thread.join(10)


def test_one_message_is_answered(run: Run, fake: FakeOpenAI, url: str) -> None:
    code, out, _ = run("chat", "How are you?", "--url", url, "--max-tokens", "5")
    assert (code, out) == (0, "xxxxx\n")
    (body,) = fake.bodies
    assert body["model"] == "fake"
    assert body["messages"][0] == {"role": "user", "content": "How are you?"}


def test_a_conversation_keeps_its_messages(
    run: Run, fake: FakeOpenAI, url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO("hello\n\nand you?\n"))
    code, _, _ = run("chat", "--url", url, "--max-tokens", "2", "--system", "Be brief.")
    assert code == 0
    roles = [one["role"] for one in fake.bodies[-1]["messages"]]
    assert roles == ["system", "user", "assistant", "user"]
    assert fake.bodies[-1]["messages"][2]["content"] == "xx"


def test_an_error_of_the_server_is_one_line(run: Run, fake: FakeOpenAI, url: str) -> None:
    fake.status = 429
    code, out, err = run("chat", "How are you?", "--url", url, "--max-tokens", "5")
    assert (code, out) == (1, "")
    assert "429: no" in err
    assert run("chat", "a", "--url", "http://127.0.0.1:9")[0] == 1

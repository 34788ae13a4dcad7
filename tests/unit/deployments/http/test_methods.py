"""Compression methods of the API: body, header, key and server, and what is refused."""

from dataclasses import replace
from itertools import product
from pathlib import Path

import httpx
import pytest

from tests.unit.deployments.http.test_keys import entry, write
from tests.unit.deployments.http.test_plugins import BODIES
from tests.unit.router.driver import MODEL
from triptych.core.config import IngressConfig
from triptych.core.errors import ConfigError
from triptych.core.plugin_overrides import OverridablePlugin
from triptych.core.policy import Policy
from triptych.core.profile import Fidelity
from triptych.deployments.http import ModelCard, OpenAIServing, create_app
from triptych.deployments.http.keys import check_methods, read_keys

METHODS = ("diffkv", "uniform:k8v4", "uniform:fp16")
MEASURED = Fidelity(
    context=1024, bytes_ratio=0.25, kl=0.004, top1_agreement=0.97, perplexity_ratio=1.0
)


PRUNE = OverridablePlugin(plugin="soft_prune", on=False, needs_scores=True)


def client_of(tokenizer, engine, path: Path, adaptive: tuple[str, ...] = ()) -> httpx.AsyncClient:
    card = ModelCard(
        name="tiny",
        context_tokens=2048,
        created=0,
        methods=METHODS,
        adaptive=adaptive,
        scoring_methods=METHODS[:1],
        plugins=(PRUNE,),
        fidelity={"uniform:fp16": (MEASURED,)},
        measured_on="tiny, texts 0123",
    )
    config = IngressConfig(api_keys=str(path))
    serving = OpenAIServing(engine=engine, tokenizer=tokenizer, model=card, config=config)
    transport = httpx.ASGITransport(app=create_app(serving))
    headers = {"authorization": "Bearer ada-key"}
    return httpx.AsyncClient(transport=transport, base_url="http://here", headers=headers)


@pytest.mark.parametrize("path", BODIES)
async def test_the_body_goes_before_the_header_the_key_and_the_server(
    tokenizer, engine, tmp_path: Path, path: str
) -> None:
    wanted = ("uniform:k8v4", "uniform:fp16", "diffkv")
    for key, header, asked in product(("", wanted[0]), (None, wanted[1]), (None, wanted[2])):
        keys = write(tmp_path / "keys.yaml", entry("ada", method=key))
        headers = {"x-compression-method": header} if header else {}
        body = BODIES[path] | ({"compression": {"method": asked}} if asked else {})
        async with client_of(tokenizer, engine, keys) as client:
            response = await client.post(path, json=body, headers=headers)
        assert response.status_code == 200, response.text
        expected = asked or header or key or METHODS[0]
        sent = "" if expected == METHODS[0] else expected
        assert {request.method for request in engine.calls[-1]} == {sent}
        told = response.json()["usage"]["compression"]
        assert (told["estimated_error"] is not None) == (expected == "uniform:fp16")


@pytest.mark.parametrize("where", ["body", "header", "key"])
async def test_a_method_that_is_not_offered_is_refused_with_those_that_are(
    tokenizer, engine, tmp_path: Path, where: str
) -> None:
    keys = write(tmp_path / "keys.yaml", entry("ada", method="kivi" if where == "key" else ""))
    body = {"compression": {"method": "kivi"}} if where == "body" else {}
    headers = {"x-compression-method": "kivi"} if where == "header" else {}
    async with client_of(tokenizer, engine, keys) as client:
        response = await client.post(
            "/v1/completions", json={"prompt": "x", **body}, headers=headers
        )
    assert response.status_code == 400
    error = response.json()["error"]
    assert (error["param"], error["code"]) == ("compression.method", "unknown_method")
    assert "'kivi': this server offers 'diffkv', 'uniform:k8v4', 'uniform:fp16'" in error["message"]
    assert engine.calls == []


async def test_a_plugin_that_needs_scores_is_refused_with_a_method_without(
    tokenizer, engine, tmp_path: Path
) -> None:
    keys = write(tmp_path / "keys.yaml", entry("ada"))
    for method, status in (("uniform:fp16", 400), ("diffkv", 200)):
        body = {"prompt": "x", "plugins": {"soft_prune": True}, "compression": {"method": method}}
        async with client_of(tokenizer, engine, keys) as client:
            response = await client.post("/v1/completions", json=body)
        assert response.status_code == status
        if status == 400:
            error = response.json()["error"]
            assert error["param"] == "plugins.soft_prune"
            assert "'uniform:fp16' does not measure (methods that do: 'diffkv')" in error["message"]


async def test_the_list_of_models_and_the_metrics_name_the_methods(
    tokenizer, engine, tmp_path: Path
) -> None:
    keys = write(tmp_path / "keys.yaml", entry("ada"))
    async with client_of(tokenizer, engine, keys) as client:
        (card,) = (await client.get("/v1/models")).json()["data"]
        assert card["compression_methods"] == list(METHODS)
        await client.post("/v1/completions", json={"prompt": "x", "max_tokens": 2})
        text = (await client.get("/metrics")).text
    for method, count in (("uniform:k8v4", 1), ("diffkv", 0), ("uniform:fp16", 0)):
        line = f'triptych_compression_method_choices_total{{method="{method}"}} {count:.1f}'
        assert line in text, "the engine says that it has compressed with uniform:k8v4"


async def test_a_limit_of_kl_is_checked_and_sent_and_the_router_chooses_where_it_may(
    tokenizer, engine, tmp_path: Path
) -> None:
    """The smallest limit of body and key counts, and a method that is named must meet it."""
    keys = write(tmp_path / "keys.yaml", entry("ada", max_kl=0.01))
    auto = {"adapts": True, "method": ""}
    cases = [
        ({}, {**auto, "max_kl": 0.01}),
        ({"method": "auto", "max_kl": 0.005}, {**auto, "max_kl": 0.005}),
        ({"method": "uniform:fp16"}, {"adapts": False, "method": "uniform:fp16", "max_kl": 0.01}),
        ({"max_kl": 0.001}, "max_kl=0.001 (of the request, its key or the server): of "),
        ({"max_kl": 0.001}, "the nearest is 'uniform:fp16' with 0.004: raise the limit"),
        ({"method": "uniform:k8v4"}, "'uniform:k8v4' no method has so small"),
        ({"method": "uniform:k8v4"}, "none of them was measured"),
    ]
    for asked, expected in cases:
        body = {"prompt": "x", "compression": asked}
        async with client_of(tokenizer, engine, keys, adaptive=METHODS) as client:
            response = await client.post("/v1/completions", json=body)
        if isinstance(expected, str):
            assert (response.status_code, engine.calls) == (400, [])
            error = response.json()["error"]
            assert (error["param"], error["code"]) == ("compression.max_kl", "floor_not_met")
            assert expected in error["message"]
        else:
            (sent,) = engine.calls.pop()
            assert {name: getattr(sent, name) for name in expected} == expected


def test_a_server_does_not_begin_with_a_key_of_a_method_that_it_lacks(tmp_path: Path) -> None:
    policy = Policy(name="leankv", high_format="k8v4")
    plan = replace(MODEL.plan, others=(policy,))
    keys = read_keys(write(tmp_path / "keys.yaml", entry("ada", method="leankv")))
    check_methods(keys, plan)
    with pytest.raises(
        ConfigError, match=r"method='leankv' of 'ada': expected one of 'uniform:k8v4'"
    ):
        check_methods(keys, replace(plan, others=()))
    limited = read_keys(write(tmp_path / "keys.yaml", entry("ada", max_kl=0.1)))
    with pytest.raises(ConfigError, match=r"max_kl=0.1 of 'ada': .* none of them was measured"):
        check_methods(limited, plan)

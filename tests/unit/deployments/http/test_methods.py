"""Compression methods of the API: body, header, key and server, and what is refused."""

from itertools import product
from pathlib import Path

import httpx
import pytest

from tests.unit.deployments.http.test_keys import entry, write
from tests.unit.deployments.http.test_plugins import BODIES
from triptych.core.config import IngressConfig
from triptych.core.errors import ConfigError
from triptych.core.plugin_overrides import OverridablePlugin
from triptych.core.profile import Fidelity
from triptych.deployments.http import ModelCard, OpenAIServing, create_app
from triptych.deployments.http.keys import check_methods, read_keys

METHODS = ("diffkv", "uniform:k8v4", "uniform:fp16")
MEASURED = Fidelity(
    context=1024, bytes_ratio=0.25, kl=0.004, top1_agreement=0.97, perplexity_ratio=1.0
)


PRUNE = OverridablePlugin(plugin="soft_prune", on=False, needs_scores=True)


def client_of(tokenizer, engine, path: Path) -> httpx.AsyncClient:
    card = ModelCard(
        name="tiny",
        context_tokens=2048,
        created=0,
        methods=METHODS,
        scoring_methods=METHODS[:1],
        plugins=(PRUNE,),
        fidelity={"diffkv": (MEASURED,)},
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
        assert (told["estimated_error"] is not None) == (expected == "diffkv")


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


def test_a_server_does_not_begin_with_a_key_of_a_method_that_it_lacks(tmp_path: Path) -> None:
    keys = read_keys(write(tmp_path / "keys.yaml", entry("ada", method="leankv")))
    check_methods(keys, ("diffkv", "leankv"))
    with pytest.raises(ConfigError, match=r"method='leankv' of 'ada': expected one of 'diffkv'"):
        check_methods(keys, ("diffkv",))

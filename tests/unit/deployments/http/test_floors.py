"""Floors: the strictest of the server's, the key's and the request's holds, and bad ones are
refused before anything runs."""

from itertools import product
from pathlib import Path

import httpx
import pytest

from tests.unit.deployments.http.test_keys import entry, write
from tests.unit.deployments.http.test_plugins import BODIES
from triptych.core.config import AppConfig, IngressConfig
from triptych.core.errors import ConfigError, RequestError
from triptych.core.messages import PluginOverride
from triptych.core.plugin_overrides import OverridablePlugin, check_floor
from triptych.deployments.app_plan import AppPlan
from triptych.deployments.http import ModelCard, OpenAIServing, create_app

FLOORS = ("low", "high")
PRUNE = OverridablePlugin(plugin="soft_prune", on=False, drops_tokens=True)
MEAN = OverridablePlugin(plugin="mean", on=False)


def client_of(tokenizer, engine, path: Path, server: str = "low") -> httpx.AsyncClient:
    card = ModelCard(
        name="tiny", context_tokens=2048, created=0, floor=server, plugins=(PRUNE, MEAN)
    )
    config = IngressConfig(api_keys=str(path))
    serving = OpenAIServing(engine=engine, tokenizer=tokenizer, model=card, config=config)
    transport = httpx.ASGITransport(app=create_app(serving))
    headers = {"authorization": "Bearer ada-key"}
    return httpx.AsyncClient(transport=transport, base_url="http://here", headers=headers)


@pytest.mark.parametrize("path", BODIES)
async def test_the_strictest_floor_holds(tokenizer, engine, tmp_path: Path, path: str) -> None:
    for server, key, asked in product(FLOORS, FLOORS, (None, *FLOORS)):
        keys = write(tmp_path / "keys.yaml", entry("ada", floor=key))
        body = BODIES[path] | ({"compression": {"floor": asked}} if asked else {})
        async with client_of(tokenizer, engine, keys, server) as client:
            response = await client.post(path, json=body)
        assert response.status_code == 200, response.text
        expected = "high" if "high" in (server, key, asked) else "low"
        assert {request.floor for request in engine.calls[-1]} == {expected}


@pytest.mark.parametrize(
    ("fields", "param", "says"),
    [
        ({"compression": {"floor": "middle"}}, "compression.floor", "'low' or 'high'"),
        ({"compression": {"floor": 8}}, "compression.floor", "'low' or 'high'"),
        ({"compression": "high"}, "compression", "object"),
        (
            {"compression": {"floor": "high"}, "plugins": {"soft_prune": True}},
            "plugins.soft_prune",
            "drops tokens",
        ),
        (
            {"compression": {"floor": "high"}, "plugins": {"soft_prune": {}}},
            "plugins.soft_prune",
            "drops tokens",
        ),
    ],
)
async def test_unknown_and_contradictory_floors_are_refused(
    tokenizer, engine, tmp_path: Path, fields: dict[str, object], param: str, says: str
) -> None:
    keys = write(tmp_path / "keys.yaml", entry("ada"))
    async with client_of(tokenizer, engine, keys) as client:
        response = await client.post("/v1/completions", json={"prompt": "x", **fields})
    assert response.status_code == 400
    error = response.json()["error"]
    assert error["param"] == param
    assert says in error["message"]
    assert engine.calls == []


def test_a_plugin_that_is_off_or_drops_nothing_does_not_contradict_a_floor() -> None:
    for name, on in (("mean", True), ("soft_prune", False)):
        check_floor("high", (PRUNE, MEAN), (PluginOverride(plugin=name, on=on),))
    with pytest.raises(RequestError, match="soft_prune"):
        check_floor("high", (PRUNE, MEAN), (PluginOverride(plugin="soft_prune"),))


def test_a_server_does_not_begin_with_a_floor_and_a_plugin_that_drops_tokens() -> None:
    config = AppConfig.from_mapping({"compressor": {"floor": "high"}})

    class Plan:
        offers = (OverridablePlugin(plugin="soft_prune", on=True, drops_tokens=True),)

    Plan.config = config  # type: ignore[attr-defined]
    with pytest.raises(ConfigError, match=r"compressor\.floor=high: the plug-in 'soft_prune'"):
        AppPlan._check_floor(Plan)  # type: ignore[arg-type]

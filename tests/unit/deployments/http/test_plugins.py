"""Plug-ins of the decode step as requests see them: what they may change, what they are told."""

import json
from dataclasses import replace

import grpc
import httpx
import pytest
from google.protobuf.struct_pb2 import Struct

from tests.unit.deployments.http.conftest import FakeEngine, make_engine
from triptych.core.config import IngressConfig
from triptych.core.errors import RequestError
from triptych.core.messages import PluginOverride, Request, Tokens
from triptych.core.plugin_overrides import OptionRange, OverridablePlugin, overrides_of
from triptych.deployments.grpc.bodies import body_of
from triptych.deployments.grpc.triptych_pb2 import CompletionRequest
from triptych.deployments.http import ModelCard, OpenAIServing, create_app

OFFERS = (
    OverridablePlugin(
        plugin="selection",
        on=True,
        bounds={
            "keep_fraction": OptionRange(default=0.3, least=0.1, most=1.0, is_whole=False),
            "budget_tokens": OptionRange(default=2048, least=0, most=4096, is_whole=True),
        },
    ),
    OverridablePlugin(plugin="mean", on=False),
    OverridablePlugin(plugin="calm_stop", on=False, needs=("mean",)),
)


class Ended(FakeEngine):
    """Its answers are ended by a plug-in."""

    def _step(self, request: Request, step: int, texts: dict[str, str]) -> Tokens:
        item = super()._step(request, step, texts)
        return replace(item, finish="stop", ended_by="calm_stop") if step == 1 else item


@pytest.fixture
def engine(tokenizer) -> FakeEngine:
    return Ended(letters=make_engine(tokenizer).letters)


@pytest.fixture
async def http(engine, tokenizer):
    card = ModelCard(name="tiny", context_tokens=2048, created=0, plugins=OFFERS)
    serving = OpenAIServing(engine=engine, tokenizer=tokenizer, model=card, config=IngressConfig())
    transport = httpx.ASGITransport(app=create_app(serving))
    async with httpx.AsyncClient(transport=transport, base_url="http://here") as client:
        yield client


BODIES = {
    "/v1/completions": {"prompt": "x", "max_tokens": 9},
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "x"}], "max_tokens": 9},
}


@pytest.mark.parametrize("path", BODIES)
async def test_a_request_switches_plugins_and_sets_their_options(http, engine, path):
    wanted = {"selection": {"keep_fraction": 1, "budget_tokens": 64}, "mean": True}
    body = {**BODIES[path], "n": 2, "plugins": {**wanted, "calm_stop": {}}}
    assert (await http.post(path, json=body)).status_code == 200
    for request in engine.calls[-1]:
        assert request.plugin_overrides == (
            PluginOverride(
                plugin="selection", options={"keep_fraction": 1.0, "budget_tokens": 64.0}
            ),
            PluginOverride(plugin="mean", on=True),
            PluginOverride(plugin="calm_stop", on=True),
        )
    assert (await http.post(path, json=BODIES[path])).status_code == 200
    assert engine.calls[-1][0].plugin_overrides == ()


@pytest.mark.parametrize(
    ("wanted", "param", "says"),
    [
        ({"selektion": False}, "plugins.selektion", "have: calm_stop, mean, selection"),
        ({"selection": {"method": 1}}, "plugins.selection.method", "may set budget_tokens, keep"),
        ({"mean": {"x": 1}}, "plugins.mean.x", "may set none of its options"),
        (
            {"selection": {"keep_fraction": 0.05}},
            "plugins.selection.keep_fraction",
            "expected a number from 0.1 to 1",
        ),
        (
            {"selection": {"budget_tokens": 1.5}},
            "plugins.selection.budget_tokens",
            "expected a whole number from 0 to 4096",
        ),
        ({"calm_stop": True}, "plugins.calm_stop", "needs 'mean': switch both on, or both off"),
        ({"selection": 1}, "plugins.selection", "an object"),
        ({"selection": {"keep_fraction": True}}, "plugins.selection.keep_fraction", "number"),
        ({"selection": {"keep_fraction": "1"}}, "plugins.selection.keep_fraction", "number"),
        ({"": False}, "plugins", "at least 1 character"),
        (["selection"], "plugins", "an object"),
        ({f"p{i}": False for i in range(33)}, "plugins", "at most 32 plug-ins"),
        ({"mean": {f"o{i}": 1 for i in range(33)}}, "plugins", "at most 32 options"),
    ],
)
async def test_what_is_not_offered_is_a_400_that_says_what_is(http, engine, wanted, param, says):
    for path, body in BODIES.items():
        answer = await http.post(path, json={**body, "plugins": wanted})
        error = answer.json()["error"]
        assert answer.status_code == 400
        assert error["param"].startswith(param)
        assert says in error["message"]
        assert len(error["message"]) < 1000
    assert not engine.calls


@pytest.mark.parametrize("number", ["NaN", "1e999"])
async def test_a_number_that_is_none_is_refused(http, number):
    text = f'{{"prompt": "x", "plugins": {{"selection": {{"keep_fraction": {number}}}}}}}'
    headers = {"content-type": "application/json"}
    answer = await http.post("/v1/completions", content=text, headers=headers)
    assert answer.status_code == 400


def test_grpc_carries_the_same_in_extra() -> None:
    extra = Struct()
    extra.update({"plugins": {"selection": {"keep_fraction": 0.5, "budget_tokens": 64}}})
    body = body_of(CompletionRequest(prompt=["x"], extra=extra))
    assert body["plugins"] == {"selection": {"keep_fraction": 0.5, "budget_tokens": 64}}
    assert grpc.__version__  # the message above needs no server


@pytest.mark.parametrize("path", BODIES)
async def test_the_client_is_told_which_plugin_ended_its_answer(http, path):
    whole = (await http.post(path, json=BODIES[path])).json()["choices"][0]
    assert (whole["finish_reason"], whole["ended_by"]) == ("stop", "calm_stop")
    assert whole["stop_reason"] is None
    lines = (await http.post(path, json={**BODIES[path], "stream": True})).text.split("\n\n")
    events = [json.loads(line.removeprefix("data: ")) for line in lines if "{" in line]
    told = [choice for event in events for choice in event["choices"]]
    assert [choice.get("ended_by") for choice in told if choice["finish_reason"]] == ["calm_stop"]
    metrics = (await http.get("/metrics")).text
    assert 'triptych_answers_ended_by_plugin_total{plugin="calm_stop"} 2.0' in metrics


async def test_the_model_card_says_what_may_be_changed(http):
    (card,) = (await http.get("/v1/models")).json()["data"]
    assert card["plugins"]["selection"] == {
        "enabled": True,
        "options": {
            "keep_fraction": {"default": 0.3, "minimum": 0.1, "maximum": 1.0},
            "budget_tokens": {"default": 2048, "minimum": 0, "maximum": 4096},
        },
    }
    assert card["plugins"]["mean"] == {"enabled": False, "options": {}}


def test_a_plugin_cannot_lose_what_it_needs() -> None:
    offers = [replace(offer, on=True) for offer in OFFERS]
    assert overrides_of({"mean": False, "calm_stop": False}, offers)
    with pytest.raises(RequestError, match="'calm_stop' needs 'mean'"):
        overrides_of({"mean": False}, offers)

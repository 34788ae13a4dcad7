"""Names of the model, its sampling defaults and its fingerprint, as clients see them."""

import json
from collections.abc import Iterator
from pathlib import Path

import openai
import pytest

from tests.unit.deployments.http.conftest import (
    CONTEXT_TOKENS,
    FakeEngine,
    make_engine,
    make_tokenizer,
    serve_app,
)
from triptych.core.errors import ModelError
from triptych.deployments.http import ModelCard
from triptych.workers.models.store.generation_config import read_sampling_defaults

CARD = ModelCard(
    name="Qwen/Qwen3-0.6B",
    aliases=("Qwen3-0.6B", "gpt-4"),
    root="/models/qwen",
    fingerprint="fp_1",
    context_tokens=CONTEXT_TOKENS,
    created=0,
    sampling_defaults={"temperature": 0.6, "top_k": 20, "top_p": 0.95, "max_tokens": 9},
)
CHAT = [{"role": "user", "content": "the weather"}]


@pytest.fixture(scope="module")
def own_engine() -> FakeEngine:
    return make_engine(make_tokenizer())


@pytest.fixture(scope="module")
def own_client(own_engine: FakeEngine) -> Iterator[openai.OpenAI]:
    with serve_app(make_tokenizer(), own_engine, card=CARD) as server:
        yield openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0)


def test_each_name_is_listed_and_served(own_client: openai.OpenAI) -> None:
    listed = own_client.models.list().data
    assert [one.id for one in listed] == list(CARD.names)
    assert {one.model_extra["root"] for one in listed if one.model_extra} == {"/models/qwen"}
    for name in CARD.names:
        assert own_client.models.retrieve(name).id == name
        answer = own_client.chat.completions.create(model=name, messages=CHAT, max_tokens=1)
        assert (answer.model, answer.system_fingerprint) == (CARD.name, "fp_1")
    with pytest.raises(openai.NotFoundError, match="'gpt-4'"):
        own_client.chat.completions.create(model="qwen3-0", messages=CHAT)


def test_a_field_that_is_left_out_has_the_default_of_the_model(
    own_client: openai.OpenAI, own_engine: FakeEngine
) -> None:
    own_client.chat.completions.create(model="gpt-4", messages=CHAT)
    sampling = own_engine.calls[-1][0].sampling
    assert (sampling.temperature, sampling.top_k, sampling.top_p) == (0.6, 20, 0.95)
    assert (sampling.min_p, sampling.max_tokens) == (0.0, 9)
    own_client.chat.completions.create(
        model="gpt-4", messages=CHAT, temperature=1.0, top_p=1.0, max_tokens=12
    )
    sampling = own_engine.calls[-1][0].sampling
    assert (sampling.temperature, sampling.top_k, sampling.top_p) == (1.0, 20, 1.0)
    assert sampling.max_tokens == 12


def test_defaults_that_requests_could_not_have_are_left_out(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    assert read_sampling_defaults(tmp_path) == {}
    settings = {
        "temperature": 0.7,
        "top_p": 1.5,
        "top_k": "many",
        "max_new_tokens": 7,
        "do_sample": 1,
    }
    (tmp_path / "generation_config.json").write_text(json.dumps(settings))
    assert read_sampling_defaults(tmp_path) == {"temperature": 0.7, "max_tokens": 7}
    assert len(caplog.records) == 2
    (tmp_path / "generation_config.json").write_text("[")
    with pytest.raises(ModelError, match="cannot be read"):
        read_sampling_defaults(tmp_path)

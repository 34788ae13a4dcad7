"""What asks a vLLM server for its metrics finds them here."""

import httpx
from prometheus_client.parser import text_string_to_metric_families

from tests.unit.deployments.http.conftest import MODEL, make_engine, make_tokenizer, serve_app
from triptych.deployments.http.vllm_metrics import FAMILIES, aliases


def test_they_are_there_if_asked_for_and_parse():
    tokenizer = make_tokenizer()
    with (
        serve_app(tokenizer, make_engine(tokenizer), vllm_metrics=True) as server,
        httpx.Client(base_url=server.url) as http,
    ):
        http.post("/v1/completions", json={"prompt": "x", "max_tokens": 4})
        text = http.get("/metrics").text
    found = {one.name: one for one in text_string_to_metric_families(text)}
    tokens = found["vllm:generation_tokens"]
    assert (tokens.type, tokens.samples[0].value) == ("counter", 4)
    assert tokens.samples[0].labels == {"model_name": MODEL, "engine": "0"}
    first = found["vllm:time_to_first_token_seconds"]
    ours = found["triptych_time_to_first_token_seconds"]
    assert first.type == ours.type == "histogram"
    assert [one.value for one in first.samples] == [one.value for one in ours.samples]
    ends = {one.labels["finished_reason"] for one in found["vllm:request_success"].samples}
    assert "length" in ends
    assert not [name for name in found if "created" in name and name.startswith("vllm")]


def test_they_are_not_there_unasked(http, engine):
    assert "vllm:" not in http.get("/metrics").text


def test_gauges_of_the_pool_that_only_grow_are_counters_there():
    text = "# TYPE triptych_prefix_cache_hits gauge\ntriptych_prefix_cache_hits 7.0\n"
    assert list(aliases(text, 'a"b')) == [
        "# TYPE vllm:prefix_cache_hits_total counter",
        'vllm:prefix_cache_hits_total{model_name="a\\"b",engine="0"} 7.0',
    ]


def test_other_names_are_ours_alone():
    text = "triptych_router_requests 1.0\ntriptych_num_requests_running_ever 1.0\n"
    assert list(aliases(text, "m")) == []
    assert {"num_requests_waiting", "kv_cache_usage_perc"} <= FAMILIES.keys()

"""Health, version and metrics."""

import re

import pytest
from prometheus_client.parser import text_string_to_metric_families

from triptych.core.errors import QueueFull
from triptych.deployments.http import Health

CHAT = "/v1/chat/completions"
HELLO = [{"role": "user", "content": "hello"}]


def sample(http, name: str) -> float:
    found = re.search(rf"^{re.escape(name)} (\S+)$", http.get("/metrics").text, re.MULTILINE)
    return float(found[1]) if found else 0.0


def test_health_is_an_empty_200_or_a_503_with_the_reason(http, engine):
    response = http.get("/health")
    assert (response.status_code, response.content) == (200, b"")
    engine.health_state = Health(ok=False, reason="no decode worker")
    response = http.get("/health")
    assert response.status_code == 503
    assert response.json()["error"]["message"] == "no decode worker"


def test_ready_is_health_and_live_is_not(http, engine):
    assert (http.get("/ready").status_code, http.get("/live").status_code) == (200, 200)
    engine.health_state = Health(ok=False, reason="no decode worker")
    assert (http.get("/ready").status_code, http.get("/live").status_code) == (503, 200)


def test_ping_is_health_and_load_counts_answers(http, engine):
    assert http.get("/ping").status_code == http.post("/ping").status_code == 200
    assert http.get("/load").json() == {"server_load": 0}
    engine.health_state = Health(ok=False, reason="no decode worker")
    assert http.get("/ping").status_code == 503


def test_a_model_is_ready_when_each_stage_has_a_worker(http, engine):
    assert http.get("/v1/models/tiny/ready").status_code == 200
    assert http.get("/v1/models/other/ready").status_code == 404
    engine.health_state = Health(ok=False, reason="no decode worker")
    assert http.get("/v1/models/tiny/ready").status_code == 503


def test_models_are_listed_when_they_are_served(http, engine):
    for path in ("/v1/models", "/v1/models/tiny"):
        engine.health_state = Health(ok=True)
        assert http.get(path).status_code == 200
        engine.health_state = Health(ok=False, reason="no decode worker")
        response = http.get(path)
        assert (response.status_code, response.headers["retry-after"]) == (503, "1")
        assert response.json()["error"]["message"] == "no decode worker"
    assert http.get("/v1/models/other").status_code == 404


def test_headers_say_what_compression_did(http, engine):
    engine.cached_tokens = 3
    asked = {"messages": HELLO, "max_tokens": 4, "n": 2}
    headers = http.post(CHAT, json=asked).headers
    assert headers["x-triptych-compression-policy"] == "uniform:k8v4"
    assert headers["x-triptych-compression-ratio"] == "3.0"
    assert headers["x-triptych-cached-tokens"] == "3"


def test_version(http, engine):
    assert re.fullmatch(r"\d+\.\d+.*", http.get("/version").json()["version"])


@pytest.mark.parametrize(
    ("name", "grows_by"),
    [
        ("triptych_time_to_first_token_seconds_count", 2),
        ("triptych_inter_token_latency_seconds_count", 6),
        ("triptych_request_time_per_output_token_seconds_count", 2),
        ("triptych_e2e_request_latency_seconds_count", 2),
        ("triptych_prompt_tokens_cached_total", 6),
        ("triptych_generation_tokens_total", 8),
        ('triptych_request_success_total{finished_reason="length"}', 2),
        ("triptych_kv_raw_bytes_total", 6000),
        ("triptych_kv_stored_bytes_total", 2000),
        ('triptych_kv_raw_bytes_by_class_total{token_class="high"}', 3000),
        ('triptych_kv_raw_bytes_by_class_total{token_class="pruned"}', 750),
    ],
)
def test_an_answer_is_counted(http, engine, name, grows_by):
    before, engine.cached_tokens = sample(http, name), 3
    http.post(CHAT, json={"messages": HELLO, "max_tokens": 4, "n": 2})
    assert sample(http, name) - before == grows_by
    assert sample(http, "triptych_num_requests_open") == 0


def test_rejections_are_counted_by_reason(http, engine):
    name = 'triptych_admission_rejections_total{reason="rate_limit_exceeded"}'
    before = sample(http, name)
    engine.refusal = QueueFull(waiting=3, limit=2, retry_after_s=4)
    http.post(CHAT, json={"messages": HELLO})
    assert sample(http, name) - before == 1
    assert sample(http, "triptych_num_requests_open") == 0


def test_failures_are_counted(http, engine):
    before = sample(http, "triptych_request_failed_total")
    engine.crash, engine.fail_after = RuntimeError(), 1
    http.post(CHAT, json={"messages": HELLO, "stream": True, "n": 2})
    assert sample(http, "triptych_request_failed_total") - before == 2


def test_values_of_other_parts_are_shown_with_their_labels(http, engine):
    text = http.get("/metrics").text
    assert text.count("# TYPE triptych_pool_pages gauge") == 1
    assert 'triptych_pool_pages{state="free"} 7.0\n' in text
    assert 'triptych_pool_pages{state="held"} 1.0\n' in text


def test_every_metric_can_be_parsed_by_prometheus(http, engine):
    families = list(text_string_to_metric_families(http.get("/metrics").text))
    assert all(family.name.startswith("triptych_") for family in families)
    assert len(families) >= 12


def test_what_a_client_wrote_is_not_logged(http, engine, caplog):
    caplog.set_level("DEBUG")
    wrong = [{"role": "my secret", "content": "my secret"}]
    answer = http.post("/v1/chat/completions", json={"messages": wrong})
    assert "my secret" in answer.json()["error"]["message"]
    assert http.post("/v1/completions", json={"prompt": "my secret"}).status_code == 200
    assert any("messages.0.role" in record.getMessage() for record in caplog.records)
    ours = [record for record in caplog.records if record.name.startswith("triptych")]
    assert ours
    assert not [record for record in ours if "my secret" in record.getMessage()]


@pytest.mark.parametrize("given", [f"00-{'ab' * 16}-{'cd' * 8}-01", "nonsense", None])
def test_a_request_is_part_of_its_clients_trace(http, engine, given):
    headers = {} if given is None else {"traceparent": given}
    body = {"prompt": "x", "max_tokens": 1, "n": 2}
    assert http.post("/v1/completions", json=body, headers=headers).status_code == 200
    wanted = given if given and given.startswith("00-") else ""
    assert [request.traceparent for request in engine.calls[0]] == [wanted] * 2

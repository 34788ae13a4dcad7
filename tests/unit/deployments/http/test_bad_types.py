"""Every field of a request with every wrong kind of value: a 4xx that names it, or an answer.

The fields are those of the models that check requests, so a new one is tried as well.
"""

import httpx
import pytest

from triptych.deployments.http.openai.protocol import (
    ChatBody,
    CompletionBody,
    DetokenizeBody,
    TokenizeBody,
)

HELLO = [{"role": "user", "content": "hello"}]
ROUTES = {
    "/v1/chat/completions": (ChatBody, {"messages": HELLO, "max_tokens": 2}),
    "/v1/completions": (CompletionBody, {"prompt": "hello", "max_tokens": 2}),
    "/tokenize": (TokenizeBody, {"prompt": "hello"}),
    "/detokenize": (DetokenizeBody, {"tokens": [5]}),
}
VALUES = (
    *(None, "", [], {}, True, -1, 0, 0.5, "1", "NaN", [None], [[]], [{}], {"a": 1}),
    *(2**31, 2**63, 2**64, -(2**63), 10**300, 1e300, "x" * 10**5, "\x00", "../../etc/passwd"),
)
BESIDE = {
    "max_completion_tokens": {"max_tokens"},
    "top_logprobs": {"logprobs"},
    "stream_options": {"stream"},
    "prompt": {"messages"},
    "messages": {"prompt"},
    "max_tokens": {"min_tokens"},
}
"""What an error about a field may name in its place."""

CASES = [
    (route, field.alias or name)
    for route, (kind, _) in ROUTES.items()
    for name, field in kind.model_fields.items()
]


def test_there_are_more_than_a_thousand() -> None:
    assert len(CASES) * len(VALUES) > 1000


@pytest.mark.parametrize(("route", "field"), CASES)
def test_whatever_a_field_is_the_server_answers(
    http: httpx.Client, engine, route: str, field: str
) -> None:
    _, body = ROUTES[route]
    for value in VALUES:
        engine.calls.clear()
        response = http.post(route, json={**body, field: value})
        told = f"{field}={str(value)[:40]!r}: {response.status_code} {response.text[:300]}"
        assert response.status_code in {200, 400, 404}, told
        if response.status_code == 200:
            continue
        error = response.json()["error"]
        assert set(error) == {"message", "type", "param", "code"}, told
        assert (error["param"] or "").split(".")[0] in {field, *BESIDE.get(field, ())}, told
        assert len(response.content) < 5000, told
        assert engine.calls == [], told
    assert http.get("/health").status_code == 200

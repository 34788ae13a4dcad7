"""Every field of a request with every wrong kind of value: a 4xx that names it, or an answer.

The fields are those of the models that check requests, so a new one is tried as well.
"""

from collections.abc import Iterator
from random import Random

import httpx
import pytest
import torch

from triptych.core.messages import Sampling
from triptych.deployments.http.openai.protocol import (
    Body,
    ChatBody,
    CompletionBody,
    DetokenizeBody,
    TokenizeBody,
    validate,
)
from triptych.workers.sampling.sampler import SamplerRow, sample

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


def numbers(schema: object, path: str = "") -> Iterator[tuple[str, dict[str, object]]]:
    """Every number of a JSON schema, with where it stands."""
    if isinstance(schema, dict):
        if schema.get("type") in ("number", "integer"):
            yield path, schema
        for name, part in schema.items():
            yield from numbers(part, f"{path}/{name}")
    elif isinstance(schema, list):
        for part in schema:
            yield from numbers(part, path)


@pytest.mark.parametrize("kind", [ChatBody, CompletionBody, TokenizeBody, DetokenizeBody])
def test_every_number_has_a_floor_and_a_ceiling(kind: type[Body]) -> None:
    found = dict(numbers(kind.model_json_schema()))
    # Each plug-in has bounds of its own for its options.
    found = {path: number for path, number in found.items() if "/plugins/" not in path}
    for path, number in found.items():
        assert {"minimum", "exclusiveMinimum"} & set(number), path
        assert {"maximum", "exclusiveMaximum"} & set(number), path


EXTREMES = {
    "temperature": [0.0, 5e-324, 2.0],
    "top_p": [5e-324, 1.0],
    "min_p": [0.0, 5e-324, 1.0],
    "repetition_penalty": [0.01, 10.0],
    "presence_penalty": [-2.0, 2.0],
    "frequency_penalty": [-2.0, 2.0],
    "top_k": [-1, 0, 1, 2**31 - 1],
    "logit_bias": [{}, {"5": 100.0, "6": -100.0}],
}


def test_no_extreme_of_sampling_gives_a_logit_that_is_not_finite() -> None:
    random, logits = Random(1), torch.randn(1, 64) * 100
    for _ in range(300):
        wanted = {name: random.choice(values) for name, values in EXTREMES.items()}
        body = validate(CompletionBody, {"prompt": "x", **wanted})
        bias = tuple((int(token), value) for token, value in body.logit_bias.items())
        names = set(EXTREMES) - {"logit_bias", "top_k"}
        sampling = Sampling(
            **{name: getattr(body, name) for name in names},
            logit_bias=bias,
            top_k=max(body.top_k, 0),
            seed=random.randrange(2**32),
        )
        (drawn,) = sample(logits, [SamplerRow(sampling, [3, 5], (), [5, 5, 7])])
        assert drawn.checked_token() >= 0

"""The OpenAPI document, generated from the models that validate requests."""

from collections.abc import Mapping
from functools import cache
from importlib.metadata import version

from pydantic.json_schema import JsonSchemaMode, models_json_schema

from triptych.deployments.http.openai.protocol import (
    Body,
    ChatBody,
    CompletionBody,
    DetokenizeBody,
    TokenizeBody,
)

Json = dict[str, object]

POSTS: Mapping[str, tuple[type[Body], str]] = {
    "/v1/chat/completions": (ChatBody, "Complete a chat, as one response or as server-sent events"),
    "/v1/completions": (
        CompletionBody,
        "Complete prompts, as one response or as server-sent events",
    ),
    "/tokenize": (TokenizeBody, "The token ids of a prompt or of messages"),
    "/detokenize": (DetokenizeBody, "The text of token ids"),
}
GETS: Mapping[str, str] = {
    "/v1/models": "The model that is served",
    "/health": "200 if a request sent now would be served, 503 otherwise",
    "/ready": "The same, for probes",
    "/live": "200 while this process answers",
    "/ping": "The same as /health, for SageMaker",
    "/load": "Running choices",
    "/metrics": "For Prometheus",
    "/version": "The version of Triptych",
}
PUBLIC = {"/health", "/ready", "/live", "/ping", "/load", "/metrics", "/version"}
"""Routes that take no API key."""
STREAMED = {"/v1/chat/completions", "/v1/completions"}

_TEXT: Json = {"type": "string"}
_MAYBE_TEXT: Json = {"type": ["string", "null"]}
_ERROR: Json = {
    "type": "object",
    "required": ["error"],
    "properties": {
        "error": {
            "type": "object",
            "required": ["message", "type", "param", "code"],
            "properties": {
                "message": _TEXT,
                "type": _TEXT,
                "param": _MAYBE_TEXT,
                "code": _MAYBE_TEXT,
            },
        }
    },
}


@cache
def document() -> Json:
    """OpenAPI 3.1: routes, request bodies and errors."""
    bodies: list[tuple[type[Body], JsonSchemaMode]]
    bodies = [(body, "validation") for body, _ in POSTS.values()]
    _, schemas = models_json_schema(bodies, ref_template="#/components/schemas/{model}")
    named: Json = {**schemas["$defs"], "Error": _ERROR}
    key: Json = {"type": "http", "scheme": "bearer"}
    return {
        "openapi": "3.1.0",
        "info": {"title": "Triptych", "version": version("triptych")},
        "paths": {**{path: _get(path) for path in GETS}, **{path: _post(path) for path in POSTS}},
        "components": {"schemas": named, "securitySchemes": {"key": key}},
    }


def _get(path: str) -> Json:
    return {"get": {"summary": GETS[path], **_security(path), "responses": _responses(path)}}


def _post(path: str) -> Json:
    body, summary = POSTS[path]
    content = {"application/json": {"schema": {"$ref": f"#/components/schemas/{body.__name__}"}}}
    return {
        "post": {
            "summary": summary,
            **_security(path),
            "requestBody": {"required": True, "content": content},
            "responses": _responses(path),
        }
    }


def _security(path: str) -> Json:
    return {} if path in PUBLIC else {"security": [{}, {"key": list[str]()}]}


def _responses(path: str) -> Json:
    kinds = ["application/json", *(["text/event-stream"] if path in STREAMED else [])]
    error = {"application/json": {"schema": {"$ref": "#/components/schemas/Error"}}}
    fine: Json = {"description": "Success"}
    if path not in PUBLIC:
        fine["content"] = {kind: Json() for kind in kinds}
    return {"200": fine, "default": {"description": "OpenAI's error", "content": error}}

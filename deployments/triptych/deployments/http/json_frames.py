"""Decodes strict JSON bodies; encodes JSON responses and server-sent events."""

import asyncio
import json
from collections.abc import Mapping
from typing import NoReturn, cast

from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response

from triptych.core.config import RequestLimitsConfig
from triptych.core.errors import BodyTooSlow, Cancelled, RequestError
from triptych.deployments.http.openai.body_limits import check_json_size

BODY_TIMEOUT_S = 30.0
"""Seconds in which a whole body must arrive, so that slow clients do not hold connections."""

DONE = b"data: [DONE]\n\n"
KEEP_ALIVE = b": keep-alive\n\n"


_ENCODER = json.JSONEncoder(allow_nan=False, separators=(",", ":"))


def dump_json(value: object) -> bytes:
    """Encode as ASCII, also U+2028, which some clients take for the end of a line."""
    return _ENCODER.encode(value).encode("ascii")


def event(value: object) -> bytes:
    """Encode one server-sent event."""
    return b"data: " + dump_json(value) + b"\n\n"


class JsonResponse(Response):
    """A JSON response."""

    media_type = "application/json"

    def __init__(
        self, content: object, status: int = 200, headers: Mapping[str, str] | None = None
    ) -> None:
        super().__init__(dump_json(content), status, headers)


async def read_json(request: Request, limits: RequestLimitsConfig) -> dict[str, object]:
    """Read a request's body as one JSON object, and keep nothing of it in the request.

    A request lives as long as its response, and ``Request.body`` would keep the bytes as long.

    Raises: RequestError for a wrong content type or encoding, for anything that is not
        a JSON object in UTF-8, or has more values than ``limits``; BodyTooSlow; Cancelled if the
        client went away
    """
    _check_headers(request)
    try:
        async with asyncio.timeout(BODY_TIMEOUT_S):
            body = b"".join([part async for part in request.stream()])
    except TimeoutError as error:
        raise BodyTooSlow(f"the body did not arrive within {BODY_TIMEOUT_S:.0f} s") from error
    except ClientDisconnect as error:
        raise Cancelled("the client went away while it sent the body") from error
    await check_json_size([body], limits)
    return parse_json(body)


def parse_json(body: bytes) -> dict[str, object]:
    """Parse a JSON object; NaN, Infinity and other dialects are refused.

    Raises: RequestError saying what is wrong, and where
    """
    try:
        value: object = json.loads(body.decode("utf-8"), parse_constant=_refuse_constant)
    except UnicodeDecodeError as error:
        raise RequestError(f"the body is not UTF-8 (byte {error.start})") from error
    except RecursionError as error:
        raise RequestError("the body is nested too deeply") from error
    except json.JSONDecodeError as error:
        raise RequestError(f"the body is not JSON: {error}") from error
    except ValueError as error:  # an integer of more digits than Python converts
        raise RequestError("the body has a number that is too long") from error
    if not isinstance(value, dict):
        raise RequestError("the body is not a JSON object")
    return cast("dict[str, object]", value)


def _check_headers(request: Request) -> None:
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind != "application/json":
        raise RequestError("Content-Type must be application/json")
    encoding = request.headers.get("content-encoding", "identity").strip().lower()
    if encoding != "identity":
        raise RequestError("Content-Encoding is not supported: send the body as it is")


def _refuse_constant(name: str) -> NoReturn:
    raise RequestError(f"the body has {name}, which is not JSON")

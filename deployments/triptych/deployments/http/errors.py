"""Converts every error to OpenAI's JSON error: status, message and headers."""

import logging
import math
from collections.abc import Mapping
from dataclasses import dataclass

from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException

from triptych.core.errors import (
    QueueFull,
    RequestError,
    ShuttingDown,
    TooManyRequests,
    TriptychError,
)
from triptych.core.messages import Failed
from triptych.deployments.http.json_frames import JsonResponse

logger = logging.getLogger(__name__)

RETRY_AFTER_S = 1.0
"""``Retry-After`` of retryable errors that set no other."""

MAX_MESSAGE_CHARS = 2000


class RequestFailed(Exception):
    """A stage failed the request, with its reason."""

    def __init__(self, failed: Failed) -> None:
        super().__init__(failed)
        self.failed = failed


@dataclass(frozen=True, slots=True, kw_only=True)
class ApiError:
    """An error as it is sent to the client."""

    status: int
    message: str
    kind: str = "invalid_request_error"
    """OpenAI's ``error.type``."""
    code: str | None = None
    param: str | None = None
    retry_after_s: float | None = None
    extra_headers: Mapping[str, str] | None = None

    @property
    def body(self) -> dict[str, object]:
        message = self.message[:MAX_MESSAGE_CHARS]
        error = {"message": message, "type": self.kind, "param": self.param, "code": self.code}
        return {"error": error}

    @property
    def headers(self) -> dict[str, str]:
        headers = dict(self.extra_headers or {})
        if self.status == 401:
            headers["www-authenticate"] = "Bearer"
        if self.retry_after_s is not None:
            headers["retry-after"] = str(math.ceil(self.retry_after_s))
            headers["retry-after-ms"] = str(math.ceil(self.retry_after_s * 1000))
        return headers

    def response(self) -> JsonResponse:
        return JsonResponse(self.body, self.status, self.headers)


def report(error: Exception, request_id: str) -> ApiError:
    """Log an error, with a traceback if it is internal, and describe it for the client.

    Client errors are logged by code and field only, as the message may quote the prompt.
    """
    described = describe(error, request_id)
    extra = {"request_id": request_id}
    if described.status == 500:
        logger.error("request %s failed", request_id, exc_info=error, extra=extra)
    else:
        # A client chooses the names of fields, and a log entry must stay one line.
        param = (described.param or "").encode("unicode_escape").decode() or None
        facts = (described.status, described.code, param)
        logger.info("request %s: %d %s %s", request_id, *facts, extra=extra)
    return described


def describe(error: Exception, request_id: str) -> ApiError:
    """Describe an error for the client.

    A Triptych error that the client can act on keeps its message. Other errors may name paths or
    addresses, so the client gets only the request id, and the log has the rest.
    """
    match error:
        case RequestFailed(failed=failed) if failed.status != 500:
            return _from_stage(failed)
        case TriptychError() if error.http_status != 500:
            return _from_tree(error)
        case HTTPException():
            return _from_route(error)
        case RequestValidationError():
            return ApiError(status=400, message="the request is not valid", code="invalid_value")
        case _:
            return ApiError(
                status=500,
                message=f"Internal error; the log has it under request id {request_id}.",
                kind="server_error",
                code="internal_error",
            )


def _from_stage(failed: Failed) -> ApiError:
    pause = RETRY_AFTER_S if failed.status in (429, 503) else None
    return ApiError(
        status=failed.status,
        message=failed.message,
        kind=failed.kind,
        code=failed.code,
        retry_after_s=pause if failed.retry_after_s is None else failed.retry_after_s,
    )


def _from_tree(error: TriptychError) -> ApiError:
    pause = RETRY_AFTER_S if error.retryable else None
    return ApiError(
        status=error.http_status,
        message=str(error),
        kind=error.kind,
        code=error.code,
        param=error.param if isinstance(error, RequestError) else None,
        retry_after_s=(
            error.retry_after_s
            if isinstance(error, QueueFull | ShuttingDown | TooManyRequests)
            else pause
        ),
    )


def _from_route(error: HTTPException) -> ApiError:
    texts = {404: "There is no such route.", 405: "This route does not take this method."}
    return ApiError(
        status=error.status_code,
        message=texts.get(error.status_code, str(error.detail)),
        extra_headers=error.headers,
    )

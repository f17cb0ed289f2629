"""API errors in OpenAI's format, `{"error": {"message", "type", "param", "code"}}`, and in the others'."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Mapping
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from pydantic import ValidationError
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from ....base.errors import BadInput, ContextOverflow

_log = logging.getLogger(__name__)

_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    429: "rate_limit_error",
}
_ANTHROPIC_TYPES = _TYPES | {
    413: "request_too_large",
    503: "overloaded_error",
    504: "timeout_error",
}


class ApiError(Exception):
    """An HTTP error response: status, message, and additional `headers`."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.param = param
        self.code = code
        self.headers = headers

    def body(self) -> dict[str, Any]:
        return error_body(self.status, str(self), self.param, self.code)


def bad_field(field: str, problem: str, code: str | None = None) -> ApiError:
    """400 for a field of the request, with which the message begins."""
    return ApiError(400, f"{field}: {problem}", param=field, code=code)


class Unavailable(ApiError):
    """503: the engine has failed, or the server is stopping."""

    def __init__(self, message: str) -> None:
        super().__init__(503, message, code="engine_unavailable")


class TooMany(ApiError):
    """429: a limit is reached; `headers` contain `Retry-After`."""

    def __init__(self, message: str, headers: Mapping[str, str]) -> None:
        super().__init__(429, message, code="rate_limit_exceeded", headers=headers)


class TooLong(ApiError):
    """400 for a prompt that is longer than the context, in words that clients look for: OpenAI's code and
    message, and Anthropic's two messages, on which Claude Code compacts or asks for fewer tokens
    (https://github.com/earendil-works/pi/issues/102, https://github.com/anthropics/claude-code/issues/42)."""

    def __init__(self, overflow: ContextOverflow) -> None:
        begin = f"This model's maximum context length is {overflow.limit} tokens"
        super().__init__(400, f"{begin}: {overflow}", code="context_length_exceeded")
        self._overflow = overflow

    def for_anthropic(self) -> str:
        num_prompt, num_new = self._overflow.num_prompt, self._overflow.num_new
        limit = self._overflow.limit
        if num_prompt >= limit:
            return f"prompt is too long: {num_prompt} tokens > {limit} maximum"
        problem = f"input length and `max_tokens` exceed context limit: {num_prompt} + {num_new}"
        return f"{problem} > {limit}, decrease input length or `max_tokens` and try again"


def error_body(
    status: int, message: str, param: str | None = None, code: str | None = None
) -> dict[str, Any]:
    kind = _TYPES.get(status, "server_error" if status >= 500 else "invalid_request_error")
    return {"error": {"message": message, "type": kind, "param": param, "code": code}}


def as_api_error(error: Exception) -> ApiError:
    """The error response for `error`; details of an internal error stay in the server's log."""
    match error:
        case ApiError():
            return error
        case ContextOverflow():
            return TooLong(error)
        case BadInput():
            return ApiError(400, str(error))
        case HTTPException():
            return ApiError(error.status_code, str(error.detail), headers=error.headers)
        case RequestValidationError() | ValidationError():
            return _validation_error(error)
    return ApiError(500, f"the server failed on this request ({type(error).__name__})")


def anthropic_error(error: ApiError) -> dict[str, Any]:
    usual = "api_error" if error.status >= 500 else "invalid_request_error"
    kind = _ANTHROPIC_TYPES.get(error.status, usual)
    message = error.for_anthropic() if isinstance(error, TooLong) else str(error)
    return {"type": "error", "error": {"type": kind, "message": message}}


def ollama_error(error: ApiError) -> dict[str, Any]:
    return {"error": str(error)}


def error_response(error: ApiError, path: str) -> JSONResponse:
    """The response for an error, in the format of the API that the path belongs to."""
    body = error.body()
    if path.startswith("/v1/messages"):
        body = anthropic_error(error)
    elif path.startswith("/api/"):
        body = ollama_error(error)
    return JSONResponse(body, error.status, error.headers)


def install(app: FastAPI) -> None:
    """Install exception handlers that return every error of `app` in this format."""

    # A coroutine, because starlette runs plain functions in a thread pool.
    async def on_error(request: Request, error: Exception) -> JSONResponse:
        return error_response(as_api_error(error), request.url.path)

    # A ValidationError comes from the chat request that a body is translated into.
    for kind in (ApiError, BadInput, RequestValidationError, ValidationError, HTTPException):
        app.add_exception_handler(kind, on_error)
    app.add_middleware(UnhandledErrorMiddleware)


class UnhandledErrorMiddleware:
    """ASGI middleware that responds 500 to unhandled exceptions and keeps the connection. A handler for
    `Exception` would not do: starlette raises again after it, and uvicorn then hangs up on the client's next
    request."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        started = False

        async def watch(message: Message) -> None:
            nonlocal started
            started = True
            await send(message)

        try:
            await self._app(scope, receive, watch)
        except Exception as error:
            if scope["type"] != "http" or started:
                raise
            _log.exception("a request failed")
            await error_response(as_api_error(error), scope["path"])(scope, receive, send)


def _validation_error(error: RequestValidationError | ValidationError) -> ApiError:
    """The first validation error. The input value is left out: it may be long, or private."""
    # For a union type, the error with the deepest location is the most specific.
    first = max(error.errors(), key=lambda e: len(e["loc"]))
    where = [str(part) for part in first["loc"] if part != "body"]
    if first["type"] == "json_invalid":
        return ApiError(400, f"the body is not valid JSON: {first.get('ctx', {}).get('error')}")
    message = f"{'.'.join(where) or 'the body'}: {first['msg'].removeprefix('Value error, ')}"
    return ApiError(400, message, param=where[0] if where else None)


MAX_SECONDS = 60
"""Upper bound of `Retry-After`."""


class RetryAfter:
    """Exponential moving average of the seconds between two finished requests."""

    def __init__(self) -> None:
        self._last_end: float | None = None
        self._interval_seconds: float | None = None

    def record_finish(self) -> None:
        now = time.perf_counter()
        if self._last_end is not None:
            # Capped: an idle night says nothing about load.
            interval = min(now - self._last_end, MAX_SECONDS)
            average = interval if self._interval_seconds is None else self._interval_seconds
            self._interval_seconds = 0.8 * average + 0.2 * interval
        self._last_end = now

    def retry_after(self, num_before: int) -> dict[str, str]:
        """The `Retry-After` header for a client after `num_before` other requests."""
        seconds = math.ceil((self._interval_seconds or 0.0) * max(1, num_before))
        return {"Retry-After": str(min(max(seconds, 1), MAX_SECONDS))}

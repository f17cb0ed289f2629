"""Errors in OpenAI's shape: `{"error": {"message", "type", "param", "code"}}`."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from ....quant.base.errors import BadInput

_log = logging.getLogger(__name__)

_TYPES = {
    401: "authentication_error",
    404: "not_found_error",
    405: "invalid_request_error",
    429: "rate_limit_error",
}


class ApiError(Exception):
    """A request that the server answers with an error of its own choosing, and `headers` beside it."""

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


class Unavailable(ApiError):
    """The engine can serve nobody: it failed, or the server is stopping."""

    def __init__(self, message: str) -> None:
        super().__init__(503, message, code="engine_unavailable")


class TooMany(ApiError):
    """There is no room for the request now; `headers` say when to try again."""

    def __init__(self, message: str, headers: Mapping[str, str]) -> None:
        super().__init__(429, message, code="rate_limit_exceeded", headers=headers)


class Aborted(ApiError):
    """Another request has ended this one."""

    def __init__(self) -> None:
        super().__init__(409, "the request was aborted", code="aborted")


class TimedOut(ApiError):
    """The answer took longer than the server lets any take."""

    def __init__(self, seconds: float) -> None:
        super().__init__(504, f"the answer was not complete after {seconds:g} s", code="timeout")


def error_body(
    status: int, message: str, param: str | None = None, code: str | None = None
) -> dict[str, Any]:
    kind = _TYPES.get(status, "server_error" if status >= 500 else "invalid_request_error")
    return {"error": {"message": message, "type": kind, "param": param, "code": code}}


def as_api_error(error: Exception) -> ApiError:
    """What the client is told about `error`; the details of a fault stay in the server's log."""
    if isinstance(error, ApiError):
        return error
    if isinstance(error, BadInput):
        return ApiError(400, str(error))
    return ApiError(500, f"the server failed on this request ({type(error).__name__})")


def error_response(error: ApiError) -> JSONResponse:
    return JSONResponse(error.body(), error.status, error.headers)


def install(app: FastAPI) -> None:
    """Give every kind of failure of `app` this shape."""
    # Coroutines, because starlette runs plain functions on threads of a pool.

    async def answer(_: Request, error: Exception) -> JSONResponse:
        return error_response(as_api_error(error))

    async def answer_validation(_: Request, error: Exception) -> JSONResponse:
        assert isinstance(error, RequestValidationError)
        return error_response(_validation_error(error))

    async def answer_http(_: Request, error: Exception) -> JSONResponse:
        assert isinstance(error, HTTPException)
        refusal = ApiError(error.status_code, str(error.detail), headers=error.headers)
        return error_response(refusal)

    for kind in (ApiError, BadInput):
        app.add_exception_handler(kind, answer)
    app.add_exception_handler(RequestValidationError, answer_validation)
    app.add_exception_handler(HTTPException, answer_http)
    app.add_middleware(LastResort)


class LastResort:
    """Answers what no handler knows, and keeps the connection.

    A handler for `Exception` would not do: starlette raises again after it, and uvicorn then hangs up
    on the client's next request.
    """

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
            await error_response(as_api_error(error))(scope, receive, send)


def _validation_error(error: RequestValidationError) -> ApiError:
    """The first thing that is wrong. The input itself is left out: it may be long, or private."""
    # Of a value that may be of several types, the type that it fits furthest says most.
    first = max(error.errors(), key=lambda one: len(one["loc"]))
    where = [str(part) for part in first["loc"] if part != "body"]
    if first["type"] == "json_invalid":
        return ApiError(400, f"the body is not valid JSON: {first.get('ctx', {}).get('error')}")
    message = first["msg"].removeprefix("Value error, ")
    return ApiError(
        400,
        f"{'.'.join(where)}: {message}" if where else f"the body: {message}",
        param=where[0] if where else None,
    )

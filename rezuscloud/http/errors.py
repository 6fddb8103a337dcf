"""Owns the way from an exception to an answer: every error is a Kubernetes Status with a `message`.

Also the headers that every answer bears. It does not decide what is an error (`model/errors.py`), and it
tells nobody what went wrong inside: that goes to the log, under the request's id.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping
from http import HTTPStatus

import orjson
from aiohttp import web
from multidict import CIMultiDict

from rezuscloud.model.errors import (
    ApiError,
    BadRequest,
    Forbidden,
    InternalError,
    MethodNotAllowed,
    NotFound,
    TooLarge,
    Unauthorized,
    Unavailable,
    UnsupportedMediaType,
)

_log = logging.getLogger(__name__)

JSON = "application/json"

_SAFE = {
    "Server": "",  # tells nobody which versions we run
    "X-Content-Type-Options": "nosniff",
    "Cache-Control": "no-store",
}
_JSON_HEADERS: CIMultiDict[str] = CIMultiDict({"Content-Type": JSON, **_SAFE})

_BY_CODE: Mapping[int, type[ApiError]] = {
    400: BadRequest,
    401: Unauthorized,
    403: Forbidden,
    404: NotFound,
    405: MethodNotAllowed,
    413: TooLarge,
    415: UnsupportedMediaType,
    500: InternalError,
    503: Unavailable,
}

_PHRASES = {status.value: status.phrase for status in HTTPStatus}

NO_SUCH_PATH = "the server could not find the requested resource"


class RequestTimeout(ApiError):
    """The client was too slow to send its request."""

    code, reason = 408, "Timeout"


def json_response(body: bytes, *, status: int = 200) -> web.Response:
    """An answer whose body is JSON already."""
    return web.Response(body=body, status=status, headers=_JSON_HEADERS)


def add_safe_headers(headers: CIMultiDict[str]) -> None:
    """What every answer bears. One that was made here has it already."""
    if "Server" not in headers:
        for name, value in _SAFE.items():
            headers.setdefault(name, value)


def status_response(error: ApiError) -> web.Response:
    """The error as it travels: Status JSON, and the headers that clients look at."""
    response = json_response(orjson.dumps(error.to_status()), status=error.code)
    if error.retry_after_s is not None:
        response.headers["Retry-After"] = str(error.retry_after_s)
    if error.code == 401:
        response.headers.add("WWW-Authenticate", 'Bearer realm="rezuscloud"')
        response.headers.add("WWW-Authenticate", 'Basic realm="rezuscloud", charset="UTF-8"')
    return response


def to_response(error: Exception, request_id: str) -> web.Response:
    """The answer to whatever a handler raised. What nobody foresaw is logged with its traceback and told as
    500 with the request's id, without its insides."""
    if isinstance(error, ApiError):
        return status_response(error)
    if isinstance(error, web.HTTPException):
        return _from_aiohttp(error)
    if isinstance(error, asyncio.TimeoutError):
        return status_response(Unavailable("the request took too long; try again", retry_after_s=5))
    _log.error("request %s failed", request_id, exc_info=error)
    return status_response(
        InternalError(
            f"something went wrong inside; the server goes on. The log tells more under request {request_id}."
        )
    )


def _from_aiohttp(error: web.HTTPException) -> web.Response:
    code = error.status
    if code < 400:
        # Only a success or a redirect that some handler raised on purpose: passed on as it is.
        return web.Response(status=code, headers=error.headers, body=error.body)
    message = {
        404: NO_SUCH_PATH,
        405: "the server does not allow this method on the requested resource",
        413: "the request body is too large",
    }.get(code)
    if message is None:
        # aiohttp's own texts are harmless: status phrases, or what a handler gave as `reason`.
        message = (error.reason or "request refused").lower()
    response = status_response(api_error(code, message))
    if "Allow" in error.headers:
        response.headers["Allow"] = error.headers["Allow"]
    return response


def api_error(code: int, message: str) -> ApiError:
    """An error of that code, also of codes that have no class of their own."""
    if known := _BY_CODE.get(code):
        return known(message)
    phrase = _PHRASES.get(code, "Unknown")
    reason = phrase.title().replace(" ", "").replace("-", "")
    unnamed: type[ApiError] = type("UnnamedError", (ApiError,), {"code": code, "reason": reason})
    return unnamed(message)

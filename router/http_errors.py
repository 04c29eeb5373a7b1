"""The one place where an error becomes an HTTP status and an OpenAI error object."""

import logging
import math
from http import HTTPStatus

import msgspec
from fastapi import FastAPI, Request
from fastapi.responses import Response
from starlette.exceptions import HTTPException

from pageray.cluster.errors import (
    CapacityError,
    ClientError,
    ContextLengthError,
    EngineDeadError,
    ModelNotFoundError,
    PageRayError,
)

logger = logging.getLogger(__name__)

_ENGINE_RESTART_S = 5.0


class RequestTooLargeError(ClientError):
    """The body is longer than this server reads."""


class ErrorInfo(msgspec.Struct, frozen=True, kw_only=True):
    """OpenAI's error object."""

    message: str
    type: str
    param: str | None = None
    code: str | None = None


class ErrorBody(msgspec.Struct, frozen=True):
    error: ErrorInfo


class HttpError(msgspec.Struct, frozen=True, kw_only=True):
    status: int
    info: ErrorInfo
    headers: dict[str, str] = {}

    def body(self) -> bytes:
        return msgspec.json.encode(ErrorBody(self.info))

    def response(self) -> Response:
        return Response(
            self.body(), self.status, headers=self.headers, media_type="application/json"
        )


def to_http_error(error: PageRayError) -> HttpError:
    """Status, object and headers for a deliberate error."""
    if isinstance(error, ModelNotFoundError):
        return _client_error(HTTPStatus.NOT_FOUND, error, "model_not_found")
    if isinstance(error, ContextLengthError):
        return _client_error(HTTPStatus.BAD_REQUEST, error, "context_length_exceeded")
    if isinstance(error, RequestTooLargeError):
        return _client_error(HTTPStatus.REQUEST_ENTITY_TOO_LARGE, error, "request_too_large")
    if isinstance(error, ClientError):
        return _client_error(HTTPStatus.BAD_REQUEST, error, "invalid_parameter")
    if isinstance(error, CapacityError):
        return _unavailable(error.message, "overloaded", error.retry_after_s)
    if isinstance(error, EngineDeadError):
        # Serve is about to replace it, or another replica can take the request.
        return _unavailable(str(error), "engine_dead", _ENGINE_RESTART_S)
    return HttpError(
        status=HTTPStatus.INTERNAL_SERVER_ERROR,
        info=ErrorInfo(message=_clean(str(error)), type="server_error", code="internal_error"),
    )


def unexpected_error() -> HttpError:
    """For an exception nobody foresaw: its text may hold anything, so it stays in the log."""
    return HttpError(
        status=HTTPStatus.INTERNAL_SERVER_ERROR,
        info=ErrorInfo(
            message="The server failed on this request; its log says why.",
            type="server_error",
            code="internal_error",
        ),
    )


def install_error_handlers(app: FastAPI) -> None:
    """Make every error that leaves a route an error object."""
    app.add_exception_handler(PageRayError, _on_pageray_error)
    app.add_exception_handler(HTTPException, _on_http_exception)
    app.add_exception_handler(Exception, _on_unexpected_error)


def _client_error(status: HTTPStatus, error: ClientError, code: str) -> HttpError:
    info = ErrorInfo(
        message=_clean(error.message),
        type="invalid_request_error",
        param=error.param,
        code=code,
    )
    return HttpError(status=status, info=info)


def _unavailable(message: str, code: str, retry_after_s: float) -> HttpError:
    return HttpError(
        status=HTTPStatus.SERVICE_UNAVAILABLE,
        info=ErrorInfo(message=_clean(message), type="service_unavailable", code=code),
        headers={"Retry-After": str(max(1, math.ceil(retry_after_s)))},
    )


def _clean(text: str) -> str:
    """Client text may hold lone surrogates, which JSON in UTF-8 cannot carry."""
    return text.encode("utf-8", "replace").decode("utf-8")


async def _on_pageray_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, PageRayError)
    http_error = to_http_error(error)
    if http_error.status >= HTTPStatus.INTERNAL_SERVER_ERROR:
        logger.error("%s %s: %s", request.method, request.url.path, error)
    return http_error.response()


async def _on_http_exception(request: Request, error: Exception) -> Response:
    """Starlette's own 404 and 405."""
    assert isinstance(error, HTTPException)
    messages = {
        HTTPStatus.NOT_FOUND: f"There is no {request.url.path} here. Try GET /v1/models.",
        HTTPStatus.METHOD_NOT_ALLOWED: f"{request.method} is not allowed on {request.url.path}.",
    }
    info = ErrorInfo(
        message=_clean(messages.get(HTTPStatus(error.status_code), str(error.detail))),
        type="invalid_request_error",
        code="not_found" if error.status_code == HTTPStatus.NOT_FOUND else None,
    )
    headers = dict(error.headers or {})
    return HttpError(status=error.status_code, info=info, headers=headers).response()


async def _on_unexpected_error(request: Request, error: Exception) -> Response:
    logger.error("%s %s failed", request.method, request.url.path, exc_info=error)
    return unexpected_error().response()

"""The HTTP routes over an `OpenAiApi`."""

import asyncio
import logging
from collections.abc import AsyncGenerator
from contextlib import aclosing

import msgspec
from fastapi import Depends, FastAPI, Request
from fastapi.responses import Response, StreamingResponse

from pageray.cluster.errors import CapacityError, PageRayError
from pageray.router.disconnect import ClientDisconnectedError, unless_disconnected
from pageray.router.http_errors import (
    HttpError,
    install_error_handlers,
    to_http_error,
    unexpected_error,
)
from pageray.router.openai import sse
from pageray.router.openai.parsing import parse_body, read_body
from pageray.router.openai.reply import event_stream, whole_reply
from pageray.router.openai.requests import (
    ChatCompletionRequest,
    CompletionRequest,
    DetokenizeRequest,
    TokenizeRequest,
)
from pageray.router.openai_api import OpenAiApi, PreparedReply
from pageray.router.request_id import client_request_id
from pageray.router.session_id import session_id

logger = logging.getLogger(__name__)

_HEALTH_TIMEOUT_S = 5.0
_CLIENT_CLOSED_REQUEST = 499
"""nginx's status for the log; nobody is there to read it."""


def build_http_app(api: OpenAiApi) -> FastAPI:
    """The ASGI application. Serve adds the x-request-id header to replies, so it is not here."""
    app = FastAPI(
        title="PageRay",
        openapi_url=None,
        dependencies=[Depends(_check_request_id)],
        redirect_slashes=False,
    )
    install_error_handlers(app)
    app.add_exception_handler(ClientDisconnectedError, _on_disconnect)

    @app.api_route("/health", methods=["GET", "HEAD"])
    async def health() -> Response:
        try:
            await asyncio.wait_for(api.check_health(), _HEALTH_TIMEOUT_S)
        except TimeoutError as error:
            raise CapacityError(
                f"A model has not answered for {_HEALTH_TIMEOUT_S:.0f} s; it may be loading."
            ) from error
        return Response()

    @app.api_route("/v1/models", methods=["GET", "HEAD"])
    async def list_models() -> Response:
        return _json(await api.list_models())

    # A model id may hold slashes.
    @app.api_route("/v1/models/{model_id:path}", methods=["GET", "HEAD"])
    async def get_model(model_id: str) -> Response:
        return _json(await api.get_model(model_id))

    @app.post("/v1/chat/completions")
    async def chat_completions(request: Request) -> Response:
        body = parse_body(await read_body(request), ChatCompletionRequest)
        return await _answer(request, await api.prepare_chat(body, session_id(request.headers)))

    @app.post("/v1/completions")
    async def completions(request: Request) -> Response:
        body = parse_body(await read_body(request), CompletionRequest)
        return await _answer(
            request, await api.prepare_completion(body, session_id(request.headers))
        )

    @app.post("/tokenize")
    async def tokenize(request: Request) -> Response:
        return _json(await api.tokenize(parse_body(await read_body(request), TokenizeRequest)))

    @app.post("/detokenize")
    async def detokenize(request: Request) -> Response:
        return _json(await api.detokenize(parse_body(await read_body(request), DetokenizeRequest)))

    return app


async def _check_request_id(request: Request) -> None:
    client_request_id(request.headers)


async def _answer(request: Request, prepared: PreparedReply) -> Response:
    if not prepared.is_stream:
        return _json(await unless_disconnected(request, whole_reply(prepared.run, prepared.reply)))
    events = event_stream(prepared.run, prepared.reply)
    try:
        # The status is sent with the first token, so that a refusal still is a 4xx or 5xx.
        first = await unless_disconnected(request, _next(events))
    except BaseException:
        await events.aclose()
        raise
    return StreamingResponse(
        _rest_of_stream(first, events), media_type=sse.MEDIA_TYPE, headers=sse.HEADERS
    )


async def _next(events: AsyncGenerator[bytes, None]) -> bytes:
    return await anext(events)


async def _rest_of_stream(
    first: bytes, events: AsyncGenerator[bytes, None]
) -> AsyncGenerator[bytes, None]:
    """The stream that has begun; what goes wrong now can only be told as an event."""
    async with aclosing(events):
        yield first
        try:
            async for piece in events:
                yield piece
        except PageRayError as error:
            logger.warning("a stream ends with an error: %s", error)
            yield _error_event(to_http_error(error))
        except Exception:  # process boundary: the headers are out, Starlette cannot answer
            logger.exception("a stream failed")
            yield _error_event(unexpected_error())


def _error_event(error: HttpError) -> bytes:
    return sse.event(error.body())


def _json(body: msgspec.Struct) -> Response:
    return Response(msgspec.json.encode(body), media_type="application/json")


async def _on_disconnect(request: Request, error: Exception) -> Response:
    return Response(status_code=_CLIENT_CLOSED_REQUEST)

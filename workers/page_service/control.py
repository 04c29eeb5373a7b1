# pyright: basic
# grpcio types its calls by message class; here a message is bytes.
"""gRPC with MessagePack instead of protobuf, and the application's secret on every call."""

import hmac
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Protocol, cast

import grpc

from pageray.workers.transfer.grpc_stream import SECRET_KEY

SERVICE = "pageray.Pages"
PUSH = "Push"
CANCEL = "Cancel"
MAX_MESSAGE_BYTES = 16 << 20
"""A request names each block of its chain with some 100 bytes."""

_OPTIONS = (
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
    # Two engines that claim one port would answer for each other.
    ("grpc.so_reuseport", 0),
)


class SecretInterceptor(grpc.ServerInterceptor):
    """Refuses calls without the application's secret."""

    def __init__(self, secret: bytes) -> None:
        self._secret = secret

    def intercept_service(self, continuation, handler_call_details):
        given = dict(handler_call_details.invocation_metadata).get(SECRET_KEY, b"")
        if isinstance(given, bytes) and hmac.compare_digest(given, self._secret):
            return continuation(handler_call_details)
        return grpc.unary_unary_rpc_method_handler(_refuse)


def _refuse(request: bytes, context: grpc.ServicerContext) -> bytes:
    context.abort(grpc.StatusCode.UNAUTHENTICATED, "The secret is not this application's.")
    raise AssertionError("abort raises")


def create_server(secret: bytes, num_threads: int) -> grpc.Server:
    """Not started, without a port or a handler yet."""
    return grpc.server(
        ThreadPoolExecutor(num_threads, thread_name_prefix="pageray-control"),
        interceptors=[SecretInterceptor(secret)],
        options=_OPTIONS,
    )


def add_control(
    server: grpc.Server,
    push: Callable[[bytes, grpc.ServicerContext], Iterator[bytes]],
    cancel: Callable[[bytes, grpc.ServicerContext], bytes],
) -> None:
    handlers = {
        PUSH: grpc.unary_stream_rpc_method_handler(push),
        CANCEL: grpc.unary_unary_rpc_method_handler(cancel),
    }
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(SERVICE, handlers),))


def connect(address: str) -> grpc.Channel:
    return grpc.insecure_channel(address, options=_OPTIONS)


class PushStream(Protocol):
    """What a push answers, message by message. Iterating raises `grpc.RpcError`."""

    def __iter__(self) -> Iterator[bytes]: ...

    def cancel(self) -> object: ...


def call_push(channel: grpc.Channel, request: bytes, timeout_s: float, secret: bytes) -> PushStream:
    call = channel.unary_stream(f"/{SERVICE}/{PUSH}")
    return cast("PushStream", call(request, timeout=timeout_s, metadata=((SECRET_KEY, secret),)))


def call_cancel(channel: grpc.Channel, request: bytes, timeout_s: float, secret: bytes) -> bytes:
    """Raises `grpc.RpcError`."""
    call = channel.unary_unary(f"/{SERVICE}/{CANCEL}")
    return cast("bytes", call(request, timeout=timeout_s, metadata=((SECRET_KEY, secret),)))

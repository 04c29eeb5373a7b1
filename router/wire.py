"""What travels between the ingress and an LLM server: MessagePack, both ways.

Errors travel as data, not as exceptions: a refused request is no fault of the replica, and Serve
would log a traceback and count an error for each.
"""

import msgspec

from pageray.cluster.coordinator.messages import EngineInfo
from pageray.cluster.errors import (
    CapacityError,
    ClientError,
    ContextLengthError,
    EngineDeadError,
    InvalidParameterError,
    ModelNotFoundError,
    PageRayError,
    ServerError,
)
from pageray.cluster.generation import GenerateRequest, RequestOutput
from pageray.cluster.ids import BlockKey, EngineId

_CLIENT_ERRORS: dict[str, type[ClientError]] = {
    "InvalidParameterError": InvalidParameterError,
    "ContextLengthError": ContextLengthError,
    "ModelNotFoundError": ModelNotFoundError,
    "ClientError": ClientError,
}


class ModelFacts(msgspec.Struct, frozen=True, kw_only=True):
    """What the ingress must know of an engine to refuse early what the engine would refuse."""

    vocab_size: int
    max_model_len: int
    capacity_tokens: int
    eos_token_ids: tuple[int, ...]
    block_size: int
    root_key: BlockKey
    """With the block size: what the keys of a prompt's blocks are made from."""


class AcceptedFrame(msgspec.Struct, frozen=True, tag="accepted"):
    """The first frame: which engine has taken the request, and where its pages can be had."""

    engine_id: EngineId
    info: EngineInfo | None = None


class OutputFrame(msgspec.Struct, frozen=True, tag="output"):
    output: RequestOutput


class ErrorFrame(msgspec.Struct, frozen=True, tag="error"):
    """`kind` is the name of an error class in `cluster/errors.py`."""

    kind: str
    message: str
    param: str | None = None
    retry_after_s: float = 1.0


Frame = AcceptedFrame | OutputFrame | ErrorFrame

_encoder = msgspec.msgpack.Encoder()
_request_decoder = msgspec.msgpack.Decoder(GenerateRequest)
_frame_decoder: msgspec.msgpack.Decoder[Frame] = msgspec.msgpack.Decoder(Frame)
_facts_decoder = msgspec.msgpack.Decoder(ModelFacts)


def encode_request(request: GenerateRequest) -> bytes:
    return _encoder.encode(request)


def decode_request(data: bytes) -> GenerateRequest:
    """Raises `msgspec.DecodeError` on bytes that are no request."""
    return _request_decoder.decode(data)


def encode_facts(facts: ModelFacts) -> bytes:
    return _encoder.encode(facts)


def decode_facts(data: bytes) -> ModelFacts:
    return _facts_decoder.decode(data)


def encode_output(output: RequestOutput) -> bytes:
    return _encoder.encode(OutputFrame(output))


def encode_error(error: PageRayError) -> bytes:
    return _encoder.encode(_error_frame(error))


def encode_accepted(engine_id: EngineId, info: EngineInfo | None) -> bytes:
    return _encoder.encode(AcceptedFrame(engine_id, info))


def decode_frame(data: bytes) -> AcceptedFrame | RequestOutput:
    """What is in a frame; raises the error that an error frame stands for."""
    frame = _frame_decoder.decode(data)
    if isinstance(frame, ErrorFrame):
        raise _error_of(frame)
    return frame.output if isinstance(frame, OutputFrame) else frame


def _error_frame(error: PageRayError) -> ErrorFrame:
    kind = type(error).__name__
    if isinstance(error, ClientError):
        return ErrorFrame(kind, error.message, error.param)
    if isinstance(error, CapacityError):
        return ErrorFrame("CapacityError", error.message, retry_after_s=error.retry_after_s)
    return ErrorFrame(kind, str(error))


def _error_of(frame: ErrorFrame) -> PageRayError:
    client_error = _CLIENT_ERRORS.get(frame.kind)
    if client_error is not None:
        return client_error(frame.message, param=frame.param)
    if frame.kind == "CapacityError":
        return CapacityError(frame.message, frame.retry_after_s)
    if frame.kind == "EngineDeadError":
        return EngineDeadError(frame.message)
    return ServerError(frame.message)

"""From bytes of a request body to a checked request model."""

from collections.abc import Sequence
from typing import TypeVar

import pydantic
import pydantic_core
from starlette.requests import Request

from pageray.cluster.errors import InvalidParameterError
from pageray.router.http_errors import RequestTooLargeError
from pageray.router.openai.fields import keep_served_fields

MAX_BODY_BYTES = 8 * 2**20
"""A prompt of a million tokens is about half of this."""

RequestModel = TypeVar("RequestModel", bound=pydantic.BaseModel)


async def read_body(request: Request, max_bytes: int = MAX_BODY_BYTES) -> bytes:
    """The body; raises `RequestTooLargeError` before more than `max_bytes` are held."""
    body = bytearray()
    async for chunk in request.stream():
        body += chunk
        if len(body) > max_bytes:
            raise RequestTooLargeError(
                f"The request body is longer than {max_bytes} bytes. Send a shorter prompt."
            )
    return bytes(body)


def parse_body(body: bytes, model: type[RequestModel]) -> RequestModel:
    """Raises `InvalidParameterError` for bytes that are no JSON object, an unknown or unserved
    field, or a field of the wrong type; `param` is the field's path."""
    try:
        data: object = pydantic_core.from_json(body)
    except ValueError as error:
        raise InvalidParameterError(f"The request body is not valid JSON: {error}.") from error
    if not isinstance(data, dict):
        raise InvalidParameterError("The request body must be a JSON object.")
    try:
        fields = keep_served_fields(data, model.model_fields)  # pyright: ignore[reportUnknownArgumentType]
        return model.model_validate(fields, strict=True)
    except pydantic.ValidationError as error:
        raise _first_problem(error) from error


def _first_problem(error: pydantic.ValidationError) -> InvalidParameterError:
    problem = error.errors(include_url=False, include_context=False, include_input=False)[0]
    path = _path(problem["loc"])
    return InvalidParameterError(f"{path}: {problem['msg']}.", param=path)


def _path(location: Sequence[int | str]) -> str:
    """`messages.0.content`; what pydantic adds to tell union members apart is left out."""
    first, *rest = location or ("body",)
    shown = [part for part in rest if isinstance(part, int) or _is_field(part)]
    return ".".join(str(part) for part in (first, *shown))


def _is_field(part: str) -> bool:
    """`list[str]` and `str` are pydantic's names for the members of a union."""
    return part.isidentifier() and part not in ("str", "int", "float", "bool")

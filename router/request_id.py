"""Names of requests: the client's, for tracing, and our own, which must be unique."""

import re
import uuid
from collections.abc import Mapping

from pageray.cluster.errors import InvalidParameterError
from pageray.cluster.ids import RequestId

REQUEST_ID_HEADER = "x-request-id"
MAX_REQUEST_ID_CHARS = 256
_VISIBLE_ASCII = re.compile(rf"[\x21-\x7e]{{1,{MAX_REQUEST_ID_CHARS}}}")


def client_request_id(headers: Mapping[str, str]) -> str:
    """The client's id for logs and the reply's header, or a new one if it sent none. Clients may
    repeat theirs, so nothing is looked up by it.

    Raises `InvalidParameterError` unless it is 1 to 256 visible ASCII characters.
    """
    given = headers.get(REQUEST_ID_HEADER)
    if given is None:
        return uuid.uuid4().hex
    if _VISIBLE_ASCII.fullmatch(given) is None:
        raise InvalidParameterError(
            f"The {REQUEST_ID_HEADER} header has {len(given)} characters; it must be 1 to "
            f"{MAX_REQUEST_ID_CHARS} visible ASCII characters.",
            param=REQUEST_ID_HEADER,
        )
    return given


def new_request_id(prefix: str) -> RequestId:
    """Unique in the cluster: `chatcmpl-` or `cmpl-` and 128 random bits."""
    return RequestId(f"{prefix}-{uuid.uuid4().hex}")

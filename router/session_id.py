"""The header by which a client says which conversation a request belongs to."""

from collections.abc import Mapping

from pageray.cluster.errors import InvalidParameterError

HEADER = "x-session-id"
MAX_CHARS = 256


def session_id(headers: Mapping[str, str]) -> str:
    """ "" without the header. Raises `InvalidParameterError` for one that is too long."""
    value = headers.get(HEADER, "")
    if len(value) > MAX_CHARS:
        raise InvalidParameterError(
            f"{HEADER} has {len(value)} characters; at most {MAX_CHARS} are read.", param=HEADER
        )
    return value

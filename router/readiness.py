"""Waits until a server really answers."""

import http.client
import time
from collections.abc import Callable

from pageray.cluster.errors import ServerError

_POLL_S = 0.05
_CHECK_S = 1.0
_REQUEST_TIMEOUT_S = 2.0
"""A request is held while no replica is there; a failed start should be noticed sooner."""


def wait_until_healthy(
    host: str, port: int, route_prefix: str, timeout_s: float, check: Callable[[], None]
) -> None:
    """Return when GET `<route_prefix>/health` answers 200: the ingress has its tokenizer and the
    engine is alive. Raises `ServerError` with the last answer after `timeout_s`, and whatever
    `check` raises, which is called once a second meanwhile."""
    path = route_prefix.rstrip("/") + "/health"
    deadline = time.monotonic() + timeout_s
    next_check = time.monotonic() + _CHECK_S
    while True:
        answer = _ask(host, port, path)
        if answer == "200":
            return
        if time.monotonic() > deadline:
            raise ServerError(
                f"http://{host}:{port}{path} is not healthy after {timeout_s:.0f} s: {answer}."
            )
        if time.monotonic() > next_check:
            check()
            next_check = time.monotonic() + _CHECK_S
        time.sleep(_POLL_S)


def _ask(host: str, port: int, path: str) -> str:
    connection = http.client.HTTPConnection(host, port, timeout=_REQUEST_TIMEOUT_S)
    try:
        connection.request("GET", path)
        response = connection.getresponse()
        body = response.read(500).decode(errors="replace")
        return str(response.status) if response.status == 200 else f"{response.status} {body}"
    except (OSError, http.client.HTTPException) as error:
        return f"{type(error).__name__}: {error}"
    finally:
        connection.close()

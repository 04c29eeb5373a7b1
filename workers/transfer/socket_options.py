"""How the two ends of a page connection set up their socket."""

import socket
from pathlib import Path

BUFFER_BYTES = 4 << 20
_LIMITS = {
    socket.SO_SNDBUF: Path("/proc/sys/net/core/wmem_max"),
    socket.SO_RCVBUF: Path("/proc/sys/net/core/rmem_max"),
}


def tune(connection: socket.socket) -> None:
    """No delay for small messages, large buffers, and a vanished host noticed within ~25 s."""
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    for option, limit in _LIMITS.items():
        # A size that the host cuts down would be worse than none: a fixed small buffer instead of
        # one that grows with the connection.
        if _number_in(limit) >= BUFFER_BYTES:
            connection.setsockopt(socket.SOL_SOCKET, option, BUFFER_BYTES)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 10)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 5)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 3)


def _number_in(path: Path) -> int:
    try:
        return int(path.read_text())
    except OSError:
        return 0

"""Both ends of a socket prove that they know the application's secret, without showing it.

    server -> client   magic, server nonce
    client -> server   client nonce, HMAC-SHA256(secret, "client" | server nonce | client nonce)
    server -> client   HMAC-SHA256(secret, "server" | client nonce | server nonce)

It keeps strangers out; what follows is neither encrypted nor signed (private networks only).
"""

import hashlib
import hmac
import secrets
import socket
import time

_MAGIC = b"PRPAGES1"
_NONCE_BYTES = 32
_MAC_BYTES = 32


class HandshakeError(Exception):
    """The other end is not one of ours, has another secret, or took too long."""


def welcome(connection: socket.socket, secret: bytes, timeout_s: float) -> None:
    """The server's part. Raises `HandshakeError`."""
    deadline_s = time.monotonic() + timeout_s
    nonce = secrets.token_bytes(_NONCE_BYTES)
    _send(connection, _MAGIC + nonce, deadline_s)
    answer = _receive(connection, _NONCE_BYTES + _MAC_BYTES, deadline_s)
    peer_nonce, mac = answer[:_NONCE_BYTES], answer[_NONCE_BYTES:]
    if not hmac.compare_digest(mac, _mac(secret, b"client", nonce, peer_nonce)):
        raise HandshakeError("the peer does not know the secret of this application.")
    _send(connection, _mac(secret, b"server", peer_nonce, nonce), deadline_s)


def introduce(connection: socket.socket, secret: bytes, timeout_s: float) -> None:
    """The client's part. Raises `HandshakeError`."""
    deadline_s = time.monotonic() + timeout_s
    greeting = _receive(connection, len(_MAGIC) + _NONCE_BYTES, deadline_s)
    if not greeting.startswith(_MAGIC):
        raise HandshakeError("the peer is not a page server.")
    nonce, peer_nonce = secrets.token_bytes(_NONCE_BYTES), greeting[len(_MAGIC) :]
    _send(connection, nonce + _mac(secret, b"client", peer_nonce, nonce), deadline_s)
    mac = _receive(connection, _MAC_BYTES, deadline_s)
    if not hmac.compare_digest(mac, _mac(secret, b"server", nonce, peer_nonce)):
        raise HandshakeError("the page server does not know the secret of this application.")


def _mac(secret: bytes, who: bytes, first_nonce: bytes, second_nonce: bytes) -> bytes:
    return hmac.digest(secret, who + first_nonce + second_nonce, hashlib.sha256)


def _send(connection: socket.socket, data: bytes, deadline_s: float) -> None:
    try:
        connection.settimeout(_left(deadline_s))
        connection.sendall(data)
    except OSError as error:
        raise HandshakeError(f"the peer went away: {error}") from error


def _receive(connection: socket.socket, num_bytes: int, deadline_s: float) -> bytes:
    data = b""
    while len(data) < num_bytes:
        try:
            connection.settimeout(_left(deadline_s))
            more = connection.recv(num_bytes - len(data))
        except OSError as error:
            raise HandshakeError(f"the peer went away: {error}") from error
        if not more:
            raise HandshakeError("the peer hung up; does it know the secret of this application?")
        data += more
    return data


def _left(deadline_s: float) -> float:
    left_s = deadline_s - time.monotonic()
    if left_s <= 0:
        raise TimeoutError("it took too long")
    return left_s

"""Both ends must know the secret."""

import socket
import threading

import pytest

from pageray.workers.transfer.handshake import HandshakeError, introduce, welcome

SECRET = b"ours"


def shake(server_secret: bytes, client_secret: bytes) -> tuple[bool, bool]:
    """Whether the server and the client were content."""
    ours, theirs = socket.socketpair()
    content: list[bool] = []

    def serve() -> None:
        try:
            welcome(theirs, server_secret, 5.0)
            content.append(True)
        except HandshakeError:
            content.append(False)
        finally:
            theirs.close()

    server = threading.Thread(target=serve)
    server.start()
    try:
        introduce(ours, client_secret, 5.0)
        is_content = True
    except HandshakeError:
        is_content = False
    server.join(10)
    ours.close()
    return content[0], is_content


def test_same_secret() -> None:
    assert shake(SECRET, SECRET) == (True, True)


def test_different_secrets() -> None:
    assert shake(SECRET, b"theirs") == (False, False)


def test_server_that_only_pretends_to_know_the_secret() -> None:
    ours, theirs = socket.socketpair()
    theirs.sendall(b"PRPAGES1" + bytes(32) + bytes(32))
    with pytest.raises(HandshakeError, match="page server does not know the secret"):
        introduce(ours, SECRET, 5.0)
    ours.close()
    theirs.close()


def test_recorded_answer_does_not_open_the_next_connection() -> None:
    """A man in the middle of one handshake replays the client's part in another."""
    client_end, middle_to_client = socket.socketpair()
    client = threading.Thread(target=_try_to_introduce, args=(client_end,))
    client.start()
    first_server, middle_to_server = socket.socketpair()
    server = threading.Thread(target=welcome, args=(first_server, SECRET, 5.0))
    server.start()
    middle_to_client.sendall(middle_to_server.recv(40, socket.MSG_WAITALL))
    answer = middle_to_client.recv(64, socket.MSG_WAITALL)
    middle_to_server.sendall(answer)
    server.join(10)  # content: it was the client's own answer
    second_server, replayer = socket.socketpair()
    replayer.sendall(answer)
    with pytest.raises(HandshakeError, match="does not know the secret"):
        welcome(second_server, SECRET, 5.0)
    middle_to_client.close()
    client.join(10)
    for end in (client_end, first_server, middle_to_server, second_server, replayer):
        end.close()


def _try_to_introduce(end: socket.socket) -> None:
    with pytest.raises(HandshakeError):
        introduce(end, SECRET, 5.0)


def test_silence_is_not_waited_out() -> None:
    ours, theirs = socket.socketpair()
    with pytest.raises(HandshakeError, match=r"timed out|too long"):
        welcome(ours, SECRET, 0.05)
    theirs.sendall(b"HTTP/1.1 400 Bad Request\r\nContent-Length: 0\r\n\r\n")
    with pytest.raises(HandshakeError, match="not a page server"):
        introduce(ours, SECRET, 0.5)
    ours.close()
    theirs.close()

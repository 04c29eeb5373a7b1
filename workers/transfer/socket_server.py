"""Destination end of pages over TCP: bytes go from the socket straight into the page slots."""

import logging
import select
import socket
import threading
from collections.abc import Sequence

from pageray.workers.transfer.arrivals import Arrivals
from pageray.workers.transfer.frame_receiver import FrameReceiver, StreamEndedError
from pageray.workers.transfer.frames import FrameError, pack_reply
from pageray.workers.transfer.handshake import HandshakeError, welcome
from pageray.workers.transfer.landing import UnexpectedWriteError
from pageray.workers.transfer.mapped_pages import ByteArray
from pageray.workers.transfer.socket_options import tune

_logger = logging.getLogger(__name__)

DEFAULT_MAX_CONNECTIONS = 64
_HANDSHAKE_TIMEOUT_S = 5.0
_REPLY_TIMEOUT_S = 10.0
_ACCEPT_PAUSE_S = 0.1


class PageSocketServer:
    """Listens from its construction until `close`; one thread per connection."""

    def __init__(
        self,
        arrivals: Arrivals,
        secret: bytes,
        host: str = "127.0.0.1",
        *,
        max_connections: int = DEFAULT_MAX_CONNECTIONS,
    ) -> None:
        """Listens on a free port of `host`. Connections above `max_connections` are closed."""
        if not secret:
            raise ValueError("a page server needs a secret.")
        self._arrivals = arrivals
        self._secret = secret
        self._max_connections = max_connections
        self._lock = threading.Lock()
        self._connections: dict[socket.socket, threading.Thread] = {}
        self._closing = threading.Event()
        self._listener = socket.create_server((host, 0))
        self._acceptor = threading.Thread(target=self._accept, name="page-accept", daemon=True)
        self._acceptor.start()

    @property
    def address(self) -> str:
        """host:port."""
        host, port = self._listener.getsockname()[:2]
        return f"{host}:{port}"

    def close(self) -> None:
        """Hang up on everybody and wait until nobody writes any more."""
        with self._lock:
            if self._closing.is_set():
                return
            self._closing.set()
            connections = dict(self._connections)
        # Wakes the threads that wait in accept and poll; closing alone would not.
        for connection in (self._listener, *connections):
            _hang_up(connection)
        for thread in (self._acceptor, *connections.values()):
            thread.join()
        self._listener.close()

    def _accept(self) -> None:
        while True:
            try:
                connection, peer = self._listener.accept()
            except OSError as error:
                # Out of file descriptors, say: that passes, and `close` ends it.
                if self._closing.wait(_ACCEPT_PAUSE_S):
                    return
                _logger.error("a page connection could not be accepted: %s", error)
                continue
            thread = threading.Thread(
                target=self._serve, args=(connection, str(peer)), name="page-receive", daemon=True
            )
            with self._lock:
                if self._closing.is_set() or len(self._connections) >= self._max_connections:
                    _logger.warning("page connection from %s refused: too many, or closing.", peer)
                    connection.close()
                    continue
                self._connections[connection] = thread
                thread.start()

    def _serve(self, connection: socket.socket, peer: str) -> None:
        try:
            with connection:
                welcome(connection, self._secret, _HANDSHAKE_TIMEOUT_S)
                self._receive_frames(connection)
        except StreamEndedError as ended:
            _logger.debug("page connection from %s ended: %s", peer, ended)
        except (FrameError, UnexpectedWriteError, HandshakeError) as error:
            _logger.warning("page connection from %s dropped: %s", peer, error)
        except Exception:
            # The end of a thread: one connection is lost, its transfers time out.
            _logger.exception("page connection from %s failed.", peer)
        finally:
            with self._lock:
                self._connections.pop(connection, None)

    def _receive_frames(self, connection: socket.socket) -> None:
        tune(connection)
        receiver = FrameReceiver(self._arrivals, SocketStream(connection))
        while True:
            reply = receiver.receive()
            if reply is not None:
                _send_reply(connection, pack_reply(*reply))


class SocketStream:
    """The `ByteStream` of a connected socket, which becomes non-blocking."""

    def __init__(self, connection: socket.socket) -> None:
        connection.setblocking(False)
        self._connection = connection
        self._poll = select.poll()
        self._poll.register(connection, select.POLLIN)

    def take(self, targets: Sequence[ByteArray]) -> int:
        try:
            count = self._connection.recvmsg_into([target.data for target in targets])[0]
        except BlockingIOError:
            return 0
        except OSError as error:
            raise StreamEndedError(str(error)) from error
        if count == 0:
            raise StreamEndedError("the peer hung up.")
        return count

    def wait(self) -> None:
        # For ever: a source that lives may be silent between transfers, and keep-alive finds one
        # that does not. An expectation has a deadline of its own.
        self._poll.poll()


def _send_reply(connection: socket.socket, reply: bytes) -> None:
    try:
        connection.settimeout(_REPLY_TIMEOUT_S)
        connection.sendall(reply)
    except OSError as error:
        raise StreamEndedError(str(error)) from error
    finally:
        connection.setblocking(False)


def _hang_up(connection: socket.socket) -> None:
    try:
        connection.shutdown(socket.SHUT_RDWR)
    except OSError:
        _logger.debug("a page connection was closed already.")

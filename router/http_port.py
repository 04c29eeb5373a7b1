"""Is the port free? Serve itself would say so late and in many lines."""

import socket

from pageray.cluster.errors import ConfigError


def check_port_is_free(host: str, port: int) -> None:
    """Raise `ConfigError` that says what to do when nobody can listen on `host:port`."""
    family, kind, protocol, _, address = socket.getaddrinfo(
        host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
    )[0]
    with socket.socket(family, kind, protocol) as probe:
        # As servers do: a port in TIME_WAIT is free.
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(address)
        except OSError as error:
            raise ConfigError(
                f"Port {port} on {host} cannot be used: {error.strerror}. Choose another with "
                f"--port {port + 1}, or stop what listens there."
            ) from error


def free_port() -> int:
    """A port of the loopback interface that nobody listened on just now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])

"""Free ports for servers that bind a port by its number."""

from __future__ import annotations

import socket
from contextlib import ExitStack

__all__ = ["free_ports"]


def free_ports(count: int) -> list[int]:
    """Return free ports that the kernel assigns to no other process for a minute.

    A connection of each port has just been closed and is in TIME_WAIT. The kernel does not assign
    such a port to a process that binds port 0, but a server can bind the port by its number.
    """
    with ExitStack() as stack:
        ports: list[int] = []
        for _ in range(count):
            listening = stack.enter_context(socket.create_server(("127.0.0.1", 0)))
            client = stack.enter_context(socket.create_connection(listening.getsockname()))
            listening.accept()[0].close()
            client.recv(1)  # the server closed first, so its port is in TIME_WAIT
            ports.append(listening.getsockname()[1])
    return ports

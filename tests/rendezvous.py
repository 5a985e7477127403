"""A port for the rendezvous of ranks in other processes."""

from __future__ import annotations

import socket
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator


@contextmanager
def rendezvous_port() -> Iterator[int]:
    """Reserve a port on 127.0.0.1 for MASTER_PORT.

    A socket binds the port and does not listen. The kernel then does not choose the port for other
    sockets, but another socket can bind it explicitly with SO_REUSEADDR, as torch's store does.
    """
    with socket.socket() as bound:
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        bound.bind(("127.0.0.1", 0))
        yield bound.getsockname()[1]

"""Where ranks of other processes meet."""

from __future__ import annotations

import socket
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator


@contextmanager
def meeting_port() -> Iterator[int]:
    """A port on 127.0.0.1 for MASTER_PORT, which nobody else is given meanwhile.

    It stays bound here, and does not listen. The kernel gives such a port to nobody who asks for
    any, and to those who ask for this one, with SO_REUSEADDR, as torch's store does.
    """
    with socket.socket() as held:
        held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        held.bind(("127.0.0.1", 0))
        yield held.getsockname()[1]

"""moto, an S3 server in Python that keeps objects in memory and accepts any keys."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from tests.servers.process import find_program, free_ports
from tests.servers.s3 import S3Server

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["Moto"]


class Moto(S3Server):
    """One server with empty buckets."""

    def __init__(self, *, buckets: Sequence[str] = ("bucket",)) -> None:
        """Configure a server with buckets."""
        [port] = free_ports(1)
        super().__init__(
            lambda _: [find_program("moto_server"), "-H", "127.0.0.1", "-p", f"{port}"],
            port,
            buckets=buckets,
            env={name: value for name, value in os.environ.items() if not name.startswith("AWS_")},
        )

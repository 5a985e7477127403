"""moto, an S3 server in Python that keeps objects in memory and takes any keys."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any, Self

from tests.servers.process import ServerProcess, find_program, free_ports
from tests.servers.seaweedfs import SeaweedFS

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["Moto"]


class Moto(ServerProcess):
    """One server with empty buckets.

    Attributes:
        access_key: Id of keys that it takes.
        secret_key: Their secret.
    """

    access_key = SeaweedFS.access_key
    secret_key = SeaweedFS.secret_key

    def __init__(self, *, buckets: Sequence[str] = ("bucket",)) -> None:
        """Take the names of the buckets; start nothing."""
        self._buckets = buckets
        [port] = free_ports(1)
        super().__init__(
            lambda _: [find_program("moto_server"), "-H", "127.0.0.1", "-p", f"{port}"],
            f"http://127.0.0.1:{port}",
            env={name: value for name, value in os.environ.items() if not name.startswith("AWS_")},
        )

    def __enter__(self) -> Self:
        super().__enter__()
        try:
            for bucket in self._buckets:
                self.door().create_bucket(Bucket=bucket)
        except BaseException:
            self.stop()
            raise
        return self

    client: Any = SeaweedFS.client
    door: Any = SeaweedFS.door

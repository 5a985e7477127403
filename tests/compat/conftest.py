"""Buckets on the embedded server, and clients of Google's library with the server's address."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import pytest
from google.auth.credentials import AnonymousCredentials
from google.cloud import storage

from aioflux.testing import GCSServer
from aioflux.testing.gcs_server import Hook, Request, Response
from tests.patience import patient

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = ["patient"]


@dataclass
class Bucket:
    """The server's bucket `bucket`."""

    server: GCSServer
    name: str = "bucket"

    def put(self, key: str, data: bytes) -> None:
        self.server.put(self.name, key, data)

    def fill(self, num_objects: int, prefix: str = "train/") -> list[str]:
        keys = [f"{prefix}{number:03d}" for number in range(num_objects)]
        for key in keys:
            self.put(key, f"data of {key}".encode())
        return keys

    def client(self, credentials: Any = None) -> storage.Client:
        return storage.Client(
            project="project",
            credentials=credentials or AnonymousCredentials(),
            client_options={"api_endpoint": self.server.url},
        )


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[Bucket]:
    """A bucket whose server is not set in the environment."""
    monkeypatch.delenv("STORAGE_EMULATOR_HOST", raising=False)
    with GCSServer(buckets=("bucket",)) as server:
        yield Bucket(server)


@pytest.fixture
def bucket(server: Bucket, monkeypatch: pytest.MonkeyPatch) -> Bucket:
    """A bucket whose server is set in the environment variable STORAGE_EMULATOR_HOST."""
    monkeypatch.setenv("STORAGE_EMULATOR_HOST", server.server.url)
    return server


class Guard(Hook):
    """Rejects requests without a given token."""

    def __init__(self, token: str) -> None:
        self.accepted = f"Bearer {token}"

    def before(self, request: Request) -> Response | None:
        is_valid = request.headers.get("authorization") == self.accepted
        return None if is_valid else Response(status=401)


@pytest.fixture
def guarded(server: Bucket) -> Bucket:
    """A bucket that requires the token `secret`."""
    app = server.server.app
    app.hooks = (*app.hooks, Guard("secret"))
    return server

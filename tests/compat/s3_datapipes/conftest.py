"""Buckets whose server is set in the environment, as for programs that only change an import."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import pytest

from aioflux.testing import GCSServer

if TYPE_CHECKING:
    from collections.abc import Iterator


@dataclass(frozen=True)
class Bucket:
    """The server's bucket `bucket`."""

    server: GCSServer

    def put(self, key: str, data: bytes, *, bucket: str = "bucket") -> str:
        self.server.put(bucket, key, data)
        return f"gs://{bucket}/{key}"

    def fill(self, num_objects: int, prefix: str = "train/", size: int = 0) -> dict[str, bytes]:
        """Store `num_objects` objects, and return their contents by url."""
        made = {}
        for number in range(num_objects):
            data = f"{prefix}{number}\n".encode().ljust(size, b".")
            made[self.put(f"{prefix}{number:03d}", data)] = data
        return made

    def num_reads(self) -> int:
        return self.server.stats.operation("objects.get").requests


@pytest.fixture
def bucket(monkeypatch: pytest.MonkeyPatch) -> Iterator[Bucket]:
    with GCSServer(buckets=("bucket", "other")) as server:
        monkeypatch.setenv("STORAGE_EMULATOR_HOST", server.url)
        yield Bucket(server)

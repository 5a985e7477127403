"""A bucket on the embedded server, reached by its back door."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import pytest

from aioflux.testing import GCSServer

if TYPE_CHECKING:
    from collections.abc import Iterator


@dataclass
class Bucket:
    """The server's bucket `bucket` and the prefix `train` in it."""

    server: GCSServer
    uri: str = "gs://bucket/train"

    def put(self, key: str, data: bytes) -> None:
        self.server.put("bucket", f"train/{key}", data)

    def fill(self, num_objects: int) -> list[str]:
        keys = [f"{number:03d}" for number in range(num_objects)]
        for key in keys:
            self.put(key, f"data of {key}".encode())
        return keys


@pytest.fixture
def bucket(monkeypatch: pytest.MonkeyPatch) -> Iterator[Bucket]:
    with GCSServer(buckets=("bucket",)) as server:
        monkeypatch.setenv("STORAGE_EMULATOR_HOST", server.url)
        yield Bucket(server)

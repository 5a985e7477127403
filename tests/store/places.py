"""The places that stores are tested on, each with its back door."""

from __future__ import annotations

import os
import time
import uuid
from typing import TYPE_CHECKING, Any, Protocol

import aioflux
from aioflux.service._memory import memory_bucket

if TYPE_CHECKING:
    from pathlib import Path

    from aioflux.testing import GCSServer


class Place(Protocol):
    """An empty place for objects."""

    def open(self, **settings: Any) -> aioflux.Store: ...

    def write(self, key: str, data: bytes) -> None: ...

    def read(self, key: str) -> bytes: ...


class MemoryPlace:
    def __init__(self, prefix: str = "") -> None:
        self._prefix = prefix
        self._bucket = memory_bucket(f"test-{uuid.uuid4().hex}")

    def open(self, **settings: Any) -> aioflux.Store:
        return aioflux.open_store(f"memory://{self._bucket.name}/{self._prefix}", **settings)

    def write(self, key: str, data: bytes) -> None:
        self._bucket.store(self._prefix + key, data)

    def read(self, key: str) -> bytes:
        return self._bucket.objects[self._prefix + key].data


class LocalPlace:
    def __init__(self, root: Path) -> None:
        self.root = root

    def open(self, **settings: Any) -> aioflux.Store:
        return aioflux.open_store(f"file://{self.root}", **settings)

    def write(self, key: str, data: bytes) -> None:
        path = self.root / key
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary = self.root.with_name(f"written-{uuid.uuid4().hex}")
        temporary.write_bytes(data)
        # The kernel's own clock ticks every 4 ms, which two writes can share.
        os.utime(temporary, ns=(0, time.time_ns()))
        temporary.replace(path)

    def read(self, key: str) -> bytes:
        try:
            return (self.root / key).read_bytes()
        except OSError as exc:
            raise KeyError(key) from exc


class GCSPlace:
    def __init__(self, server: GCSServer) -> None:
        self._server = server
        self._prefix = f"{uuid.uuid4().hex}/"

    def open(self, **settings: Any) -> aioflux.Store:
        return aioflux.open_store(
            f"gs://bucket/{self._prefix}", endpoint_url=self._server.url, **settings
        )

    def write(self, key: str, data: bytes) -> None:
        self._server.put("bucket", self._prefix + key, data)

    def read(self, key: str) -> bytes:
        whole = self._prefix + key
        if whole not in self._server.keys("bucket", whole):
            raise KeyError(key)
        return self._server.get("bucket", whole)

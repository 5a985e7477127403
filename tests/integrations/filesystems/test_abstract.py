"""fsspec's own suites for filesystems, over the embedded server and over the other schemes."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import pytest
from fsspec.tests import abstract

from aioflux.integrations.fsspec import GSFileSystem, LocalFileSystem, MemoryFileSystem

if TYPE_CHECKING:
    from pathlib import Path

    from aioflux.integrations.fsspec import AiofluxFileSystem
    from aioflux.testing import GCSServer


class Fixtures(abstract.AbstractFixtures):
    """A prefix of an object store: there are no empty directories."""

    @pytest.fixture
    def supports_empty_directories(self) -> bool:
        return False

    @pytest.fixture
    def fs_join(self):
        return lambda *parts: "/".join(parts)


class OnGCS(Fixtures):
    @pytest.fixture
    def fs(self, shared: GCSServer) -> AiofluxFileSystem:
        return GSFileSystem(endpoint_url=shared.url)

    @pytest.fixture
    def fs_path(self, bucket: str) -> str:
        return bucket


class OnDisk(Fixtures):
    @pytest.fixture
    def fs(self) -> AiofluxFileSystem:
        return LocalFileSystem()

    @pytest.fixture
    def fs_path(self, tmp_path: Path) -> str:
        return os.fspath(tmp_path / "root")


class InMemory(Fixtures):
    @pytest.fixture
    def fs(self) -> AiofluxFileSystem:
        return MemoryFileSystem()

    @pytest.fixture
    def fs_path(self, request: pytest.FixtureRequest) -> str:
        return request.node.originalname


class TestCopyOnGCS(abstract.AbstractCopyTests, OnGCS):
    pass


class TestGetOnGCS(abstract.AbstractGetTests, OnGCS):
    pass


class TestPutOnGCS(abstract.AbstractPutTests, OnGCS):
    pass


class TestOpenOnGCS(abstract.AbstractOpenTests, OnGCS):
    pass


class TestPipeOnGCS(abstract.AbstractPipeTests, OnGCS):
    pass


class TestCopyOnDisk(abstract.AbstractCopyTests, OnDisk):
    pass


class TestOpenOnDisk(abstract.AbstractOpenTests, OnDisk):
    pass


class TestPipeInMemory(abstract.AbstractPipeTests, InMemory):
    pass


class TestOpenInMemory(abstract.AbstractOpenTests, InMemory):
    pass

"""fsspec's own suites for filesystems, over the embedded server and over the other schemes."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import pytest
from fsspec.tests import abstract

from aioflux.integrations.fsspec import (
    AzureFileSystem,
    GSFileSystem,
    LocalFileSystem,
    MemoryFileSystem,
    S3FileSystem,
)

if TYPE_CHECKING:
    from pathlib import Path

    from aioflux.integrations.fsspec import AiofluxFileSystem
    from aioflux.testing import GCSServer
    from tests.servers.azurite import Azurite
    from tests.servers.moto import Moto
    from tests.servers.seaweedfs import SeaweedFS


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


class OnMoto(Fixtures):
    @pytest.fixture
    def fs(self, moto: Moto, monkeypatch: pytest.MonkeyPatch) -> AiofluxFileSystem:
        monkeypatch.setenv("AWS_ACCESS_KEY_ID", "anybody")
        monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "anybody")
        return S3FileSystem(endpoint_url=moto.url, skip_instance_cache=True)

    @pytest.fixture
    def fs_path(self, tmp_path: Path) -> str:
        return f"bucket/fsspec/{tmp_path.parent.name}/{tmp_path.name}"


class OnSeaweedFS(Fixtures):
    """For what deletes nothing: it keeps directories whose objects are gone."""

    @pytest.fixture
    def fs(self, seaweedfs: SeaweedFS, monkeypatch: pytest.MonkeyPatch) -> AiofluxFileSystem:
        monkeypatch.setenv("AWS_ACCESS_KEY_ID", seaweedfs.access_key)
        monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", seaweedfs.secret_key)
        return S3FileSystem(endpoint_url=seaweedfs.url, skip_instance_cache=True)

    @pytest.fixture
    def fs_path(self, tmp_path: Path) -> str:
        return f"bucket/fsspec/{tmp_path.parent.name}/{tmp_path.name}"


class OnAzure(Fixtures):
    @pytest.fixture
    def fs(self, azurite: Azurite) -> AiofluxFileSystem:
        return AzureFileSystem(
            endpoint_url=azurite.url, credentials=azurite.key, skip_instance_cache=True
        )

    @pytest.fixture
    def fs_path(self, azurite: Azurite, tmp_path: Path) -> str:
        return f"{azurite.account}/container/fsspec/{tmp_path.parent.name}/{tmp_path.name}"


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
    test_put_glob_edge_cases = None  # 30 patterns over local files, which fsspec itself lists


class TestOpenOnGCS(abstract.AbstractOpenTests, OnGCS):
    pass


class TestPipeOnGCS(abstract.AbstractPipeTests, OnGCS):
    pass


class TestCopyOnMoto(abstract.AbstractCopyTests, OnMoto):
    test_copy_glob_edge_cases = None  # 30 patterns, which no service sees: OnGCS has them


class TestOpenOnSeaweedFS(abstract.AbstractOpenTests, OnSeaweedFS):
    pass


class TestPipeOnSeaweedFS(abstract.AbstractPipeTests, OnSeaweedFS):
    pass


class TestCopyOnAzure(abstract.AbstractCopyTests, OnAzure):
    test_copy_glob_edge_cases = None  # 30 patterns, which no service sees: OnGCS has them


class TestOpenOnAzure(abstract.AbstractOpenTests, OnAzure):
    pass


class TestPipeOnAzure(abstract.AbstractPipeTests, OnAzure):
    pass


class TestCopyOnDisk(abstract.AbstractCopyTests, OnDisk):
    test_copy_glob_edge_cases = None  # 30 patterns, which no service sees: OnGCS has them


class TestOpenOnDisk(abstract.AbstractOpenTests, OnDisk):
    pass


class TestPipeInMemory(abstract.AbstractPipeTests, InMemory):
    pass


class TestOpenInMemory(abstract.AbstractOpenTests, InMemory):
    pass

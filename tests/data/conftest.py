"""Fixtures for dataset tests: an empty bucket on the cloud of the test (`clouds`)."""

from __future__ import annotations

import multiprocessing
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import pytest

from tests.bridge.patience import FAR_SECONDS
from tests.servers.clouds import open_bucket

if TYPE_CHECKING:
    from collections.abc import Iterator


# Imported once in the fork server, instead of in each process that it starts.
multiprocessing.set_forkserver_preload(["torch.distributed", "torch.utils.data", "aioflux.data"])


@dataclass
class Bucket:
    """The bucket `bucket` of a server, and the prefix `train` in it."""

    server: Any

    @property
    def root(self) -> str:
        uri: str = self.server.root
        return uri

    @property
    def uri(self) -> str:
        return f"{self.root}/train"

    def put(self, key: str, data: bytes) -> None:
        self.server.put("bucket", f"train/{key}", data)

    def fill(self, num_objects: int) -> list[str]:
        keys = [f"{number:03d}" for number in range(num_objects)]
        for key in keys:
            self.put(key, f"data of {key}".encode())
        return keys


@pytest.fixture
def patient_loaders(monkeypatch: pytest.MonkeyPatch) -> None:
    """Raise DataLoader's limit for the exit of workers, so that it does not kill their clean-up.

    The limit is five seconds by default; a busy machine may stall for longer.
    """
    from torch.utils.data import _utils

    assert hasattr(_utils, "MP_STATUS_CHECK_INTERVAL")
    monkeypatch.setattr(_utils, "MP_STATUS_CHECK_INTERVAL", FAR_SECONDS)


@pytest.fixture
def bucket(
    cloud: str, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Bucket]:
    with open_bucket(cloud, request, monkeypatch) as server:
        yield Bucket(server)

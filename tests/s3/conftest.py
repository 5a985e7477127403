"""A prefix on SeaweedFS; the environment has endpoint and keys, as for a real job."""

from __future__ import annotations

import uuid
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from tests.servers.seaweedfs import SeaweedFS


class Prefix:
    """An empty prefix, with direct access to its objects."""

    def __init__(self, server: SeaweedFS) -> None:
        self.server = server
        self.name = uuid.uuid4().hex
        self.uri = f"s3://bucket/{self.name}"

    def put(self, key: str, data: bytes) -> None:
        self.server.door().put_object(Bucket="bucket", Key=f"{self.name}/{key}", Body=data)

    def fill(self, num_objects: int) -> dict[str, bytes]:
        objects = {f"{number:03d}": b"data of %d" % number for number in range(num_objects)}
        for key, data in objects.items():
            self.put(key, data)
        return objects

    def keys(self) -> list[str]:
        found = self.server.door().list_objects_v2(Bucket="bucket", Prefix=f"{self.name}/")
        return sorted(each["Key"][len(self.name) + 1 :] for each in found.get("Contents", []))


@pytest.fixture
def prefix(seaweedfs: SeaweedFS, monkeypatch: pytest.MonkeyPatch) -> Prefix:
    seaweedfs.sign_in(monkeypatch)
    return Prefix(seaweedfs)

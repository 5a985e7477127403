"""Nebula on S3 and Azure: the node daemon finds the credentials of the trainer."""

from __future__ import annotations

import os
import uuid
from typing import TYPE_CHECKING

import torch

from aioflux.checkpoint import verify
from aioflux.compat import nebula as nm
from tests.servers.azurite import KEY

if TYPE_CHECKING:
    from pathlib import Path

    import pytest

    from tests.servers.azurite import Azurite
    from tests.servers.seaweedfs import SeaweedFS


def go_through(uri: str) -> None:
    """Save, save again, shut down, and load from the storage alone."""
    nm.init(uri, persistent_time_interval=0)
    for number in range(2):
        nm.Checkpoint("a").save("model", torch.full((100_000,), number))
        nm.flush_persistence()
    nm.shutdown()
    nm.init(uri)
    found = nm.get_latest_checkpoint()
    assert found is not None
    assert nm.list_checkpoints()["a"]["places"] == ["storage"]
    assert int(found.load("model", weights_only=True)[0]) == 1
    path = nm.get_latest_checkpoint_path("model", uri)
    assert path is not None
    assert path.startswith(f"{uri}/a/")
    assert verify(f"{uri}/a", deep=True).is_valid


def test_nebula_on_s3(node: Path, seaweedfs: SeaweedFS, monkeypatch: pytest.MonkeyPatch) -> None:
    seaweedfs.sign_in(monkeypatch)
    go_through(f"s3://bucket/nebula-{uuid.uuid4().hex}")


def test_nebula_on_azure(node: Path, azurite: Azurite, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in tuple(os.environ):
        if name.startswith("AZURE_"):
            monkeypatch.delenv(name)
    connection = {
        "DefaultEndpointsProtocol": "http",
        "AccountName": azurite.account,
        "AccountKey": KEY,
        "BlobEndpoint": f"{azurite.url}/{azurite.account}",
    }
    text = ";".join(f"{name}={value}" for name, value in connection.items())
    monkeypatch.setenv("AZURE_STORAGE_CONNECTION_STRING", text)
    go_through(f"az://{azurite.account}/container/nebula-{uuid.uuid4().hex}")

"""The checkpoint files with the old name: nothing is stored but what was written to its end."""

from __future__ import annotations

import pickle
from typing import TYPE_CHECKING

import pytest
import torch
from google.oauth2.credentials import Credentials

import aioflux
from aioflux.compat.dataflux.dataflux_checkpoint import DatafluxCheckpoint

if TYPE_CHECKING:
    from tests.compat.conftest import Bucket


def test_a_tensor_makes_the_round_trip_through_a_client(guarded: Bucket) -> None:
    """With the client's endpoint and credentials."""
    client = guarded.client(Credentials("secret"))
    checkpoint = DatafluxCheckpoint("project", "bucket", storage_client=client)
    assert checkpoint.storage_client is client
    with checkpoint.writer("a/b.ckpt") as writer:
        torch.save({"x": torch.arange(5)}, writer)
    with checkpoint.reader("a/b.ckpt") as reader:
        assert torch.load(reader)["x"].tolist() == [0, 1, 2, 3, 4]


def test_a_writer_may_be_closed_without_a_block(bucket: Bucket) -> None:
    writer = DatafluxCheckpoint("project", "bucket").writer("x")
    writer.write(b"data")
    writer.close()
    writer.close()
    assert bucket.server.get("bucket", "x") == b"data"


def test_an_error_keeps_the_existing_checkpoint(bucket: Bucket) -> None:
    """The old class replaced it by what had been written so far."""
    bucket.put("x", b"good")

    def save() -> None:
        with DatafluxCheckpoint("project", "bucket").writer("x") as writer:
            writer.write(b"half")
            raise ArithmeticError

    with pytest.raises(ArithmeticError):
        save()
    assert bucket.server.get("bucket", "x") == b"good"
    assert bucket.server.stats.open_uploads == 0


def test_a_missing_checkpoint_is_named(bucket: Bucket) -> None:
    with pytest.raises(aioflux.NotFoundError, match="gs://bucket/a/none"):
        DatafluxCheckpoint("project", "bucket").reader("a/none")


def test_a_pickle_keeps_the_endpoint(server: Bucket) -> None:
    server.put("x", b"data")
    checkpoint = DatafluxCheckpoint("project", "bucket", storage_client=server.client())
    copy = pickle.loads(pickle.dumps(checkpoint))
    with copy.reader("x") as reader:
        assert reader.read() == b"data"

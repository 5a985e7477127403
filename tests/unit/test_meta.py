"""ObjectMeta and DeleteResult: plain values that cross processes."""

from __future__ import annotations

import dataclasses
import pickle
from datetime import UTC, datetime

import pytest

from aioflux import DeleteResult, ObjectMeta, PermissionDeniedError

META = ObjectMeta(
    key="a.bin",
    uri="gs://b/train/a.bin",
    size=5,
    generation="1700000000000001",
    crc32c=0xE3069283,
    updated=datetime(2026, 1, 2, 3, 4, 5, tzinfo=UTC),
    metadata={"owner": "me"},
)


def test_a_meta_survives_a_pickle() -> None:
    assert pickle.loads(pickle.dumps(META)) == META


def test_a_meta_cannot_be_changed() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        META.size = 6


def test_what_a_service_does_not_tell_is_empty() -> None:
    meta = ObjectMeta(key="k", uri="memory://b/k", size=0)
    assert (meta.etag, meta.generation, meta.crc32c, meta.updated) == ("", "", None, None)
    assert meta.metadata == {}


def test_a_delete_result_survives_a_pickle_with_its_reasons() -> None:
    error = PermissionDeniedError("may not delete", uri="gs://b/c", status=403)
    sent = DeleteResult(deleted=("a",), missing=("b",), errors={"c": error})

    received = pickle.loads(pickle.dumps(sent))

    assert (received.deleted, received.missing) == (("a",), ("b",))
    assert type(received.errors["c"]) is PermissionDeniedError
    assert vars(received.errors["c"]) == vars(error)

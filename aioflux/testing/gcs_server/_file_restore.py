"""A new start on a directory: read its records back, and sweep what a killed server left."""

from __future__ import annotations

import shutil
from typing import TYPE_CHECKING, Any

import msgspec

from aioflux.testing.gcs_server._checksums import Declared, Digest
from aioflux.testing.gcs_server._file_blobs import FileBlobs, names_of
from aioflux.testing.gcs_server._file_journal import FileJournal
from aioflux.testing.gcs_server._preconditions import Preconditions
from aioflux.testing.gcs_server._records import (
    Attributes,
    Bucket,
    MultipartUpload,
    ObjectRecord,
    Part,
    ResumableUpload,
)
from aioflux.testing.gcs_server._state import State

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path


def open_state(root: Path, *, fsync: bool = False) -> State:
    """Return a state that is kept in a directory, with what an earlier server has left there.

    Args:
        root: The directory; made where it is missing.
        fsync: Wait for the disk at each change: it then survives a loss of power, too.

    Raises:
        RuntimeError: Another server uses the directory.
        OSError: Bytes that a record names are missing.
        msgspec.DecodeError: A record is damaged: by a loss of power, for one.
    """
    journal = FileJournal(root, fsync=fsync)
    blobs = FileBlobs(root / "data", fsync=fsync)
    state = State(blobs, journal)
    for leftover in (root / "new").iterdir():
        leftover.unlink()
    generations = root / "generations"
    state.restore(
        [_bucket(path, blobs) for path in _directories(root / "buckets", "bucket.json")],
        [_multipart(path, blobs) for path in _directories(root / "uploads", "upload.json")],
        [_resumable(path, blobs) for path in sorted((root / "sessions").iterdir())],
        last_generation=msgspec.json.decode(generations.read_bytes())
        if generations.exists()
        else 0,
    )
    blobs.sweep(set(_names(state)))
    return state


def _names(state: State) -> Iterator[str]:
    """Yield the name of every file of bytes that something needs."""
    for bucket in state.buckets.values():
        for name in bucket.objects.ordered():
            record = bucket.objects.get(name)
            assert record is not None
            yield from names_of(record.blob)
    for multipart in state.multipart_uploads.values():
        for part in multipart.parts.values():
            yield from names_of(part.blob)
    for resumable in state.resumable_uploads.values():
        for blob in resumable.pieces:
            yield from names_of(blob)


def _directories(parent: Path, record: str) -> Iterator[Path]:
    """Yield the directories that have a record; others are leftovers and go."""
    for directory in sorted(parent.iterdir()):
        if (directory / record).exists():
            yield directory
        else:
            shutil.rmtree(directory)


def _bucket(directory: Path, blobs: FileBlobs) -> Bucket:
    bucket = Bucket(**_read(directory / "bucket.json"))
    for path in directory.glob("objects/*/*.json"):
        document = _read(path)
        document["blob"] = blobs.open(document.pop("leaves"))
        document["md5"] = _from_hex(document["md5"])
        document["attributes"] = Attributes(**document["attributes"])
        record = ObjectRecord(bucket=bucket.name, **document)
        bucket.objects.put(record.name, record)
    return bucket


def _multipart(directory: Path, blobs: FileBlobs) -> MultipartUpload:
    document = _read(directory / "upload.json")
    document["attributes"] = Attributes(**document["attributes"])
    upload = MultipartUpload(**document)
    for path in directory.glob("[0-9]*.json"):
        document = _read(path)
        document["blob"] = blobs.open(document.pop("leaves"))
        document["md5"] = _from_hex(document["md5"])
        part = Part(**document)
        upload.parts[part.number] = part
    return upload


def _resumable(path: Path, blobs: FileBlobs) -> ResumableUpload:
    """Read a session; its checksums go on from those of the bytes that it has."""
    document = _read(path)
    pieces = [blobs.open([name]) for name in document.pop("leaves")]
    digest = Digest(with_md5=document.pop("has_md5"))
    for blob in pieces:
        digest.update(blob.view(0, blob.size))
    declared = document.pop("declared")
    document["declared"] = Declared(crc32c=declared["crc32c"], md5=_from_hex(declared["md5"]))
    document["attributes"] = Attributes(**document["attributes"])
    document["preconditions"] = Preconditions(**document["preconditions"])
    return ResumableUpload(pieces=pieces, digest=digest, **document)


def _read(path: Path) -> dict[str, Any]:
    document: dict[str, Any] = msgspec.json.decode(path.read_bytes())
    return document


def _from_hex(text: str | None) -> bytes | None:
    return None if text is None else bytes.fromhex(text)

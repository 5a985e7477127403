"""Files of a server's state: each record is put in place by one rename, and read at a start.

    root/lock                                  held while a server uses the directory
    root/generations                           no generation up to this is used again
    root/data/ID                               bytes, see FileBlobs
    root/buckets/HASH/bucket.json              a bucket exists from here on
    root/buckets/HASH/objects/HASH.json        an object: its name, metadata and files of bytes
    root/uploads/ID/upload.json, N.json        an open multipart upload and its parts
    root/sessions/ID.json                      a resumable upload with its received bytes
    root/new/                                  records being written

HASH is the SHA-256 of a name, so that no name can lead out of the directory. Bytes are written
before the record that names them and deleted after it has gone: whenever the process dies, each
record names complete bytes, and bytes without a record are deleted at the next start. A server that
dies while it completes an upload leaves the object, the open upload, or both.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import shutil
import uuid
import weakref
from dataclasses import asdict, fields
from typing import TYPE_CHECKING, Any

import msgspec

from aioflux.testing.gcs_server import _fork
from aioflux.testing.gcs_server._checksums import Declared, Digest
from aioflux.testing.gcs_server._file_blobs import FileBlobs, names_of
from aioflux.testing.gcs_server._preconditions import Preconditions
from aioflux.testing.gcs_server._records import (
    Attributes,
    Bucket,
    MultipartUpload,
    ObjectRecord,
    Part,
    ResumableUpload,
)
from aioflux.testing.gcs_server._state import Journal, State

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

_RESERVED_US = 1_000_000


class FileJournal(Journal):
    """Journal in a directory; a RuntimeError if another server uses it.

    With `fsync` each record is flushed to the disk, so that it survives a loss of power, too.
    """

    def __init__(self, root: Path, *, fsync: bool = False) -> None:
        self._root = root
        self._fsync = fsync
        self._reserved = 0
        for name in ("buckets", "uploads", "sessions", "new"):
            (root / name).mkdir(parents=True, exist_ok=True)
        self._unlock = weakref.finalize(self, _unlock, _lock(root), os.getpid())

    def open(self) -> None:
        """See base class; raises if it was closed, as another server may use the directory."""
        if not self._unlock.alive:
            raise RuntimeError(f"the server of {self._root} was stopped: create a new one")

    def close(self) -> None:
        """Let another server use the directory; a second call does nothing."""
        self._unlock()

    # --- changes -------------------------------------------------------------------------

    def put_bucket(self, bucket: Bucket) -> None:
        directory = self._bucket(bucket.name)
        (directory / "objects").mkdir(parents=True, exist_ok=True)
        self._write(directory / "bucket.json", _plain(bucket, without={"objects"}))

    def drop_bucket(self, name: str) -> None:
        self._drop_directory(self._bucket(name), "bucket.json")

    def put_object(self, record: ObjectRecord) -> None:
        document = _plain(record, without={"bucket", "blob", "md5", "attributes"})
        document["leaves"] = names_of(record.blob)
        document["md5"] = record.md5.hex() if record.md5 else None
        document["attributes"] = asdict(record.attributes)
        self._write(self._object(record.bucket, record.name), document)

    def drop_object(self, record: ObjectRecord) -> None:
        self._unlink(self._object(record.bucket, record.name))

    def put_multipart(self, upload: MultipartUpload) -> None:
        directory = self._upload(upload)
        directory.mkdir()
        document = _plain(upload, without={"attributes", "parts"})
        self._write(directory / "upload.json", document | {"attributes": asdict(upload.attributes)})

    def put_part(self, upload: MultipartUpload, part: Part) -> None:
        document = _plain(part, without={"blob", "md5"})
        md5 = None if part.md5 is None else part.md5.hex()
        document |= {"leaves": names_of(part.blob), "md5": md5}
        self._write(self._upload(upload) / f"{part.number}.json", document)

    def drop_multipart(self, upload: MultipartUpload) -> None:
        self._drop_directory(self._upload(upload), "upload.json")

    def put_resumable(self, upload: ResumableUpload) -> None:
        parts = {"attributes", "declared", "preconditions", "digest", "pieces", "resource"}
        md5 = upload.declared.md5
        document = _plain(upload, without=parts) | {
            "attributes": asdict(upload.attributes),
            "declared": {"crc32c": upload.declared.crc32c, "md5": md5.hex() if md5 else None},
            "preconditions": asdict(upload.preconditions),
            "has_md5": upload.digest.md5 is not None,
            "leaves": [name for blob in upload.pieces for name in names_of(blob)],
            "resource": None if upload.resource is None else dict(upload.resource),
        }
        self._write(self._session(upload), document)

    def drop_resumable(self, upload: ResumableUpload) -> None:
        self._unlink(self._session(upload))

    def reserve_generations(self, generation: int) -> None:
        """See base class; reserves the generations of one second at a time."""
        if generation > self._reserved:
            self._reserved = generation + _RESERVED_US
            self._write(self._root / "generations", self._reserved)

    # --- files ---------------------------------------------------------------------------

    def _bucket(self, name: str) -> Path:
        return self._root / "buckets" / _hash(name)

    def _object(self, bucket: str, name: str) -> Path:
        return self._bucket(bucket) / "objects" / f"{_hash(name)}.json"

    def _upload(self, upload: MultipartUpload) -> Path:
        return self._root / "uploads" / upload.upload_id

    def _session(self, upload: ResumableUpload) -> Path:
        return self._root / "sessions" / f"{upload.upload_id}.json"

    def _write(self, path: Path, document: object) -> None:
        """Write a record atomically."""
        self.open()
        new = self._root / "new" / uuid.uuid4().hex
        with new.open("xb") as file:
            file.write(msgspec.json.encode(document))
            if self._fsync:
                file.flush()
                os.fsync(file.fileno())
        new.replace(path)
        self._sync_directory(path.parent)

    def _unlink(self, path: Path) -> None:
        path.unlink()
        self._sync_directory(path.parent)

    def _drop_directory(self, directory: Path, record: str) -> None:
        """Delete a directory, its record first."""
        self._unlink(directory / record)
        shutil.rmtree(directory)

    def _sync_directory(self, directory: Path) -> None:
        """Flush the names in a directory to the disk."""
        if not self._fsync:
            return
        descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def open_state(root: Path, *, fsync: bool = False) -> State:
    """Return the state in a directory, and delete leftovers of a killed server.

    Args:
        root: The directory; created if it is missing.
        fsync: Flush each change to the disk, so that it survives a loss of power, too.

    Raises:
        RuntimeError: Another server uses the directory.
        OSError: Bytes that a record names are missing.
        msgspec.DecodeError: A record is damaged, for example by a loss of power.
    """
    journal = FileJournal(root, fsync=fsync)
    blobs = FileBlobs(root / "data", fsync=fsync)
    state = State(blobs, journal)
    for leftover in (root / "new").iterdir():
        leftover.unlink()
    generations = root / "generations"
    state.restore(
        [_read_bucket(path, blobs) for path in _directories(root / "buckets", "bucket.json")],
        [_read_multipart(path, blobs) for path in _directories(root / "uploads", "upload.json")],
        [_read_resumable(path, blobs) for path in sorted((root / "sessions").iterdir())],
        last_generation=msgspec.json.decode(generations.read_bytes())
        if generations.exists()
        else 0,
    )
    blobs.sweep(set(_blob_names(state)))
    return state


def _blob_names(state: State) -> Iterator[str]:
    """Yield the name of every file of bytes that a record names."""
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
    """Yield the directories that have a record; delete the others."""
    for directory in sorted(parent.iterdir()):
        if (directory / record).exists():
            yield directory
        else:
            shutil.rmtree(directory)


def _read_bucket(directory: Path, blobs: FileBlobs) -> Bucket:
    bucket = Bucket(**_read(directory / "bucket.json"))
    for path in directory.glob("objects/*.json"):
        document = _read(path)
        document["blob"] = blobs.open(document.pop("leaves"))
        record = ObjectRecord(bucket=bucket.name, **document)
        bucket.objects.put(record.name, record)
    return bucket


def _read_multipart(directory: Path, blobs: FileBlobs) -> MultipartUpload:
    upload = MultipartUpload(**_read(directory / "upload.json"))
    for path in directory.glob("[0-9]*.json"):
        document = _read(path)
        document["blob"] = blobs.open(document.pop("leaves"))
        part = Part(**document)
        upload.parts[part.number] = part
    return upload


def _read_resumable(path: Path, blobs: FileBlobs) -> ResumableUpload:
    """Read a resumable upload; its digest is computed from the received bytes."""
    document = _read(path)
    pieces = [blobs.open([name]) for name in document.pop("leaves")]
    digest = Digest(with_md5=document.pop("has_md5"))
    for blob in pieces:
        digest.update(blob.view(0, blob.size))
    declared = document.pop("declared")
    document["declared"] = Declared(crc32c=declared["crc32c"], md5=_from_hex(declared["md5"]))
    document["preconditions"] = Preconditions(**document["preconditions"])
    return ResumableUpload(pieces=pieces, digest=digest, **document)


def _read(path: Path) -> dict[str, Any]:
    """Return the fields of a record."""
    document: dict[str, Any] = msgspec.json.decode(path.read_bytes())
    if "attributes" in document:
        document["attributes"] = Attributes(**document["attributes"])
    if "md5" in document:
        document["md5"] = _from_hex(document["md5"])
    return document


def _from_hex(text: str | None) -> bytes | None:
    return None if text is None else bytes.fromhex(text)


def _lock(root: Path) -> int:
    """Return a descriptor that holds the lock of a directory until it is closed."""
    descriptor = os.open(root / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as exc:
        os.close(descriptor)
        raise RuntimeError(f"another server uses {root}: stop it, or use another root") from exc
    _fork.track(descriptor)
    return descriptor


def _unlock(descriptor: int, owner: int) -> None:
    """Release a lock even if other processes share it; a forked child only closes its copy."""
    _fork.untrack(descriptor)
    if os.getpid() == owner:
        fcntl.flock(descriptor, fcntl.LOCK_UN)
    os.close(descriptor)


def _plain(record: Any, *, without: set[str]) -> dict[str, Any]:
    """Return the fields of a dataclass by name, without derived ones."""
    names = (field.name for field in fields(record) if field.init and field.name not in without)
    return {name: getattr(record, name) for name in names}


def _hash(name: str) -> str:
    return hashlib.sha256(name.encode()).hexdigest()

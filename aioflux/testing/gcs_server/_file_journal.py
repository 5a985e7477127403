"""Journal in files: the durable state of a server, which is read when the server starts.

    root/lock                                  locked while a server uses the directory
    root/generations                           new generations are greater than this number
    root/data/ID                               bytes of a leaf, see FileBlobs
    root/buckets/HASH/bucket.json              record of a bucket
    root/buckets/HASH/objects/HASH.json        record of an object: name, metadata, ids of leaves
    root/uploads/ID/upload.json, N.json        records of an open multipart upload and its parts
    root/sessions/ID.json                      record of a resumable upload
    root/new/                                  temporary files of records

HASH is the SHA-256 of a name, so that a name with `..` cannot point outside the directory. A record
is written to a temporary file, which is then renamed. Bytes are written before the record of their
object, and deleted after the record. After a crash of the server, or with `fsync` also of the
machine, the bytes of every record are complete, and the next start deletes bytes without a record.
After a crash during the completion of an upload, the object exists, or the upload is still open, or
both.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import shutil
import uuid
import weakref
from collections.abc import Iterator
from dataclasses import asdict, fields
from typing import TYPE_CHECKING, Any

import msgspec

from aioflux.testing.gcs_server import _fork
from aioflux.testing.gcs_server._checksums import DeclaredChecksums, Digest
from aioflux.testing.gcs_server._file_blobs import FileBlobs, leaf_names
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
    from pathlib import Path

_RESERVED_US = 1_000_000  # generations are microseconds: one write per second reserves them


class FileJournal(Journal):
    """Journal in a directory.

    The constructor raises RuntimeError if another server uses the directory.
    """

    def __init__(self, root: Path, *, fsync: bool = False) -> None:
        self._root = root
        self._fsync = fsync
        self._reserved_generation = 0
        for name in ("buckets", "uploads", "sessions", "new"):
            (root / name).mkdir(parents=True, exist_ok=True)
        self._unlock = weakref.finalize(self, _unlock, _lock(root), os.getpid())

    def open(self) -> None:
        """See base class; raises RuntimeError after `close`, which has released the lock."""
        if not self._unlock.alive:
            raise RuntimeError(f"the server of {self._root} was stopped: create a new server")

    def close(self) -> None:
        """See base class; releases the lock. A second call does nothing."""
        self._unlock()

    # --- changes -------------------------------------------------------------------------

    def put_bucket(self, bucket: Bucket) -> None:
        directory = self._bucket_directory(bucket.name)
        (directory / "objects").mkdir(parents=True, exist_ok=True)
        self._write(directory / "bucket.json", _field_values(bucket, without={"objects"}))

    def drop_bucket(self, name: str) -> None:
        self._drop_directory(self._bucket_directory(name), "bucket.json")

    def put_object(self, record: ObjectRecord) -> None:
        document = _field_values(record, without={"bucket", "blob", "md5", "attributes"})
        document["leaves"] = leaf_names(record.blob)
        document["md5"] = record.md5.hex() if record.md5 else None
        document["attributes"] = asdict(record.attributes)
        self._write(self._object_path(record.bucket, record.name), document)

    def drop_object(self, record: ObjectRecord) -> None:
        self._unlink(self._object_path(record.bucket, record.name))

    def put_multipart(self, upload: MultipartUpload) -> None:
        directory = self._upload_directory(upload)
        directory.mkdir()
        document = _field_values(upload, without={"attributes", "parts"})
        self._write(directory / "upload.json", document | {"attributes": asdict(upload.attributes)})

    def put_part(self, upload: MultipartUpload, part: Part) -> None:
        document = _field_values(part, without={"blob", "md5"})
        md5 = None if part.md5 is None else part.md5.hex()
        document |= {"leaves": leaf_names(part.blob), "md5": md5}
        self._write(self._upload_directory(upload) / f"{part.number}.json", document)

    def drop_multipart(self, upload: MultipartUpload) -> None:
        self._drop_directory(self._upload_directory(upload), "upload.json")

    def put_resumable(self, upload: ResumableUpload) -> None:
        parts = {"attributes", "declared", "preconditions", "digest", "pieces", "resource"}
        md5 = upload.declared.md5
        document = _field_values(upload, without=parts) | {
            "attributes": asdict(upload.attributes),
            "declared": {"crc32c": upload.declared.crc32c, "md5": md5.hex() if md5 else None},
            "preconditions": asdict(upload.preconditions),
            "has_md5": upload.digest.md5 is not None,
            "leaves": [name for blob in upload.pieces for name in leaf_names(blob)],
            "resource": None if upload.resource is None else dict(upload.resource),
        }
        self._write(self._session_path(upload), document)

    def drop_resumable(self, upload: ResumableUpload) -> None:
        self._unlink(self._session_path(upload))

    def reserve_generations(self, generation: int) -> None:
        """See base class; reserves all generations of the next second."""
        if generation > self._reserved_generation:
            self._reserved_generation = generation + _RESERVED_US
            self._write(self._root / "generations", self._reserved_generation)

    # --- files ---------------------------------------------------------------------------

    def _bucket_directory(self, name: str) -> Path:
        return self._root / "buckets" / _hash_name(name)

    def _object_path(self, bucket: str, name: str) -> Path:
        return self._bucket_directory(bucket) / "objects" / f"{_hash_name(name)}.json"

    def _upload_directory(self, upload: MultipartUpload) -> Path:
        return self._root / "uploads" / upload.upload_id

    def _session_path(self, upload: ResumableUpload) -> Path:
        return self._root / "sessions" / f"{upload.upload_id}.json"

    def _write(self, path: Path, document: object) -> None:
        self.open()
        new_path = self._root / "new" / uuid.uuid4().hex
        with new_path.open("xb") as file:
            file.write(msgspec.json.encode(document))
            if self._fsync:
                file.flush()
                os.fsync(file.fileno())
        new_path.replace(path)
        self._sync_directory(path.parent)

    def _unlink(self, path: Path) -> None:
        path.unlink()
        self._sync_directory(path.parent)

    def _drop_directory(self, directory: Path, record: str) -> None:
        self._unlink(directory / record)
        shutil.rmtree(directory)

    def _sync_directory(self, directory: Path) -> None:
        """Flush the entries of a directory to disk if `fsync` is set."""
        if not self._fsync:
            return
        descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def open_state(root: Path, *, fsync: bool = False) -> State:
    """Read the state in a directory, and delete temporary files and unused bytes.

    Args:
        root: The directory. It is created if it is missing.
        fsync: Flush each change to disk, so that it survives a power loss.

    Raises:
        RuntimeError: Another server uses the directory.
        ValueError: Another version of the server wrote the directory.
        OSError: The bytes of a record are missing.
        msgspec.DecodeError: A record is damaged, for example by a power loss.
    """
    journal = FileJournal(root, fsync=fsync)
    blobs = FileBlobs(root / "data", fsync=fsync)
    state = State(blobs, journal)
    for path in (root / "new").iterdir():
        path.unlink()
    generations = root / "generations"
    state.restore(
        [_read_bucket(path, blobs) for path in _directories(root / "buckets", "bucket.json")],
        [_read_multipart(path, blobs) for path in _directories(root / "uploads", "upload.json")],
        [_read_resumable(path, blobs) for path in sorted((root / "sessions").iterdir())],
        last_generation=msgspec.json.decode(generations.read_bytes())
        if generations.exists()
        else 0,
    )
    blobs.sweep(set(_used_leaf_names(state)))
    return state


def _used_leaf_names(state: State) -> Iterator[str]:
    """Yield the ids of the leaves of all records."""
    for bucket in state.buckets.values():
        for name in bucket.objects.ordered():
            record = bucket.objects.get(name)
            assert record is not None
            yield from leaf_names(record.blob)
    for multipart in state.multipart_uploads.values():
        for part in multipart.parts.values():
            yield from leaf_names(part.blob)
    for resumable in state.resumable_uploads.values():
        for blob in resumable.pieces:
            yield from leaf_names(blob)


def _directories(parent: Path, record: str) -> Iterator[Path]:
    """Yield the directories that have a record, and delete the directories without one."""
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
    """Read a resumable upload, and compute its checksums from the received bytes."""
    document = _read(path)
    pieces = [blobs.open([name]) for name in document.pop("leaves")]
    digest = Digest(with_md5=document.pop("has_md5"))
    for blob in pieces:
        digest.update(blob.view(0, blob.size))
    declared = document.pop("declared")
    document["declared"] = DeclaredChecksums(
        crc32c=declared["crc32c"], md5=_from_hex(declared["md5"])
    )
    document["preconditions"] = Preconditions(**document["preconditions"])
    return ResumableUpload(pieces=pieces, digest=digest, **document)


def _read(path: Path) -> dict[str, Any]:
    document: dict[str, Any] = msgspec.json.decode(path.read_bytes())
    if "attributes" in document:
        document["attributes"] = Attributes(**document["attributes"])
    if "md5" in document:
        document["md5"] = _from_hex(document["md5"])
    return document


def _from_hex(text: str | None) -> bytes | None:
    return None if text is None else bytes.fromhex(text)


def _lock(root: Path) -> int:
    """Lock a directory, and return the file descriptor that holds the lock."""
    descriptor = os.open(root / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as exc:
        os.close(descriptor)
        raise RuntimeError(f"another server uses {root}: stop it, or use another root") from exc
    _fork.track(descriptor)
    return descriptor


def _unlock(descriptor: int, owner: int) -> None:
    """Release the lock for all processes that share it. A forked child only closes the file."""
    _fork.untrack(descriptor)
    if os.getpid() == owner:
        fcntl.flock(descriptor, fcntl.LOCK_UN)
    os.close(descriptor)


def _field_values(record: Any, *, without: set[str]) -> dict[str, Any]:
    """Return the fields of a dataclass that are parameters of its constructor."""
    names = (field.name for field in fields(record) if field.init and field.name not in without)
    return {name: getattr(record, name) for name in names}


def _hash_name(name: str) -> str:
    return hashlib.sha256(name.encode()).hexdigest()

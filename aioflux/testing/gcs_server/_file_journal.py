"""Records of buckets, objects and uploads in files, each put in place by one rename.

    root/lock                                  held while a server uses the directory
    root/generations                           no generation up to this is given out again
    root/data/XX/ID                            bytes, see FileBlobs
    root/buckets/HASH/bucket.json              a bucket exists from here on
    root/buckets/HASH/objects/XX/HASH.json     an object: its name, metadata and leaves of bytes
    root/uploads/ID/upload.json, N.json        an open multipart upload and its parts
    root/sessions/ID.json                      a resumable upload, and what it has received
    root/new/                                  records being written

HASH is the SHA-256 of a name, so that no name can lead out of the directory. Bytes are written
before the record that names them and deleted after it has gone: whenever the process dies, each
record names whole bytes, and bytes without a record are swept at the next start. A server that
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

from aioflux.testing.gcs_server import _forks
from aioflux.testing.gcs_server._file_blobs import names_of
from aioflux.testing.gcs_server._state import Journal

if TYPE_CHECKING:
    from pathlib import Path

    from aioflux.testing.gcs_server._records import (
        Bucket,
        MultipartUpload,
        ObjectRecord,
        Part,
        ResumableUpload,
    )

_RESERVED_US = 1_000_000


class FileJournal(Journal):
    """Keeps records in a directory.

    Args:
        root: The directory; made where it is missing.
        fsync: Wait for the disk at each record: it then survives a loss of power, too.

    Raises:
        RuntimeError: Another server uses the directory.
    """

    def __init__(self, root: Path, *, fsync: bool = False) -> None:
        self._root = root
        self._fsync = fsync
        self._reserved = 0
        for name in ("buckets", "uploads", "sessions", "new"):
            (root / name).mkdir(parents=True, exist_ok=True)
        self._unlock = weakref.finalize(self, _unlock, _lock(root), os.getpid())

    def open(self) -> None:
        """See base class.

        Raises:
            RuntimeError: It was closed: another server may have changed the directory since.
        """
        if not self._unlock.alive:
            raise RuntimeError(f"the server of {self._root} was stopped: make a new one")

    def close(self) -> None:
        """Let another server use the directory; does nothing when called again."""
        self._unlock()

    # --- changes -------------------------------------------------------------------------

    def put_bucket(self, bucket: Bucket) -> None:
        """See base class."""
        directory = self._bucket(bucket.name)
        directory.mkdir(exist_ok=True)
        self._write(directory / "bucket.json", _plain(bucket, without={"objects"}))

    def drop_bucket(self, name: str) -> None:
        """See base class."""
        self._drop_directory(self._bucket(name), "bucket.json")

    def put_object(self, record: ObjectRecord) -> None:
        """See base class."""
        document = _plain(record, without={"bucket", "blob", "md5", "attributes"})
        document["leaves"] = names_of(record.blob)
        document["md5"] = record.md5.hex() if record.md5 else None
        document["attributes"] = asdict(record.attributes)
        path = self._object(record.bucket, record.name)
        path.parent.mkdir(parents=True, exist_ok=True)
        self._write(path, document)

    def drop_object(self, record: ObjectRecord) -> None:
        """See base class."""
        self._unlink(self._object(record.bucket, record.name))

    def put_multipart(self, upload: MultipartUpload) -> None:
        """See base class."""
        directory = self._upload(upload)
        directory.mkdir()
        document = _plain(upload, without={"attributes", "parts"})
        self._write(directory / "upload.json", document | {"attributes": asdict(upload.attributes)})

    def put_part(self, upload: MultipartUpload, part: Part) -> None:
        """See base class."""
        document = _plain(part, without={"blob", "md5"})
        md5 = None if part.md5 is None else part.md5.hex()
        document |= {"leaves": names_of(part.blob), "md5": md5}
        self._write(self._upload(upload) / f"{part.number}.json", document)

    def drop_multipart(self, upload: MultipartUpload) -> None:
        """See base class."""
        self._drop_directory(self._upload(upload), "upload.json")

    def put_resumable(self, upload: ResumableUpload) -> None:
        """See base class."""
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
        """See base class."""
        self._unlink(self._session(upload))

    def reserve_generations(self, generation: int) -> None:
        """See base class: a second's worth at a time."""
        if generation > self._reserved:
            self._reserved = generation + _RESERVED_US
            self._write(self._root / "generations", self._reserved)

    # --- files ---------------------------------------------------------------------------

    def _bucket(self, name: str) -> Path:
        return self._root / "buckets" / _hash(name)

    def _object(self, bucket: str, name: str) -> Path:
        hashed = _hash(name)
        return self._bucket(bucket) / "objects" / hashed[:2] / f"{hashed}.json"

    def _upload(self, upload: MultipartUpload) -> Path:
        return self._root / "uploads" / upload.upload_id

    def _session(self, upload: ResumableUpload) -> Path:
        return self._root / "sessions" / f"{upload.upload_id}.json"

    def _write(self, path: Path, document: object) -> None:
        """Put a record in place, whole or not at all."""
        self.open()
        new = self._root / "new" / uuid.uuid4().hex
        with new.open("xb") as file:
            file.write(msgspec.json.encode(document))
            if self._fsync:
                file.flush()
                os.fsync(file.fileno())
        new.replace(path)
        self._settle(path.parent)

    def _unlink(self, path: Path) -> None:
        path.unlink()
        self._settle(path.parent)

    def _drop_directory(self, directory: Path, record: str) -> None:
        """Delete a directory, which ends with its record."""
        self._unlink(directory / record)
        shutil.rmtree(directory)

    def _settle(self, directory: Path) -> None:
        """Wait until the disk knows of a name that has come or gone."""
        if not self._fsync:
            return
        descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def _lock(root: Path) -> int:
    """Return a descriptor that holds the lock of a directory until it is closed."""
    descriptor = os.open(root / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as exc:
        os.close(descriptor)
        raise RuntimeError(f"another server uses {root}: stop it, or take another root") from exc
    _forks.hold(descriptor)
    return descriptor


def _unlock(descriptor: int, owner: int) -> None:
    """Give a lock up, whoever else has the descriptor; a forked child gives up its own copy."""
    _forks.release(descriptor)
    if os.getpid() == owner:
        fcntl.flock(descriptor, fcntl.LOCK_UN)
    os.close(descriptor)


def _plain(record: Any, *, without: set[str]) -> dict[str, Any]:
    """Return the fields of a dataclass that JSON can hold, without those that are derived."""
    names = (field.name for field in fields(record) if field.init and field.name not in without)
    return {name: getattr(record, name) for name in names}


def _hash(name: str) -> str:
    return hashlib.sha256(name.encode()).hexdigest()

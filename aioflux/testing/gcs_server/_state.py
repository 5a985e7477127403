"""State of the server: buckets, objects and uploads, without HTTP.

Each change is first written to the journal, which may make it durable (or reject it by raising),
then made visible. The server holds the lock around each request, as do the helpers that tests call
from other threads.
"""

from __future__ import annotations

import threading
import time
from dataclasses import replace
from typing import TYPE_CHECKING

from aioflux.testing.gcs_server._blobs import Blob, Blobs, MemoryBlobs
from aioflux.testing.gcs_server._checksums import NOTHING_DECLARED, Declared, hash_pieces
from aioflux.testing.gcs_server._errors import APIError, no_such_bucket, no_such_object
from aioflux.testing.gcs_server._preconditions import NONE, Preconditions
from aioflux.testing.gcs_server._records import (
    Attributes,
    Bucket,
    MultipartUpload,
    ObjectRecord,
    Part,
    ResumableUpload,
    check_object_name,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from aioflux.testing.gcs_server._messages import Buffer


class Journal:
    """Log of changes, written before they are visible. This one keeps nothing: memory only."""

    def open(self) -> None:
        """Begin to use the journal: the server starts."""

    def close(self) -> None:
        """End the use of the journal: the server has stopped."""

    def put_bucket(self, bucket: Bucket) -> None:
        """Make a new or changed bucket durable."""

    def drop_bucket(self, name: str) -> None:
        """Make the deletion of a bucket durable."""

    def put_multipart(self, upload: MultipartUpload) -> None:
        """Make a new multipart upload durable."""

    def put_part(self, upload: MultipartUpload, part: Part) -> None:
        """Make a part durable, in place of one with the same number."""

    def drop_multipart(self, upload: MultipartUpload) -> None:
        """Make the end of a multipart upload durable."""

    def put_resumable(self, upload: ResumableUpload) -> None:
        """Make a resumable upload durable, with its received bytes."""

    def drop_resumable(self, upload: ResumableUpload) -> None:
        """Make the end of a resumable upload durable."""

    def reserve_generations(self, generation: int) -> None:
        """Make it durable that no generation up to this one is used again."""

    def put_object(self, record: ObjectRecord) -> None:
        """Make a new or changed object durable: the commit point of every write."""

    def drop_object(self, record: ObjectRecord) -> None:
        """Make the deletion of an object durable."""


class State:
    """Buckets, objects and unfinished uploads.

    Args:
        blobs: Keeps the bytes.
        journal: Makes changes durable.
        clock: Microseconds since 1970.
    """

    def __init__(
        self,
        blobs: Blobs | None = None,
        journal: Journal | None = None,
        *,
        clock: Callable[[], int] = lambda: time.time_ns() // 1000,
    ) -> None:
        self.lock = threading.RLock()
        self.blobs = blobs or MemoryBlobs()
        self.buckets: dict[str, Bucket] = {}
        self.multipart_uploads: dict[str, MultipartUpload] = {}
        self.resumable_uploads: dict[str, ResumableUpload] = {}
        self.journal = journal or Journal()
        self.has_md5 = True
        """Whether objects and parts get an MD5, as on GCS, even if the writer declares none."""
        self.denied_permissions: set[str] = set()
        """Permissions that `testIamPermissions` does not grant; no request is rejected for them."""
        self._clock = clock
        self._last_generation = 0

    def now(self) -> int:
        """Return the time in microseconds since 1970."""
        return self._clock()

    def needs_md5(self, declared: Declared) -> bool:
        """Return whether the MD5 of an upload has to be computed."""
        return self.has_md5 or declared.md5 is not None

    def next_generation(self) -> int:
        """Return a number above every one before: the time, if the clock has moved."""
        self._last_generation = max(self._clock(), self._last_generation + 1)
        self.journal.reserve_generations(self._last_generation)
        return self._last_generation

    # --- buckets -------------------------------------------------------------------------

    def bucket(self, name: str) -> Bucket:
        """Return a bucket, or raise a 404."""
        bucket = self.buckets.get(name)
        if bucket is None:
            raise no_such_bucket(name)
        return bucket

    def create_bucket(self, name: str, *, location: str = "US") -> Bucket:
        """Create an empty bucket; a 409 if the name is taken."""
        if name in self.buckets:
            message = "Your previous request to create the named bucket succeeded and you own it."
            raise APIError(409, "conflict", message, code="BucketAlreadyOwnedByYou")
        bucket = Bucket(name, self.now(), self.next_generation(), location=location)
        self.journal.put_bucket(bucket)
        self.buckets[name] = bucket
        return bucket

    def update_bucket(
        self, bucket: Bucket, *, labels: dict[str, str], storage_class: str
    ) -> Bucket:
        """Replace labels and storage class of a bucket: next metageneration."""
        changed = replace(
            bucket,
            labels=labels,
            storage_class=storage_class,
            metageneration=bucket.metageneration + 1,
        )
        self.journal.put_bucket(changed)
        self.buckets[bucket.name] = changed
        return changed

    def delete_bucket(self, name: str) -> None:
        """Delete an empty bucket; a 409 if it holds objects."""
        if len(self.bucket(name).objects):
            message = "The bucket you tried to delete is not empty."
            raise APIError(409, "conflict", message, code="BucketNotEmpty")
        for upload in [up for up in self.multipart_uploads.values() if up.bucket == name]:
            self.drop_multipart(upload)
        self.journal.drop_bucket(name)
        del self.buckets[name]

    # --- objects -------------------------------------------------------------------------

    def find(self, bucket: str, name: str) -> ObjectRecord | None:
        """Return the live object of a name, or None."""
        return self.bucket(bucket).objects.get(name)

    def get(
        self,
        bucket: str,
        name: str,
        *,
        generation: int | None = None,
        preconditions: Preconditions = NONE,
    ) -> ObjectRecord:
        """Return an object for a read; else 404, 412 or 304."""
        record = self._live(bucket, name, generation)
        if preconditions is not NONE:
            preconditions.check(record)
        return record

    def put(
        self,
        bucket: str,
        name: str,
        pieces: Iterable[Buffer],
        attributes: Attributes | None = None,
        *,
        declared: Declared = NOTHING_DECLARED,
        preconditions: Preconditions = NONE,
    ) -> ObjectRecord:
        """Write an object whole, with crc32c and MD5; a 400 if a declared checksum differs."""
        preconditions.check(self.find(bucket, name))
        check_object_name(name)
        pieces = list(pieces)
        crc32c, md5 = hash_pieces(pieces, with_md5=self.needs_md5(declared))
        declared.check(crc32c=crc32c, md5=md5)
        blob = self.blobs.put(pieces)
        return self.commit(bucket, name, blob, crc32c=crc32c, md5=md5, attributes=attributes)

    def commit(
        self,
        bucket: str,
        name: str,
        blob: Blob,
        *,
        crc32c: int,
        md5: bytes | None,
        attributes: Attributes | None = None,
        component_count: int | None = None,
        preconditions: Preconditions = NONE,
    ) -> ObjectRecord:
        """Make a blob the new generation of an object; on an error the blob is discarded."""
        try:
            check_object_name(name)
            preconditions.check(self.find(bucket, name))
        except APIError:
            blob.discard()
            raise
        now = self.now()
        record = ObjectRecord(
            bucket=bucket,
            name=name,
            generation=self.next_generation(),
            blob=blob,
            size=blob.size,
            crc32c=crc32c,
            md5=md5,
            attributes=attributes or Attributes(),
            time_created_us=now,
            updated_us=now,
            component_count=component_count,
        )
        self._store(record)
        return record

    def copy(
        self, source: ObjectRecord, bucket: str, name: str, attributes: Attributes
    ) -> ObjectRecord:
        """Write an object with the bytes of another."""
        return self.commit(
            bucket,
            name,
            self.blobs.concat([source.blob]),
            crc32c=source.crc32c,
            md5=source.md5,
            component_count=source.component_count,
            attributes=attributes,
        )

    def update(self, record: ObjectRecord, attributes: Attributes) -> ObjectRecord:
        """Replace an object's attributes: same generation, next metageneration."""
        changed = replace(
            record,
            attributes=attributes,
            metageneration=record.metageneration + 1,
            updated_us=self.now(),
        )
        self._store(changed)
        return changed

    def delete(
        self,
        bucket: str,
        name: str,
        *,
        generation: int | None = None,
        preconditions: Preconditions = NONE,
    ) -> None:
        """Delete an object; else 404 or 412."""
        record = self._live(bucket, name, generation)
        preconditions.check(record)
        self.journal.drop_object(record)
        self.buckets[bucket].objects.remove(name)
        record.blob.discard()

    # --- uploads -------------------------------------------------------------------------

    def drop_multipart(self, upload: MultipartUpload) -> None:
        """Discard a multipart upload and its parts."""
        self.journal.drop_multipart(upload)
        del self.multipart_uploads[upload.upload_id]
        for part in upload.parts.values():
            part.blob.discard()

    def restore(
        self,
        buckets: Iterable[Bucket],
        multipart_uploads: Iterable[MultipartUpload] = (),
        resumable_uploads: Iterable[ResumableUpload] = (),
        *,
        last_generation: int = 0,
    ) -> None:
        """Add the records that a journal has kept from an earlier run, without journalling them."""
        self.multipart_uploads.update({upload.upload_id: upload for upload in multipart_uploads})
        self.resumable_uploads.update({upload.upload_id: upload for upload in resumable_uploads})
        self.buckets.update({bucket.name: bucket for bucket in buckets})
        self._last_generation = max(self._last_generation, last_generation)

    def _live(self, bucket: str, name: str, generation: int | None) -> ObjectRecord:
        record = self.find(bucket, name)
        if record is None or generation not in (None, record.generation):
            raise no_such_object(bucket, name)
        return record

    def _store(self, record: ObjectRecord) -> None:
        """Commit: make durable, then visible, then discard the bytes of the old generation."""
        objects = self.buckets[record.bucket].objects
        old = objects.get(record.name)
        self.journal.put_object(record)
        objects.put(record.name, record)
        if old is not None and old.blob is not record.blob:
            old.blob.discard()

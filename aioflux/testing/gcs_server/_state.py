"""State of the server: buckets, objects and uploads, without HTTP.

Each change is first written to the journal and then made visible. If the journal raises, nothing
changes. The caller must hold `State.lock`: the server acquires the lock for each request, and the
helpers of `GCSServer` acquire it too.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import TYPE_CHECKING

from aioflux.testing.gcs_server._blobs import Blob, Blobs, MemoryBlobs
from aioflux.testing.gcs_server._checksums import NO_CHECKSUMS, DeclaredChecksums, hash_pieces
from aioflux.testing.gcs_server._errors import APIError, no_such_bucket, no_such_object
from aioflux.testing.gcs_server._preconditions import NO_PRECONDITIONS, Preconditions
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
    from aioflux.testing.gcs_server._messages import Buffer


class Journal:
    """Base class of a log of changes. This class stores nothing: the state is in memory only."""

    def open(self) -> None:
        """Prepare for changes, when the server starts."""

    def close(self) -> None:
        """Release all resources, when the server has stopped."""

    def put_bucket(self, bucket: Bucket) -> None:
        """Make a new or changed bucket durable."""

    def drop_bucket(self, name: str) -> None:
        """Make the deletion of a bucket durable."""

    def put_multipart(self, upload: MultipartUpload) -> None:
        """Make a new multipart upload durable."""

    def put_part(self, upload: MultipartUpload, part: Part) -> None:
        """Make a part durable. It replaces a part with the same number."""

    def drop_multipart(self, upload: MultipartUpload) -> None:
        """Make the completion or abort of a multipart upload durable."""

    def put_resumable(self, upload: ResumableUpload) -> None:
        """Make a new resumable upload, or its newly received bytes, durable."""

    def drop_resumable(self, upload: ResumableUpload) -> None:
        """Make the deletion of a resumable upload durable."""

    def reserve_generations(self, generation: int) -> None:
        """Record durably that generations up to this number may be in use."""

    def put_object(self, record: ObjectRecord) -> None:
        """Make a new or changed object durable. This call commits a write."""

    def drop_object(self, record: ObjectRecord) -> None:
        """Make the deletion of an object durable."""


class State:
    """Buckets, objects and unfinished uploads.

    Args:
        blobs: Store of the bytes of objects; by default in memory.
        journal: Log of changes; by default nothing is logged.
        clock: Function that returns the time in microseconds since 1970.
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
        """Whether to compute the MD5 of every object and part, even if the request has none."""
        self.denied_permissions: set[str] = set()
        """Permissions that no caller has: requests that need one of them are rejected."""
        self._clock = clock
        self._last_generation = 0

    def now(self) -> int:
        return self._clock()

    def needs_md5(self, declared: DeclaredChecksums) -> bool:
        return self.has_md5 or declared.md5 is not None

    def next_generation(self) -> int:
        """Return a number greater than all earlier generations: the time or the last one plus 1."""
        self._last_generation = max(self._clock(), self._last_generation + 1)
        self.journal.reserve_generations(self._last_generation)
        return self._last_generation

    # --- buckets -------------------------------------------------------------------------

    def bucket(self, name: str) -> Bucket:
        """Return a bucket. Raise APIError (404) if it does not exist."""
        bucket = self.buckets.get(name)
        if bucket is None:
            raise no_such_bucket(name)
        return bucket

    def create_bucket(self, name: str, *, location: str = "US") -> Bucket:
        """Create an empty bucket. Raise APIError (409) if it exists."""
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
        """Replace labels and storage class of a bucket, and increase its metageneration."""
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
        """Delete a bucket. Raise APIError (409) if it has objects."""
        if len(self.bucket(name).objects):
            message = "The bucket you tried to delete is not empty."
            raise APIError(409, "conflict", message, code="BucketNotEmpty")
        for upload in [up for up in self.multipart_uploads.values() if up.bucket == name]:
            self.drop_multipart(upload)
        self.journal.drop_bucket(name)
        del self.buckets[name]

    # --- objects -------------------------------------------------------------------------

    def find(self, bucket: str, name: str) -> ObjectRecord | None:
        """Return the current generation of an object, or None if it does not exist."""
        return self.bucket(bucket).objects.get(name)

    def get(
        self,
        bucket: str,
        name: str,
        *,
        generation: int | None = None,
        preconditions: Preconditions = NO_PRECONDITIONS,
    ) -> ObjectRecord:
        """Return an object. Raise APIError: 404 if missing, 412 or 304 for a precondition."""
        record = self._get_live(bucket, name, generation)
        if preconditions is not NO_PRECONDITIONS:
            preconditions.check(record)
        return record

    def put(
        self,
        bucket: str,
        name: str,
        pieces: Iterable[Buffer],
        attributes: Attributes | None = None,
        *,
        declared: DeclaredChecksums = NO_CHECKSUMS,
        preconditions: Preconditions = NO_PRECONDITIONS,
    ) -> ObjectRecord:
        """Write an object. Raise APIError: 400 for a checksum, 412 or 304 for a precondition."""
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
        preconditions: Preconditions = NO_PRECONDITIONS,
    ) -> ObjectRecord:
        """Make a blob the new generation of an object, or discard it and raise an APIError."""
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
        self._commit_record(record)
        return record

    def copy(
        self, source: ObjectRecord, bucket: str, name: str, attributes: Attributes
    ) -> ObjectRecord:
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
        """Replace the attributes of an object, and increase its metageneration."""
        changed = replace(
            record,
            attributes=attributes,
            metageneration=record.metageneration + 1,
            updated_us=self.now(),
        )
        self._commit_record(changed)
        return changed

    def delete(
        self,
        bucket: str,
        name: str,
        *,
        generation: int | None = None,
        preconditions: Preconditions = NO_PRECONDITIONS,
    ) -> None:
        """Delete an object. Raise APIError: 404 if missing, 412 or 304 for a precondition."""
        record = self._get_live(bucket, name, generation)
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
        """Add the records of an earlier run of the server, without writing to the journal."""
        self.multipart_uploads.update({upload.upload_id: upload for upload in multipart_uploads})
        self.resumable_uploads.update({upload.upload_id: upload for upload in resumable_uploads})
        self.buckets.update({bucket.name: bucket for bucket in buckets})
        self._last_generation = max(self._last_generation, last_generation)

    def _get_live(self, bucket: str, name: str, generation: int | None) -> ObjectRecord:
        record = self.find(bucket, name)
        if record is None or generation not in (None, record.generation):
            raise no_such_object(bucket, name)
        return record

    def _commit_record(self, record: ObjectRecord) -> None:
        """Make a record durable, then visible, then discard the bytes of the old generation."""
        objects = self.buckets[record.bucket].objects
        old = objects.get(record.name)
        self.journal.put_object(record)
        objects.put(record.name, record)
        if old is not None and old.blob is not record.blob:
            old.blob.discard()

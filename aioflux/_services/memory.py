"""Objects in the memory of this process, for tests and examples: `memory://name`.

All stores of a process with the same name share one bucket, until the process exits. Other
processes, such as spawned workers, have separate buckets.
"""

from __future__ import annotations

import itertools
from bisect import bisect_left, insort
from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from typing import TYPE_CHECKING

import google_crc32c

from aioflux._services.base import (
    Body,
    Capabilities,
    Page,
    Service,
    UploadedPart,
    WriteRequest,
)
from aioflux._services.responses import written_fields
from aioflux._values.meta import DEFAULT_ATTRIBUTES, ObjectMeta, OpenUpload, attributes_of
from aioflux._values.uri import check_name
from aioflux.errors import ChecksumError, NotFoundError, PreconditionFailedError

if TYPE_CHECKING:
    from aioflux._services.base import (
        Into,
        ListRequest,
        PartRequest,
        Precondition,
        ReadRequest,
        Source,
    )
    from aioflux._values.meta import ObjectAttributes

_generations = itertools.count(1)


@dataclass(frozen=True, slots=True)
class _Stored:
    data: bytes
    meta: ObjectMeta


@dataclass(frozen=True, slots=True)
class _Upload:
    key: str
    parts: dict[int, bytes]
    initiated: datetime


class MemoryBucket:
    """Objects, their sorted keys, and open uploads of one bucket."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.objects: dict[str, _Stored] = {}
        self.keys: list[str] = []
        self.uploads: dict[str, _Upload] = {}

    def store(
        self, key: str, data: bytes, attributes: ObjectAttributes = DEFAULT_ATTRIBUTES
    ) -> ObjectMeta:
        """Store a whole object with a new generation."""
        generation = str(next(_generations))
        meta = ObjectMeta(
            key=key,
            uri=f"memory://{self.name}/{key}",
            size=len(data),
            etag=generation,
            generation=generation,
            crc32c=google_crc32c.value(data),
            updated=datetime.now(UTC),
            **written_fields(attributes),
        )
        if key not in self.objects:
            insort(self.keys, key)
        self.objects[key] = _Stored(data, meta)
        return meta

    def remove(self, key: str) -> None:
        """Remove an object."""
        del self.objects[key]
        del self.keys[bisect_left(self.keys, key)]


_buckets: dict[str, MemoryBucket] = {}


def memory_bucket(name: str) -> MemoryBucket:
    """Return the bucket with a name in this process; create it on first use."""
    return _buckets.setdefault(name, MemoryBucket(name))


class MemoryService(Service):
    """One bucket and prefix in memory."""

    capabilities = Capabilities(conditional_complete=False)

    def __init__(self, bucket: str, prefix: str) -> None:
        super().__init__(root_uri=f"memory://{bucket}/", prefix=prefix)
        self._bucket = memory_bucket(bucket)

    def _find(self, key: str, generation: str = "") -> _Stored:
        stored = self._bucket.objects.get(self._name(key))
        if stored is None or generation not in {"", stored.meta.generation}:
            which = f" in generation {generation}" if generation else ""
            uri = self.uri(key)
            raise NotFoundError(
                f"there is no object {uri}{which}; list the prefix to see which objects exist",
                uri=uri,
                status=404,
            )
        return stored

    def _name(self, key: str) -> str:
        """Return the object's full name in the bucket; ValueError if no object can have it."""
        check_name(self._prefix + key)
        return self._prefix + key

    def _check_precondition(self, key: str, precondition: Precondition) -> None:
        stored = self._bucket.objects.get(self._name(key))
        actual = stored.meta.generation if stored else None
        expected = precondition.if_generation_match
        if (precondition.if_absent and stored) or (expected is not None and expected != actual):
            found = f"it has generation {actual}" if stored else "it does not exist"
            wanted = f"generation {expected}" if expected is not None else "no object"
            why = f"{found}; the precondition expects {wanted}"
            raise PreconditionFailedError.of("write", self.uri(key), why, status=412)

    def _relative_meta(self, meta: ObjectMeta) -> ObjectMeta:
        """Return metadata with the key relative to the store's prefix."""
        return replace(meta, key=meta.key[len(self._prefix) :])

    async def head(self, key: str, generation: str = "") -> ObjectMeta:
        return self._relative_meta(self._find(key, generation).meta)

    async def get(self, request: ReadRequest, *, into: Into | None = None) -> Body:
        start, end = request.start, request.end
        stored = self._find(request.key, request.generation)
        part: bytes | memoryview = stored.data
        if start or end is not None:
            part = stored.data[start:end]
        if into is not None:
            memory = into(len(part)) if callable(into) else into
            memory[: len(part)] = part
            part = memory[: len(part)]
        return Body(
            data=part,
            size=len(stored.data),
            generation=stored.meta.generation,
            crc32c=stored.meta.crc32c,
            meta=lambda: self._relative_meta(stored.meta),
        )

    async def put(
        self, request: WriteRequest, pieces: Sequence[bytes | memoryview], *, crc32c: int | None
    ) -> ObjectMeta:
        content = b"".join(pieces)
        self._check_crc32c(request.key, content, crc32c)
        return self._store(request, content)

    def _store(self, request: WriteRequest, content: bytes) -> ObjectMeta:
        self._check_precondition(request.key, request.precondition)
        stored = self._bucket.store(self._name(request.key), content, attributes=request.attributes)
        return self._relative_meta(stored)

    def _check_crc32c(self, key: str, content: bytes, crc32c: int | None) -> None:
        if crc32c is not None and google_crc32c.value(content) != crc32c:
            uri = self.uri(key)
            raise ChecksumError(f"the bytes of {uri} do not match their crc32c", uri=uri)

    async def delete(self, key: str, *, generation: str = "") -> None:
        stored = self._find(key)
        if generation not in {"", stored.meta.generation}:
            why = f"it has generation {stored.meta.generation}, not {generation}"
            raise PreconditionFailedError.of("delete", self.uri(key), why, status=412)
        self._bucket.remove(self._prefix + key)

    async def list_page(self, request: ListRequest) -> Page:
        full_prefix = self._prefix + request.prefix
        end_offset, delimiter = request.end_offset, request.delimiter
        keys = self._bucket.keys
        start = max(full_prefix, self._prefix + request.start_offset, request.page_token)
        limit = request.page_size or self.capabilities.page_size
        objects: list[ObjectMeta] = []
        prefixes: list[str] = []
        index = bisect_left(keys, start)
        while index < len(keys) and keys[index].startswith(full_prefix):
            key = keys[index]
            if end_offset and key >= self._prefix + end_offset:
                break
            if len(objects) + len(prefixes) >= limit:
                return Page(objects, prefixes, key)
            delimiter_index = key.find(delimiter, len(full_prefix)) if delimiter else -1
            if delimiter_index < 0:
                objects.append(self._relative_meta(self._bucket.objects[key].meta))
                index += 1
                continue
            common_prefix = key[: delimiter_index + len(delimiter)]
            prefixes.append(common_prefix[len(self._prefix) :])
            while index < len(keys) and keys[index].startswith(common_prefix):
                index += 1
        return Page(objects, prefixes, "")

    async def compose(self, request: WriteRequest, sources: Sequence[Source]) -> ObjectMeta:
        content = b"".join(self._find(source.key, source.generation).data for source in sources)
        return self._store(request, content)

    async def copy(self, source: Source, key: str, *, precondition: Precondition) -> ObjectMeta:
        stored = self._find(source.key, source.generation)
        request = WriteRequest(key, precondition, attributes_of(stored.meta))
        return self._store(request, stored.data)

    async def initiate_upload(self, request: WriteRequest) -> str:
        upload_id = f"upload-{next(_generations)}"
        self._bucket.uploads[upload_id] = _Upload(self._name(request.key), {}, datetime.now(UTC))
        return upload_id

    def _upload(self, key: str, upload_id: str) -> _Upload:
        upload = self._bucket.uploads.get(upload_id)
        if upload is None or upload.key != self._prefix + key:
            uri = self.uri(key)
            raise NotFoundError(f"there is no upload {upload_id} of {uri}", uri=uri, status=404)
        return upload

    async def put_part(self, request: PartRequest) -> UploadedPart:
        key, number, content = request.key, request.number, b"".join(request.pieces)
        self._check_crc32c(key, content, request.crc32c)
        self._upload(key, request.upload_id).parts[number] = content
        return UploadedPart(number, f"part-{number}", len(content))

    async def complete_upload(
        self, request: WriteRequest, upload_id: str, parts: Sequence[UploadedPart]
    ) -> ObjectMeta:
        upload = self._upload(request.key, upload_id)
        meta = self._store(request, b"".join(upload.parts[part.number] for part in parts))
        del self._bucket.uploads[upload_id]
        return meta

    async def abort_upload(self, key: str, upload_id: str) -> None:
        self._bucket.uploads.pop(upload_id, None)

    async def list_uploads(self, prefix: str) -> Sequence[OpenUpload]:
        num_cut = len(self._prefix)
        uploads = [
            OpenUpload(key=upload.key[num_cut:], upload_id=upload_id, initiated=upload.initiated)
            for upload_id, upload in self._bucket.uploads.items()
            if upload.key.startswith(self._prefix + prefix)
        ]
        return sorted(uploads, key=lambda upload: (upload.key, upload.upload_id))

    async def granted_permissions(self, permissions: Sequence[str]) -> Sequence[str]:
        return permissions

    async def aclose(self) -> None:
        """Do nothing: the bucket keeps its objects after its stores are closed."""

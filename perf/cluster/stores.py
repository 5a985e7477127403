"""Stores over the model of a bucket: `ModelService` implements the contract of the services."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

from aioflux._services.base import Body, Capabilities, Page, Service, UploadedPart
from aioflux._transfer.session import Sessions
from aioflux._values.meta import ObjectMeta, OpenUpload
from aioflux._values.uri import parse_uri
from aioflux.errors import NotFoundError, PreconditionFailedError
from aioflux.options import RetryPolicy, Timeouts, TransferOptions
from aioflux.store import Store

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from contextlib import AbstractAsyncContextManager

    from aioflux._services.base import (
        Into,
        ListRequest,
        PartRequest,
        ReadRequest,
        Source,
        WriteRequest,
    )
    from aioflux._transfer.session import Session
    from aioflux.errors import StorageError
    from aioflux.store import ObjectWriter
    from perf.cluster.bucket import Bucket, Link, Stored

__all__ = ["ROOT", "ModelService", "SimulatedStore", "scaled_transfer"]

ROOT = "memory://bucket/"


class ModelService(Service):
    """Service for one prefix of the model, used by one process on a node."""

    def __init__(self, bucket: Bucket, link: Link, prefix: str) -> None:
        super().__init__(root_uri=ROOT, prefix=prefix)
        self._bucket = bucket
        self._link = link
        self._uploads: dict[str, dict[int, bytes]] = {}
        profile = bucket.profile
        is_gcs = not profile.delete_page_size
        self.capabilities = Capabilities(
            page_size=profile.page_size,
            delete_page_size=profile.delete_page_size,
            compose=is_gcs,
            conditional_complete=not is_gcs,
            min_part_size_bytes=1,
        )

    async def _exchange(self, operation: str, key: str, num_bytes: int = 0) -> None:
        scaled = num_bytes * self._bucket.scale_of(key) if num_bytes else 0.0
        await self._bucket.exchange(operation, self.uri(key), self._link, scaled)

    def _find(self, key: str, generation: str = "") -> Stored:
        stored = self._bucket.find(self._prefix + key)
        if stored is None or generation not in {"", stored.meta.generation}:
            uri = self.uri(key)
            raise NotFoundError(f"there is no object {uri} {generation}", uri=uri, status=404)
        return stored

    async def head(self, key: str, generation: str = "") -> ObjectMeta:
        """See base class."""
        await self._exchange("head", key)
        return self._find(key, generation).meta

    async def get(self, request: ReadRequest, *, into: Into | None = None) -> Body:
        """See base class."""
        found = self._bucket.find(self._prefix + request.key)
        size = len(found.data[request.start : request.end]) if found else 0
        await self._exchange("get", request.key, size)
        stored = self._find(request.key, request.generation)
        part: bytes | memoryview = stored.data[request.start : request.end]
        if into is not None:
            memory = into(len(part)) if callable(into) else into
            memory[: len(part)] = part
            part = memory[: len(part)]
        meta = stored.meta
        return Body(
            data=part,
            size=len(stored.data),
            generation=meta.generation,
            crc32c=meta.crc32c,
            meta=lambda: meta,
        )

    async def put(
        self, request: WriteRequest, pieces: Sequence[bytes | memoryview], *, crc32c: int | None
    ) -> ObjectMeta:
        """See base class."""
        data = b"".join(pieces)
        await self._exchange("put", request.key, len(data))
        return self._store(request, data, crc32c)

    def _store(self, request: WriteRequest, data: bytes, crc32c: int | None) -> ObjectMeta:
        bucket, name = self._bucket, self._prefix + request.key
        found = bucket.find(name)
        wanted = request.precondition.if_generation_match
        actual = found.meta.generation if found else None
        if (request.precondition.if_absent and found) or (wanted and wanted != actual):
            uri = self.uri(request.key)
            raise PreconditionFailedError(f"{uri} has generation {actual}", uri=uri, status=412)
        bucket.num_generations += 1
        meta = ObjectMeta(
            key=request.key,
            uri=ROOT + name,
            size=len(data),
            generation=str(bucket.num_generations),
            crc32c=crc32c,
            updated=datetime.fromtimestamp(asyncio.get_running_loop().time(), UTC),
        )
        bucket.add(name, data, meta)
        return meta

    async def delete(self, key: str, *, generation: str = "") -> None:
        """See base class."""
        await self._exchange("delete", key)
        self._find(key, generation)
        self._bucket.remove(self._prefix + key)

    async def delete_page(self, sources: Sequence[Source]) -> Mapping[str, StorageError]:
        """See base class."""
        await self._exchange("delete", sources[0].key)
        for source in sources:
            if self._bucket.find(self._prefix + source.key):
                self._bucket.remove(self._prefix + source.key)
        return {}

    async def list_page(self, request: ListRequest) -> Page:
        """See base class."""
        await self._exchange("list", request.prefix)
        page = self._bucket.page(request, self.capabilities.page_size)
        if page is not None:
            return page
        prefix = self._prefix + request.prefix
        end, delimiter = self._prefix + request.end_offset, request.delimiter
        start = max(prefix, self._prefix + request.start_offset, request.page_token)
        limit = request.page_size or self.capabilities.page_size
        objects: list[ObjectMeta] = []
        prefixes: dict[str, None] = {}
        for name in self._bucket.names(start):
            if not name.startswith(prefix) or (request.end_offset and name >= end):
                break
            if len(objects) + len(prefixes) >= limit:
                return Page(objects, list(prefixes), name)
            at = name.find(delimiter, len(prefix)) if delimiter else -1
            if at >= 0:
                prefixes[name[len(self._prefix) : at + len(delimiter)]] = None
            else:
                objects.append(self._bucket.objects[name].meta)
        return Page(objects, list(prefixes), "")

    async def initiate_upload(self, request: WriteRequest) -> str:
        """See base class."""
        await self._exchange("initiate", request.key)
        upload_id = f"upload-{len(self._uploads)}"
        self._uploads[upload_id] = {}
        return upload_id

    async def put_part(self, request: PartRequest) -> UploadedPart:
        """See base class."""
        number, data = request.number, b"".join(request.pieces)
        await self._exchange("part", request.key, len(data))
        self._uploads[request.upload_id][number] = data
        return UploadedPart(number, f"part-{number}", len(data))

    async def complete_upload(
        self, request: WriteRequest, upload_id: str, parts: Sequence[UploadedPart]
    ) -> ObjectMeta:
        """See base class."""
        await self._exchange("complete", request.key)
        stored = self._uploads.pop(upload_id)
        return self._store(request, b"".join(stored[part.number] for part in parts), None)

    async def abort_upload(self, key: str, upload_id: str) -> None:
        """See base class."""
        await self._exchange("abort", key)
        self._uploads.pop(upload_id, None)

    async def compose(self, request: WriteRequest, sources: Sequence[Source]) -> ObjectMeta:
        """See base class."""
        raise NotImplementedError

    async def copy(self, source: Source, key: str, *, precondition: Any) -> ObjectMeta:
        """See base class."""
        raise NotImplementedError

    async def list_uploads(self, prefix: str) -> Sequence[OpenUpload]:
        """See base class."""
        raise NotImplementedError

    async def aclose(self) -> None:
        """Do nothing: the model has no connections."""


class _VirtualSessions(Sessions):
    """Sessions whose clock is that of their loop; otherwise it is `time.monotonic`."""

    def _open(self, loop: asyncio.AbstractEventLoop) -> Session:
        self.clock = loop.time
        return super()._open(loop)


def scaled_transfer(transfer: TransferOptions, bytes_per_byte: int) -> TransferOptions:
    """Return options for objects of which one byte represents many."""
    scaled = replace(transfer)
    for name in ("part_size", "range_size", "max_buffered", "max_in_flight"):
        size = getattr(transfer, f"{name}_bytes") // bytes_per_byte
        # `TransferOptions` rejects parts of less than 5 MiB.
        object.__setattr__(scaled, f"{name}_bytes", max(1, size))
    return scaled


class SimulatedStore(Store):
    """A store over the model, in one process of a node.

    Args:
        bucket: The model.
        link: The network of the node.
        prefix: Prefix of the store.
        transfer: As for `open_store`.
        retry: As for `open_store`.
        bytes_per_byte: Bytes that one byte of an object of `open_writer` represents. Parts of
            such an object are scaled, too.
    """

    def __init__(
        self,
        bucket: Bucket,
        link: Link,
        prefix: str = "",
        *,
        transfer: TransferOptions | None = None,
        retry: RetryPolicy | None = None,
        bytes_per_byte: int = 1,
    ) -> None:
        super().__init__(
            parse_uri(f"{ROOT}{prefix}"),
            transfer=transfer or TransferOptions(),
            retry=retry or RetryPolicy(),
            timeouts=Timeouts(),
        )
        self._sessions.__class__ = _VirtualSessions
        self._bucket, self._link = bucket, link
        self._scaled: SimulatedStore | None = None
        if bytes_per_byte > 1:
            self._scaled = SimulatedStore(
                bucket,
                link,
                prefix,
                transfer=scaled_transfer(self.transfer, bytes_per_byte),
                retry=retry,
            )

    def _open_service(self, config: Any) -> Service:
        return ModelService(self._bucket, self._link, config.location.key)

    def reopened(self) -> SimulatedStore:
        """See base class."""
        return SimulatedStore(
            self._bucket,
            self._link,
            self._config.location.key,
            transfer=self.transfer,
            retry=self.retry,
        )

    def open_writer(  # type: ignore[override]
        self, key: str, **options: Any
    ) -> AbstractAsyncContextManager[ObjectWriter]:
        """See base class."""
        if self._scaled is not None:
            return self._scaled.open_writer(key, **options)
        return super().open_writer(key, **options)

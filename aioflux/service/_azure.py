"""Azure Blob Storage: everything on the data plane, authorized by `auth/_azure.py`.

    put -> Put Blob                                  create -> If-None-Match: *
    parts -> Put Block (id: upload and number) -> Put Block List, which makes them a blob, whole

The service knows no uploads: blocks that belong to no blob yet are in no listing of ours, and go
after a week. Whoever writes the key meanwhile drops them, so that of two uploads of one key the
first to end wins, and the other one fails. They cannot be dropped alone: see `abort_upload`.

What is verified: bytes sent, by the MD5 of each request, which the service compares; bytes read in
one answer, by the MD5 of the blob where it has one (those made of parts have none). Ranges have no
checksum: over TLS they are trusted, else read twice, as `TransferOptions.verify_ranges` says.

Over 500 lines because all operations of the contract are declared here: their signatures are a
third of it, and what an answer is worth is decided in `_azure_read` and `_azure_wire`.
"""

from __future__ import annotations

import asyncio
import binascii
import hashlib
import os
import re
import time
from dataclasses import replace
from typing import TYPE_CHECKING, Any
from urllib.parse import quote, urlsplit

from aioflux._errors import (
    NotFoundError,
    PreconditionFailedError,
    StorageError,
    TransientError,
)
from aioflux._meta import OpenUpload
from aioflux.auth._azure import open_access
from aioflux.http import ConnectionLostError, Origin, open_pool
from aioflux.service import _azure_batch as batch
from aioflux.service import _azure_read as reading
from aioflux.service import _azure_wire as wire
from aioflux.service._azure_copy import wait_for_copy
from aioflux.service._azure_lister import Lister
from aioflux.service._azure_send import Sender
from aioflux.service._base import Body, Capabilities, Page, Precondition, Service, UploadedPart

if TYPE_CHECKING:
    import ssl
    from collections.abc import Mapping, Sequence

    from aioflux._meta import ObjectMeta
    from aioflux._policy import Timeouts
    from aioflux.http import Response, Waiter
    from aioflux.service._base import Exchange, Into, Source

__all__ = ["AzureService"]

MIB = 1024 * 1024

_PLAIN_NAME = re.compile(
    r"(?:[A-Za-z0-9_~-][A-Za-z0-9_~-]*/)*[A-Za-z0-9_~-][A-Za-z0-9_.~-]*[A-Za-z0-9_~-]"
)
"""Names that stand in a url as they are; `check_name` has nothing against any up to 1024 long."""
_COMPLETE_SECONDS = 600.0
_THREAD_BYTES = 256 * 1024
"""MD5 of more than this is taken in a thread: it does 0.6 GB/s, so that 16 MiB take 25 ms."""
_PLAIN_ETAG = re.compile(r"[!#-~]*")


class AzureService(Service):
    """One container and prefix of a storage account."""

    capabilities = Capabilities(
        compose=False,
        conditional_complete=True,
        checksums=False,
        min_part_size_bytes=1,
        max_part_size_bytes=4000 * MIB,
        max_parts=50_000,
        page_size=5000,
        delete_page_size=batch.MAX_DELETES,
        list_ranges=False,
        part_checksums=False,
    )

    def __init__(
        self,
        account: str,
        container: str,
        prefix: str,
        *,
        endpoint_url: str | None = None,
        credentials: Any = None,
        timeouts: Timeouts,
        max_connections: int,
        verify: bool = True,
        ssl_context: ssl.SSLContext | None = None,
    ) -> None:
        super().__init__(root_uri=f"az://{account}/{container}/", prefix=prefix)
        is_http = (endpoint_url or "").startswith("http://")
        access = open_access(account, credentials, is_http=is_http, environ=os.environ)
        url = endpoint_url or access.endpoint_url
        url = url or f"https://{account}.blob.core.windows.net"
        origin = Origin.from_url(url)
        self._container_path = f"{_root_path(url, account)}/{quote(container, safe='')}".encode()
        self.capabilities = replace(
            AzureService.capabilities,
            guarded_transport=origin.scheme == "https",
            # Emulators know no batch that is authorized by the SAS token of an account.
            delete_page_size=0 if access.sas else batch.MAX_DELETES,
        )
        pool = open_pool(
            origin, max_connections=max_connections, timeouts=timeouts, ssl_context=ssl_context
        )
        self._sender = Sender(access, pool, origin, uri=self.uri)
        self._lister = Lister(self._sender, self._container_path, prefix, uri=self.uri)
        self._verify = verify
        # Content type and metadata of the uploads under way, which their last request tells.
        self._begun: dict[str, tuple[str, Mapping[str, str]]] = {}

    async def head(self, key: str, *, generation: str = "") -> ObjectMeta:
        headers = [wire.match_header(generation)] if generation else []
        try:
            response = await self._sender.send(
                b"HEAD", self._path(key), "read the metadata of", key, headers=headers
            )
        except PreconditionFailedError as exc:
            raise self._replaced(key, generation, exc) from exc
        self._refuse_directory(response, key)
        told = response.headers.get(b"content-length", b"")
        if not told.isdigit() or not wire.etag_of(response.headers):
            raise self._foreign("read the metadata of", key, response)
        return wire.meta_from_headers(response.headers, key=key, uri=self.uri(key), size=int(told))

    async def get(
        self,
        key: str,
        *,
        generation: str = "",
        start: int = 0,
        end: int | None = None,
        into: Into | None = None,
    ) -> Body:
        is_range = start > 0 or end is not None
        headers = [reading.range_header(start, end)] if is_range else []
        if generation:
            headers.append(wire.match_header(generation))
        try:
            response = await self._sender.send(
                b"GET",
                self._path(key),
                "read",
                key,
                headers=headers,
                into=bytes if into is None else into,
                # Of a service that ignores the range, no more than was asked for is taken.
                max_body_bytes=None if end is None else end - start,
                accept=416 if is_range else 0,
            )
        except PreconditionFailedError as exc:
            raise self._replaced(key, generation, exc) from exc
        body = self._read(key, response, start=start, end=end, generation=generation)
        if body is None:
            return await self._look_again(key, generation, start)
        expected = self._expected_md5(key, response, body, start)
        if expected is not None:
            self._compare(key, await _md5([memoryview(body.data)]), expected)
        return body

    def begin_get(self, key: str, *, generation: str, end: int, waiter: Waiter) -> Exchange | None:
        # An ETag that is none could change the request; `get` says so.
        if _PLAIN_ETAG.fullmatch(generation) is None:
            return None
        headers = [reading.range_header(0, end)]
        if generation:
            headers.append(wire.match_header(generation))
        return self._sender.begin(self._path(key), headers, waiter, end=end)

    def end_get(
        self, key: str, exchange: Exchange, answer: Response, *, generation: str, end: int
    ) -> Body | None:
        self._sender.end(exchange)
        status, headers = answer.status, answer.headers
        body: Body | None
        if reading.is_whole(status, headers, answer.num_bytes, end=end, generation=generation):
            body = self._body(key, answer, answer.body, answer.num_bytes)
        elif 200 <= status < 300 or status == 416:
            body = self._read(key, answer, start=0, end=end, generation=generation)
        else:
            if status == 401:
                self._sender.refuse_token()
            error = self._sender.refused(answer, "read", key)
            if isinstance(error, PreconditionFailedError):
                raise self._replaced(key, generation, error)
            raise error
        expected = None if body is None else self._expected_md5(key, answer, body, 0)
        if expected is not None:
            digest = hashlib.md5(answer.body, usedforsecurity=False)
            self._compare(key, digest.digest(), expected)
        return body

    def fail_get(self, key: str, exchange: Exchange, error: Exception) -> StorageError | None:
        self._sender.end(exchange)
        if isinstance(error, ConnectionLostError) and exchange.is_stale:
            return None
        return self._sender.failed(error, "read", key)

    def drop_get(self, exchange: Exchange) -> None:
        exchange.abort()
        self._sender.end(exchange)

    def _read(
        self, key: str, response: Response, *, start: int, end: int | None, generation: str
    ) -> Body | None:
        """Make of an answer what was read; None where it is past the end and tells no size.

        Raises:
            StorageError: It is another answer than the one that was asked for.
        """
        self._refuse_directory(response, key)
        is_past = response.status == 206 and not response.num_bytes
        if response.status == 416 or is_past:
            past = reading.size_past_the_end(response.headers, start=start)
            is_told = past is not None and wire.etag_of(response.headers)
            return self._body(key, response, b"", past) if is_told and past is not None else None
        try:
            size = reading.object_size(
                response.status,
                response.headers,
                response.num_bytes,
                start=start,
                end=end,
                generation=generation,
            )
        except ValueError as exc:
            uri = self.uri(key)
            raise StorageError(
                f"could not read {uri}: {exc}", uri=uri, status=response.status
            ) from exc
        return self._body(key, response, response.body, size)

    def _body(self, key: str, response: Response, data: Any, size: int) -> Body:
        headers = response.headers
        return Body(
            data,
            size,
            wire.etag_of(headers),
            None,
            lambda: wire.meta_from_headers(headers, key=key, uri=self.uri(key), size=size),
        )

    def _expected_md5(self, key: str, response: Response, body: Body, start: int) -> bytes | None:
        """Return the MD5 that a body must have: of one that is a whole blob, if it tells one."""
        if not self._verify or start or not body.size or len(body.data) != body.size:
            return None
        try:
            return wire.md5_of(response.headers, is_part=response.status == 206)
        except ValueError as exc:
            uri = self.uri(key)
            raise TransientError(
                f"could not read what the service told of {uri}: {exc}", uri=uri
            ) from exc

    def _compare(self, key: str, actual: bytes, expected: bytes) -> None:
        if actual != expected:
            uri = self.uri(key)
            raise TransientError(
                f"could not read {uri}: its bytes have the MD5 {actual.hex()}, but the service "
                f"says {expected.hex()}; the object, or what tells its MD5, is damaged, or "
                "something between here and the service changes bytes",
                uri=uri,
            )

    async def _look_again(self, key: str, generation: str, start: int) -> Body:
        """Find out what a 416 means that does not tell the size of the object."""
        meta = await self.head(key, generation=generation)
        if meta.size > start:
            raise TransientError(
                f"could not read {meta.uri}: the service says that byte {start} is past its end, "
                f"and that it has {meta.size} bytes",
                uri=meta.uri,
            )
        return Body(b"", meta.size, meta.generation, None, lambda: meta)

    async def put(
        self,
        key: str,
        data: bytes | memoryview,
        *,
        crc32c: int | None,
        precondition: Precondition,
        content_type: str = "",
        metadata: Mapping[str, str] | None = None,
    ) -> ObjectMeta:
        headers = [(b"x-ms-blob-type", b"BlockBlob")]
        headers += wire.object_headers(content_type, metadata)
        headers += wire.precondition_headers(precondition)
        if crc32c is not None:
            headers.append(await _md5_header([memoryview(data)]))
        response = await self._sender.send(
            b"PUT",
            self._path(key),
            "write",
            key,
            headers=headers,
            body=data,
            is_conditional=bool(precondition),
        )
        size = memoryview(data).nbytes
        return self._stored(response, key, size, content_type, metadata)

    def _stored(
        self,
        response: Response,
        key: str,
        size: int,
        content_type: str,
        metadata: Mapping[str, str] | None,
    ) -> ObjectMeta:
        if not wire.etag_of(response.headers):
            raise self._foreign("write", key, response)
        return wire.meta_from_headers(
            response.headers,
            key=key,
            uri=self.uri(key),
            size=size,
            # The answer's own headers are those of its own body, not the object's.
            content_type=content_type or wire.DEFAULT_TYPE,
            metadata=dict(metadata or {}),
        )

    async def delete(self, key: str, *, generation: str = "") -> None:
        headers = [wire.match_header(generation)] if generation else []
        response = await self._sender.send(
            b"DELETE", self._path(key), "delete", key, headers=headers
        )
        if response.num_bytes or response.status != 202:
            raise self._foreign("delete", key, response)

    async def delete_page(self, sources: Sequence[Source]) -> Mapping[str, StorageError]:
        action = "delete objects of"
        requests: list[tuple[bytes, Sequence[tuple[bytes, bytes]]]] = []
        for source in sources:
            path = self._path(source.key)
            headers = [wire.match_header(source.generation)] if source.generation else []
            signed = self._sender.sign(b"DELETE", path, headers)
            requests.append((self._sender.with_sas(path), signed))
        response = await self._sender.send(
            b"POST",
            self._container_path,
            action,
            "",
            query={"restype": "container", "comp": "batch"},
            headers=[batch.batch_type()],
            body=batch.batch_body(requests),
        )
        try:
            told = response.headers.get(b"content-type", b"")
            answers = batch.parse_batch(told, response.body)
            found = [answers[number] for number in range(len(sources))]
        except (KeyError, ValueError) as exc:
            uri = self.uri()
            raise TransientError(
                f"could not {action} {uri}: the answer is none ({exc})", uri=uri, maybe_done=True
            ) from exc
        return {
            source.key: self._sender.refused(answer, "delete", source.key)
            for source, answer in zip(sources, found, strict=True)
            if answer.status != 202
        }

    async def list_page(
        self,
        prefix: str,
        *,
        start_offset: str = "",
        end_offset: str = "",
        delimiter: str = "",
        match_glob: str = "",
        page_token: str = "",
        page_size: int | None = None,
    ) -> Page:
        return await self._lister.page(
            prefix,
            start_offset=start_offset,
            end_offset=end_offset,
            delimiter=delimiter,
            page_token=page_token,
            size=page_size or self.capabilities.page_size,
        )

    async def compose(
        self,
        key: str,
        sources: Sequence[Source],
        *,
        precondition: Precondition,
        content_type: str = "",
        metadata: Mapping[str, str] | None = None,
    ) -> ObjectMeta:
        uri = self.uri(key)
        raise StorageError(
            f"could not compose {uri}: Azure has no such operation; write the object with "
            "open_writer, or keep its pieces",
            uri=uri,
        )

    async def copy(self, source: Source, key: str, *, precondition: Precondition) -> ObjectMeta:
        # Looked at first: the answer to a copy tells neither size nor type.
        original = await self.head(source.key, generation=source.generation)
        action, target = f"copy {original.uri} to", self._path(key)
        url = self._sender.with_sas(self._sender.url(self._path(source.key)))
        headers = wire.precondition_headers(precondition)
        headers.append((b"x-ms-source-if-match", wire.match_header(original.generation)[1]))
        headers.append((b"x-ms-copy-source", url))
        try:
            response = await self._sender.send(
                b"PUT",
                target,
                action,
                key,
                headers=headers,
                body=b"",
                is_conditional=bool(precondition),
            )
        except PreconditionFailedError as exc:
            # Which of the two was it?
            if source.generation:
                await self.head(source.key, generation=source.generation)
            if precondition:
                raise
            raise TransientError(
                f"could not {action} {self.uri(key)}: it was replaced meanwhile", uri=original.uri
            ) from exc
        response = await wait_for_copy(
            self._sender, target, response, action=action, key=key, uri=self.uri(key)
        )
        meta = wire.meta_from_headers(
            response.headers, key=key, uri=self.uri(key), size=original.size
        )
        return replace(
            original,
            key=key,
            uri=meta.uri,
            etag=meta.etag,
            generation=meta.generation,
            updated=meta.updated,
            storage_class="",
        )

    async def initiate_upload(
        self, key: str, *, content_type: str = "", metadata: Mapping[str, str] | None = None
    ) -> str:
        """See base class. No request: an upload is what the ids of its blocks have in common."""
        self._path(key)
        wire.object_headers(content_type, metadata)  # what is refused is refused now
        upload_id = wire.new_upload_id(time.time(), os.urandom(12))
        self._begun[upload_id] = (content_type, dict(metadata or {}))
        return upload_id

    async def put_part(
        self,
        key: str,
        upload_id: str,
        number: int,
        pieces: Sequence[bytes | memoryview],
        *,
        offset: int,
        crc32c: int | None,
    ) -> UploadedPart:
        name = wire.block_id(upload_id, number)
        headers = []
        if crc32c is not None:
            headers.append(await _md5_header([memoryview(piece) for piece in pieces]))
        action = f"write part {number} of"
        response = await self._sender.send(
            b"PUT",
            self._path(key),
            action,
            key,
            query={"comp": "block", "blockid": name},
            headers=headers,
            body=pieces,
        )
        if response.status != 201 or b"x-ms-request-id" not in response.headers:
            raise self._foreign(action, key, response)
        return UploadedPart(number, name, sum(memoryview(piece).nbytes for piece in pieces))

    async def complete_upload(
        self,
        key: str,
        upload_id: str,
        parts: Sequence[UploadedPart],
        *,
        precondition: Precondition,
    ) -> ObjectMeta:
        content_type, metadata = self._begun.get(upload_id, ("", {}))
        response = await self._sender.send(
            b"PUT",
            self._path(key),
            "complete the upload of",
            key,
            query={"comp": "blocklist"},
            headers=[
                (b"Content-Type", b"application/xml"),
                *wire.object_headers(content_type, metadata),
                *wire.precondition_headers(precondition),
            ],
            body=wire.block_list(part.etag for part in parts),
            head_seconds=_COMPLETE_SECONDS,
            is_conditional=bool(precondition),
        )
        meta = self._stored(response, key, sum(part.size for part in parts), content_type, metadata)
        self._begun.pop(upload_id, None)
        return meta

    async def abort_upload(self, key: str, upload_id: str) -> None:
        """See base class.

        Blocks go with the next write of the key, or a week after the last one; no request drops
        them alone. An upload of this process is only forgotten, so that nothing is ever visible at
        its key. One that `Store.clean` found is dropped by making an empty blob of it, if there is
        none, which is deleted at once; where others write the key it is left alone.
        """
        if self._begun.pop(upload_id, None) is not None:
            return
        held = await self._blocks(key)
        if held is None or held.has_committed or not held.uncommitted:
            return
        owners = {wire.parse_block_id(each) for each in held.uncommitted}
        if any(owner is None or owner[0] != upload_id for owner in owners):
            return
        action = "abort the upload of"
        try:
            response = await self._sender.send(
                b"PUT",
                self._path(key),
                action,
                key,
                query={"comp": "blocklist"},
                headers=[(b"Content-Type", b"application/xml"), (b"If-None-Match", b"*")],
                body=wire.block_list(()),
                is_conditional=True,
            )
            await self.delete(key, generation=wire.etag_of(response.headers))
        except (NotFoundError, PreconditionFailedError):
            return  # somebody else wrote it: their blob is there, and the blocks are gone

    async def _blocks(self, key: str) -> wire.BlockList | None:
        response = await self._sender.send(
            b"GET",
            self._path(key),
            "list the blocks of",
            key,
            query={"comp": "blocklist", "blocklisttype": "all"},
            accept=404,
        )
        if response.status == 404:
            return None
        try:
            return wire.parse_block_list(response.body)
        except ValueError as exc:
            uri = self.uri(key)
            raise TransientError(f"could not list the blocks of {uri}: {exc}", uri=uri) from exc

    async def list_uploads(self, prefix: str) -> Sequence[OpenUpload]:
        """See base class. Uploads of other programs, and of keys that have a blob, are not found.

        Each empty blob costs a request, since only its blocks tell whether it is an upload.
        """
        found: list[OpenUpload] = []
        marker, cut = "", len(self._prefix)
        while True:
            page = await self._lister.read(
                prefix,
                marker=marker,
                size=self.capabilities.page_size,
                include="uncommittedblobs",
            )
            for blob in page.blobs:
                key = blob.name[cut:]
                held = None if blob.size else await self._blocks(key)
                if held is None or held.has_committed:
                    continue
                known = {wire.parse_block_id(each) for each in held.uncommitted}
                for upload_id in sorted({each[0] for each in known if each is not None}):
                    begun = wire.upload_begun(upload_id)
                    found.append(OpenUpload(key=key, upload_id=upload_id, initiated=begun))
            marker = page.next_marker
            if not marker:
                return sorted(found, key=lambda upload: (upload.key, upload.upload_id))

    async def aclose(self) -> None:
        await self._sender.aclose()

    def _path(self, key: str) -> bytes:
        name = self._prefix + key
        if len(name) > 1024 or _PLAIN_NAME.fullmatch(name) is None:
            wire.check_name(name, key)
            name = quote(name, safe="/")
        return b"%b/%b" % (self._container_path, name.encode())

    def _refuse_directory(self, response: Response, key: str) -> None:
        if wire.is_directory(response.headers):
            uri = self.uri(key)
            raise NotFoundError(
                f"there is no object {uri}: it is a directory; list what is below it",
                uri=uri,
                status=response.status,
            )

    def _replaced(self, key: str, generation: str, error: StorageError) -> StorageError:
        """Return the error for an object that is not in the generation that is to be read."""
        if not generation:
            return error
        uri = self.uri(key)
        return NotFoundError(
            f"{uri} is no longer in generation {generation}: it was replaced; list again",
            uri=uri,
            status=error.status,
        )

    def _foreign(self, action: str, key: str, response: Response) -> StorageError:
        """Return the error for a success that another server than Azure tells."""
        uri = self.uri(key)
        return StorageError(
            f"could not {action} {uri}: the answer, HTTP {response.status}, is not one of Azure "
            "Blob Storage; check the endpoint, and what stands between here and there",
            uri=uri,
            status=response.status,
        )


def _root_path(url: str, account: str) -> str:
    """Return what stands before the container in paths.

    A url with a path tells it. Else the account is in the host's name, as Azure's own hosts have
    it, or it stands in the path, as emulators take it.
    """
    parts = urlsplit(url)
    path = parts.path.rstrip("/")
    if path or (parts.hostname or "").split(".")[0] == account.lower():
        return path
    return f"/{account}"


async def _md5_header(pieces: Sequence[memoryview]) -> tuple[bytes, bytes]:
    """Write the MD5 that the service compares with what it receives."""
    return b"Content-MD5", binascii.b2a_base64(await _md5(pieces), newline=False)


async def _md5(pieces: Sequence[memoryview]) -> bytes:
    if sum(piece.nbytes for piece in pieces) > _THREAD_BYTES:
        return await asyncio.to_thread(_md5_now, pieces)
    return _md5_now(pieces)


def _md5_now(pieces: Sequence[memoryview]) -> bytes:
    digest = hashlib.md5(usedforsecurity=False)
    for piece in pieces:
        digest.update(piece)
    return digest.digest()

"""Azure Blob Storage, authorized by `_auth/azure.py`.

    put -> Put Blob                                  create -> If-None-Match: *
    put_part -> Put Block (block id: upload and number)    complete_upload -> Put Block List

The service has no upload ids. It keeps uncommitted blocks for each key, does not list them as
objects, and deletes them after a week. Any write of the key deletes its uncommitted blocks: of two
uploads to one key, the first to complete succeeds, and the other fails. The API has no request that
deletes uncommitted blocks; see `abort_upload`.

Unless `verify` is False, writes of blobs and of blocks send the MD5 of their body, which the
service compares with the bytes, and the bytes of a whole blob are compared with its MD5. Blobs made
of blocks have no MD5. A range of up to 4 MiB has an MD5 if the request asks for it, which it does
with `TransferOptions.verify_ranges`.

Over 500 lines because it is one class with a method for each operation of the contract.
"""

from __future__ import annotations

import asyncio
import hashlib
import os
import re
import time
from collections.abc import Awaitable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Final
from urllib.parse import quote

from aioflux._auth.azure import open_access
from aioflux._auth.redaction import redact
from aioflux._http import Origin, open_pool
from aioflux._services.azure import batch, wire
from aioflux._services.azure.listing import AzureLister
from aioflux._services.azure.sender import AzureSender
from aioflux._services.base import Body, Capabilities, Precondition, WriteRequest
from aioflux._services.http import COMPLETE_SECONDS, DELETE_SECONDS, HTTPService
from aioflux._services.responses import (
    CONDITIONAL,
    PLAIN,
    EmptyPageCounter,
    RequestKind,
    malformed_response,
)
from aioflux._services.sender import MAX_PAGE_BYTES, hash_body
from aioflux._values.meta import OpenUpload, attributes_of
from aioflux._values.uri import check_endpoint
from aioflux.errors import NotFoundError, PreconditionFailedError, StorageError, TransientError

if TYPE_CHECKING:
    from aioflux._http import Response
    from aioflux._services.base import (
        Exchange,
        ListRequest,
        Page,
        PartRequest,
        ReadRequest,
        ServiceConfig,
        Source,
        UploadedPart,
    )
    from aioflux._services.http import EncodedRead
    from aioflux._values.meta import ObjectMeta

_POLL_SECONDS: Final = (0.05, 2.0)
"""First and longest interval between requests for the status of a copy."""
_PLAIN_NAME: Final = re.compile(
    r"(?:[A-Za-z0-9_~-][A-Za-z0-9_~-]*/)*[A-Za-z0-9_~-][A-Za-z0-9_.~-]*[A-Za-z0-9_~-]"
)
"""Names that need no percent-encoding. `check_name` accepts them if they have at most 1024
characters."""
_SAS_PERMISSIONS: Final = {"GET": "r", "HEAD": "r", "PUT": "cw", "DELETE": "d"}
"""Permissions of a SAS token by HTTP method: read, create, write, delete."""


class AzureService(HTTPService):
    """One container and prefix of a storage account."""

    capabilities = Capabilities(
        compose=False,
        conditional_complete=True,
        checksums=False,
        min_part_size_bytes=1,
        max_part_size_bytes=4000 * 1024**2,
        max_parts=50_000,
        page_size=5000,
        delete_page_size=batch.MAX_DELETES,
        list_ranges=False,
        max_checked_range_bytes=4 * 1024**2,
        part_checksums=False,
    )
    _service_name = "Azure Blob Storage"
    _compose_advice = (
        "Azure does not concatenate objects; write one object with open_writer, or use the sources "
        "as they are"
    )
    _sender: AzureSender
    _lister: AzureLister

    def __init__(self, config: ServiceConfig) -> None:
        account, _, container = config.location.bucket.partition("/")
        prefix = config.location.key
        super().__init__(root_uri=f"az://{account}/{container}/", prefix=prefix)
        url = config.endpoint_url or ""
        url = check_endpoint(url, may_have_path=True) if url else ""
        is_http = url.startswith("http://")
        access = open_access(account, config.credentials, is_http=is_http, environ=os.environ)
        url = url or access.endpoint_url or f"https://{account}.blob.core.windows.net"
        origin = Origin.from_url(url)
        self._container = container
        self._container_path = (
            f"{wire.root_path(url, account)}/{quote(container, safe='')}".encode()
        )
        self.capabilities = replace(
            AzureService.capabilities,
            guarded_transport=origin.scheme == "https",
            # No batches with any SAS token: emulators do not support them with that of an account.
            delete_page_size=0 if access.sas else batch.MAX_DELETES,
        )
        pool = open_pool(
            origin,
            max_idle=config.max_idle,
            timeouts=config.timeouts,
            ssl_context=config.ssl_context,
        )
        self._sender = AzureSender(access, pool, origin, self.uri)
        self._lister = AzureLister(self._sender, self._container_path, prefix, uri=self.uri)
        self._verify = config.verify
        self._started_uploads: set[str] = set()

    async def head(self, key: str, generation: str = "") -> ObjectMeta:
        return self._meta(key, await self._head(key, generation))

    async def _head(self, key: str, generation: str) -> Response:
        headers = [wire.match_header(generation)] if generation else []
        response = await self._sender.send(
            b"HEAD",
            self._path(key),
            "read the metadata of",
            key,
            headers=headers,
            kind=RequestKind(generation=generation) if generation else PLAIN,
        )
        self._require_blob(response, key)
        length = response.headers.get(b"content-length", b"")
        if not length.isdigit() or not wire.is_etag(wire.etag_of(response.headers)):
            raise self._not_from_service("read the metadata of", key, response)
        return response

    def _meta(self, key: str, response: Response) -> ObjectMeta:
        headers = response.headers
        size = int(headers[b"content-length"])
        return wire.meta_from_headers(headers, key=key, uri=self.uri(key), size=size)

    def _encode_read(self, request: ReadRequest) -> EncodedRead:
        key, generation, start, end = request.key, request.generation, request.start, request.end
        has_range = start > 0 or end is not None
        headers = [wire.range_header(start, end)] if has_range else []
        if generation:
            headers.append(wire.match_header(generation))
        if request.wants_checksum:
            headers.append((b"x-ms-range-get-content-md5", b"true"))
        return self._path(key), headers, has_range, False

    def end_get(self, request: ReadRequest, exchange: Exchange, response: Response) -> Body | None:
        body = super().end_get(request, exchange, response)
        expected = None if body is None else self._expected_md5(request, response, body)
        if body is not None and expected is not None:
            digest = hashlib.md5(response.body, usedforsecurity=False).digest()
            self._require_md5(request.key, response.num_bytes, digest, expected)
            body.is_verified = True
        return body

    def _decode_read(self, request: ReadRequest, response: Response) -> Body | None:
        key = request.key
        self._require_blob(response, key)
        status, headers = response.status, response.headers
        if status == 416 or (status == 206 and not response.num_bytes):
            size = wire.size_past_the_end(headers, start=request.start)
            if size is None or not wire.etag_of(headers):
                return None
            return self._body(key, response, b"", size)
        size = wire.object_size(request, response)
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

    def _verify_body(
        self, request: ReadRequest, response: Response, body: Body
    ) -> Awaitable[None] | None:
        expected = self._expected_md5(request, response, body)
        return None if expected is None else self._check_md5(request.key, body, expected)

    async def _check_md5(self, key: str, body: Body, expected: bytes) -> None:
        digest = await hash_body("md5", body.data)
        self._require_md5(key, len(body.data), digest, expected)
        body.is_verified = True

    def _expected_md5(self, request: ReadRequest, response: Response, body: Body) -> bytes | None:
        """Return the MD5 that a body must have; None if there is nothing to compare.

        Empty bodies are not compared, and ranges only if the request `wants_checksum`. If `verify`
        is False, nothing is compared. Blobs made of blocks have no MD5.
        """
        is_whole = not request.start and len(body.data) == body.size
        is_part = response.status == 206
        if not self._verify or not body.data or not (is_whole or request.wants_checksum):
            return None
        try:
            return wire.md5_of(response.headers, is_part=is_part and not request.wants_checksum)
        except ValueError as exc:
            raise self._malformed_response(request.key, exc) from exc

    def _require_md5(self, key: str, num_bytes: int, actual: bytes, expected: bytes) -> None:
        if actual != expected:
            uri = self.uri(key)
            raise TransientError(
                f"could not read {uri}: its bytes have the MD5 {actual.hex()}, but the service "
                f"returned {expected.hex()}; the object or its MD5 is corrupt, or a proxy in "
                "between changes bytes",
                uri=uri,
                num_bytes_received=num_bytes,
                is_damaged=True,
            )

    async def put(
        self, request: WriteRequest, pieces: Sequence[bytes | memoryview], *, crc32c: int | None
    ) -> ObjectMeta:
        headers = [(b"x-ms-blob-type", b"BlockBlob")]
        headers += wire.object_headers(request.attributes)
        headers += wire.precondition_headers(request.precondition)
        if crc32c is not None:
            headers.append(wire.md5_header(await hash_body("md5", pieces)))
        response = await self._sender.send(
            b"PUT",
            self._path(request.key),
            "write",
            request.key,
            headers=headers,
            body=pieces,
            kind=CONDITIONAL if request.precondition else PLAIN,
        )
        return self._written_meta(request, response, sum(map(len, pieces)))

    def _written_meta(self, request: WriteRequest, response: Response, size: int) -> ObjectMeta:
        key, headers = request.key, response.headers
        if not wire.etag_of(headers):
            raise self._not_from_service("write", key, response)
        return wire.meta_from_headers(
            headers, key=key, uri=self.uri(key), size=size, written=request
        )

    async def delete(self, key: str, *, generation: str = "") -> None:
        headers = [wire.match_header(generation)] if generation else []
        response = await self._sender.send(
            b"DELETE", self._path(key), "delete", key, headers=headers
        )
        if response.num_bytes or response.status != 202:
            raise self._not_from_service("delete", key, response)

    async def delete_page(self, sources: Sequence[Source]) -> Mapping[str, StorageError]:
        responses, token = await self._delete_batch(sources)
        rejected = [source for source, response in responses.items() if response.status == 401]
        # Each request of a batch has its own Authorization header, which `send` does not renew.
        if rejected and self._sender.should_resend(responses[rejected[0]], token):
            try:
                second_responses, _ = await self._delete_batch(rejected)
            except TransientError as exc:
                exc.maybe_done = True  # the first batch may have deleted some objects
                raise
            responses.update(second_responses)
        return {
            source.key: self._sender.response_error(response, "delete", source.key)
            for source, response in responses.items()
            if response.status != 202
        }

    async def _delete_batch(
        self, sources: Sequence[Source]
    ) -> tuple[dict[Source, batch.SubResponse], str | None]:
        """Send one batch; return the response to each delete, and the token that was sent."""
        action = "delete objects of"
        token = await self._sender.ensure_token(action, "")
        requests: list[tuple[bytes, Sequence[tuple[bytes, bytes]]]] = []
        for source in sources:
            path = self._path(source.key)
            headers = [wire.match_header(source.generation)] if source.generation else []
            signed = self._sender.sign(b"DELETE", path, headers)
            requests.append((self._sender.with_sas(path), signed))
        response = await self._sender.send(
            b"POST",
            wire.query_target(self._container_path, {"restype": "container", "comp": "batch"}),
            action,
            "",
            headers=[batch.batch_type()],
            body=batch.batch_body(requests),
            head_seconds=DELETE_SECONDS,
        )
        try:
            content_type = response.headers.get(b"content-type", b"")
            responses = batch.parse_batch(content_type, response.body)
            return {source: responses[number] for number, source in enumerate(sources)}, token
        except (KeyError, ValueError) as exc:
            why = f"the response is malformed ({exc})"
            raise malformed_response(action, self.uri(), why) from exc

    async def list_page(self, request: ListRequest) -> Page:
        return await self._lister.page(request, request.page_size or self.capabilities.page_size)

    async def copy(self, source: Source, key: str, *, precondition: Precondition) -> ObjectMeta:
        # The response to a copy has no size and no content type.
        found = await self._head(source.key, source.generation)
        original = self._meta(source.key, found)
        action, target = f"copy {original.uri} to", self._path(key)
        url = self._sender.with_sas(self._sender.url(self._path(source.key)))
        tier = wire.tier_headers(found.headers)  # the service copies the other attributes
        headers = wire.precondition_headers(precondition) + tier
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
                kind=CONDITIONAL if precondition else PLAIN,
            )
        except PreconditionFailedError as exc:
            # The service returns the same error for a source with another ETag and for a failed
            # precondition of the copy.
            try:
                await self.head(source.key, generation=original.generation)
                # Without a precondition only the ETag of the source can have failed.
                is_replaced = not precondition
            except NotFoundError:
                if source.generation:
                    raise
                is_replaced = True
            if not is_replaced:
                raise
            raise TransientError(
                f"could not {action} {self.uri(key)}: the source was replaced during the copy",
                uri=original.uri,
            ) from exc
        response = await self._wait_for_copy(target, response, action, key)
        request = WriteRequest(
            key,
            attributes=replace(
                attributes_of(original), storage_class=original.storage_class if tier else ""
            ),
        )
        return wire.meta_from_headers(
            response.headers, key=key, uri=self.uri(key), size=original.size, written=request
        )

    async def _wait_for_copy(
        self, path: bytes, response: Response, action: str, key: str
    ) -> Response:
        """Wait until the service has finished a copy, and return the last response.

        Raises:
            PreconditionFailedError: Another writer replaced the destination.
            TransientError: The copy failed, or the service did not return its outcome.
        """
        uri = self.uri(key)
        seconds, max_seconds = _POLL_SECONDS
        copy_id = response.headers.get(b"x-ms-copy-id")
        while (state := response.headers.get(b"x-ms-copy-status")) == b"pending":
            await asyncio.sleep(seconds)
            seconds = min(2 * seconds, max_seconds)
            response = await self._sender.send(b"HEAD", path, action, key)
        if response.headers.get(b"x-ms-copy-id") != copy_id:
            why = "another writer replaced the target of the copy"
            raise PreconditionFailedError.of(action, uri, why)
        if state != b"success" or not wire.etag_of(response.headers):
            detail = response.headers.get(b"x-ms-copy-status-description", b"")
            why = redact(((state or b"missing") + b" " + detail).decode("latin-1")).rstrip()
            raise TransientError(
                f"could not {action} {uri}: the status of the copy is {why}",
                uri=uri,
                maybe_done=True,
            )
        return response

    async def initiate_upload(self, request: WriteRequest) -> str:
        """Return a new upload id without a request; the ids of the blocks will contain it."""
        # Raise ValueError for an invalid key or metadata now, before parts are sent.
        self._path(request.key)
        wire.object_headers(request.attributes)
        upload_id = wire.new_upload_id(time.time(), os.urandom(12))
        self._started_uploads.add(upload_id)
        return upload_id

    def _part_target(self, request: PartRequest) -> bytes:
        name = wire.block_id(request.upload_id, request.number)
        return wire.query_target(self._path(request.key), {"comp": "block", "blockid": name})

    async def _part_headers(self, request: PartRequest) -> Sequence[tuple[bytes, bytes]]:
        return [wire.md5_header(await hash_body("md5", request.pieces))]

    def _part_etag(self, response: Response, request: PartRequest) -> str:
        is_written = response.status == 201 and b"x-ms-request-id" in response.headers
        return wire.block_id(request.upload_id, request.number) if is_written else ""

    async def complete_upload(
        self, request: WriteRequest, upload_id: str, parts: Sequence[UploadedPart]
    ) -> ObjectMeta:
        key, precondition = request.key, request.precondition
        response = await self._sender.send(
            b"PUT",
            wire.query_target(self._path(key), {"comp": "blocklist"}),
            "complete the upload of",
            key,
            headers=[
                (b"Content-Type", b"application/xml"),
                *wire.object_headers(request.attributes),
                *wire.precondition_headers(precondition),
            ],
            body=wire.block_list(part.etag for part in parts),
            head_seconds=COMPLETE_SECONDS,
            kind=CONDITIONAL if precondition else PLAIN,
        )
        meta = self._written_meta(request, response, sum(part.size for part in parts))
        self._started_uploads.discard(upload_id)
        return meta

    async def abort_upload(self, key: str, upload_id: str) -> None:
        """Abort an upload; the API has no request that deletes its blocks.

        For an upload that this instance started, send nothing: the next write of the key deletes
        the blocks, or the service does after a week. For an upload that `Store.clean` found, write
        and delete an empty blob, unless a blob exists or the key has blocks of another upload.
        """
        if upload_id in self._started_uploads:
            self._started_uploads.remove(upload_id)
            return
        blocks = await self._read_blocks(key)
        if blocks is None or blocks.has_committed or not blocks.uncommitted:
            return
        parsed_ids = {wire.parse_block_id(block) for block in blocks.uncommitted}
        if any(parsed is None or parsed[0] != upload_id for parsed in parsed_ids):
            return
        action = "abort the upload of"
        try:
            response = await self._sender.send(
                b"PUT",
                wire.query_target(self._path(key), {"comp": "blocklist"}),
                action,
                key,
                headers=[(b"Content-Type", b"application/xml"), (b"If-None-Match", b"*")],
                body=wire.block_list(()),
                kind=CONDITIONAL,
            )
            await self.delete(key, generation=wire.etag_of(response.headers))
        except (NotFoundError, PreconditionFailedError):
            return  # another writer wrote the blob, and so deleted the blocks

    async def _read_blocks(self, key: str) -> wire.BlockList | None:
        response = await self._sender.send(
            b"GET",
            wire.query_target(self._path(key), {"comp": "blocklist", "blocklisttype": "all"}),
            "list the blocks of",
            key,
            max_body_bytes=MAX_PAGE_BYTES,
            accept=404,
        )
        if response.status == 404:
            return None
        try:
            return wire.parse_block_list(response.body)
        except ValueError as exc:
            action = "list the blocks of"
            raise malformed_response(action, self.uri(key), exc, maybe_done=False) from exc

    async def list_uploads(self, prefix: str) -> Sequence[OpenUpload]:
        """Return open uploads of aioflux to keys that have no blob.

        Each empty blob costs one request, since only its blocks show whether it is an upload.
        """
        uploads: list[OpenUpload] = []
        marker, num_cut = "", len(self._prefix)
        empty_pages = EmptyPageCounter(self.uri(prefix))
        while True:
            page = await self._lister.read(
                prefix,
                marker=marker,
                size=self.capabilities.page_size,
                include="uncommittedblobs",
            )
            for blob in page.blobs:
                key = blob.name[num_cut:]
                blocks = None if blob.size else await self._read_blocks(key)
                if blocks is None or blocks.has_committed:
                    continue
                parsed_ids = {wire.parse_block_id(block) for block in blocks.uncommitted}
                for upload_id in {parsed[0] for parsed in parsed_ids if parsed is not None}:
                    initiated = wire.upload_initiated(upload_id)
                    uploads.append(OpenUpload(key=key, upload_id=upload_id, initiated=initiated))
            marker = page.next_marker
            if not marker:
                return sorted(uploads, key=lambda upload: (upload.key, upload.upload_id))
            empty_pages.count(len(page.blobs))

    async def sign(self, key: str, *, method: str, seconds: int, now: float) -> str:
        name = f"{self._container}/{self._prefix}{key}"
        permissions = _SAS_PERMISSIONS[method]
        return self._sender.presign(self._path(key), name, key, permissions, now + seconds)

    def _path(self, key: str) -> bytes:
        name = self._prefix + key
        if len(name) > 1024 or _PLAIN_NAME.fullmatch(name) is None:
            wire.check_name(name, key)
            name = quote(name, safe="/")
        return b"%b/%b" % (self._container_path, name.encode())

    def _require_blob(self, response: Response, key: str) -> None:
        if wire.is_directory(response.headers):
            uri = self.uri(key)
            raise NotFoundError(
                f"there is no object {uri}: it is a directory; list the objects below it",
                uri=uri,
                status=response.status,
            )

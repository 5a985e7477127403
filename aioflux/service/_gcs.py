"""Google Cloud Storage: bytes, parts and listings on the data plane, the rest on the control plane.

The XML API carries bytes: it takes preconditions and checksums as headers, answers with all of an
object's checksums, and speaks the multipart protocol. Requests with `Accept-Encoding: gzip` get the
stored bytes of a compressed object, whose checksum is known; without it the service would
decompress them.

Over 500 lines because all operations of the contract are declared here: their signatures are a
third of it, and what an answer is worth is decided in `_gcs_read` and `_gcs_wire`.
"""

from __future__ import annotations

import re
from dataclasses import replace
from typing import TYPE_CHECKING, Any, TypeVar
from urllib.parse import quote, urlencode

from aioflux._errors import StorageError, TransientError
from aioflux._uri import check_name
from aioflux.auth._google import WAIT, open_token
from aioflux.http import (
    CertificateError,
    ConnectionLostError,
    FixedHeaders,
    Origin,
    ProtocolError,
    TransportError,
    default_context,
    open_pool,
    proxy_for,
)
from aioflux.service import _gcs_list as listing
from aioflux.service import _gcs_read as reading
from aioflux.service import _gcs_wire as wire
from aioflux.service import _multipart as multipart
from aioflux.service._base import Body, Capabilities, Page, Precondition, Service, UploadedPart
from aioflux.service._gcs_control import GCSControl, token_of
from aioflux.service._status import error_from_status

if TYPE_CHECKING:
    import ssl
    from collections.abc import Callable, Mapping, Sequence

    from aioflux._listing import Kind
    from aioflux._meta import ObjectMeta, OpenUpload
    from aioflux._policy import Timeouts
    from aioflux.http import Response, Waiter
    from aioflux.service._base import Exchange, Into, Source

__all__ = ["GCSService"]

T = TypeVar("T")

DEFAULT_ENDPOINT = "https://storage.googleapis.com"

_STORED_BYTES = (b"Accept-Encoding", b"gzip")
_USER_AGENT = (b"User-Agent", b"aioflux")
_PLAIN_NAME = re.compile(r"[A-Za-z0-9_~-][A-Za-z0-9_.~/-]{0,1023}")
"""Names that stand in a url as they are; `check_name` has nothing against any of them."""
_MAX_ANSWER_BYTES = 64 * 1024 * 1024
"""Longest answer that is not an object: a page of 5,000 objects has a few MiB, and 40 at most, the
metadata of each being limited to 8 KiB (cloud.google.com/storage/quotas)."""
_COMPLETE_SECONDS = 600.0
"""Completing an upload of many parts can take minutes
(cloud.google.com/storage/docs/xml-api/post-object-complete)."""


class GCSService(Service):
    """One bucket and prefix of Google Cloud Storage."""

    capabilities = Capabilities(page_size=5000, match_glob=True)

    def __init__(
        self,
        bucket: str,
        prefix: str,
        *,
        endpoint_url: str = DEFAULT_ENDPOINT,
        emulator: bool = False,
        credentials: Any = None,
        timeouts: Timeouts,
        max_connections: int,
        ssl_context: ssl.SSLContext | None = None,
    ) -> None:
        super().__init__(root_uri=f"gs://{bucket}/", prefix=prefix)
        self._origin = Origin.from_url(endpoint_url)
        self.capabilities = replace(
            GCSService.capabilities, guarded_transport=self._origin.scheme == "https"
        )
        self._token = open_token(credentials, emulator=emulator)
        if ssl_context is None and self._origin.scheme == "https":
            # One for both planes: a store trusts one set of authorities.
            ssl_context = default_context()
        self._pool = open_pool(
            self._origin,
            max_connections=max_connections,
            timeouts=timeouts,
            ssl_context=ssl_context,
        )
        self._control = GCSControl(
            bucket,
            api_root=endpoint_url.rstrip("/"),
            token=self._token,
            timeouts=timeouts,
            max_connections=max_connections,
            ssl_context=ssl_context,
            proxy=proxy_for(self._origin),
        )
        self._fixed_token: str | None
        self._fix_headers(None)
        # Content type and metadata of the uploads under way, which no later answer repeats.
        self._begun: dict[str, tuple[str, Mapping[str, str]]] = {}
        self._bucket_path = f"/{quote(bucket, safe='')}".encode()
        self._list_path = f"/storage/v1/b/{quote(bucket, safe='')}/o"
        self._listed_kind: Kind | None = None

    async def head(self, key: str, *, generation: str = "") -> ObjectMeta:
        uri = self.uri(key)
        resource = await self._control.head(self._name(key), generation=generation, uri=uri)
        return self._meta(resource, key)

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
        response = await self._send(
            b"GET",
            self._target(key, generation),
            "read",
            key,
            headers=reading.range_headers(start, end) if is_range else (),
            into=bytes if into is None else into,
            # Of a service that ignores the range, no more than was asked for is taken.
            max_body_bytes=None if end is None else end - start,
            accept=416 if is_range else 0,
            is_stored=True,
        )
        body = self._read(key, response, start=start, end=end, generation=generation)
        return await self._look_again(key, generation, start) if body is None else body

    def begin_get(self, key: str, *, generation: str, end: int, waiter: Waiter) -> Exchange | None:
        token = self._token.ready()
        # A generation that is none could change the request; `get` says so, or the service does.
        is_plain = not generation or (generation.isascii() and generation.isdigit())
        if token is WAIT or not is_plain:
            return None
        if token != self._fixed_token:
            self._fix_headers(token)
        return self._pool.start(
            self._origin,
            self._target(key, generation),
            b"%bRange: bytes=0-%d\r\n" % (self._fixed_for_stored.encoded, end - 1),
            waiter,
            into=bytes,
            max_body_bytes=end,
        )

    def end_get(
        self, key: str, exchange: Exchange, answer: Response, *, generation: str, end: int
    ) -> Body | None:
        self._pool.end(self._origin, exchange)
        status, headers = answer.status, answer.headers
        if reading.is_whole(status, headers, answer.num_bytes, end=end, generation=generation):
            return self._body(key, answer, answer.body, answer.num_bytes)
        if not (200 <= status < 300 or status == 416):
            if status == 401 and self._fixed_token is not None:
                self._token.refuse(self._fixed_token)
            raise self._refused(answer, "read", key)
        return self._read(key, answer, start=0, end=end, generation=generation)

    def fail_get(self, key: str, exchange: Exchange, error: Exception) -> StorageError | None:
        self._pool.end(self._origin, exchange)
        if isinstance(error, ConnectionLostError) and exchange.is_stale:
            return None
        return self._failed(error, "read", key)

    def drop_get(self, exchange: Exchange) -> None:
        exchange.abort()
        self._pool.end(self._origin, exchange)

    def _target(self, key: str, generation: str) -> bytes:
        path = self._path(key)
        return b"%b?generation=%b" % (path, generation.encode()) if generation else path

    def _read(
        self, key: str, response: Response, *, start: int, end: int | None, generation: str
    ) -> Body | None:
        """Make of an answer what was read; None where it is past the end and tells no size.

        Raises:
            StorageError: It is another answer than the one that was asked for.
        """
        if response.status == 416:
            past = reading.size_past_the_end(response.headers, start=start)
            return None if past is None else self._body(key, response, b"", past)
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
        try:
            crc32c = wire.hash_crc32c(headers.get(b"x-goog-hash"))
        except ValueError as exc:
            raise self._damaged(key, exc) from exc
        return Body(
            data,
            size,
            wire.generation_of(headers),
            # An empty object's checksum is known where the answer, as a 416, tells none.
            0 if crc32c is None and not size else crc32c,
            lambda: wire.meta_from_headers(headers, key=key, uri=self.uri(key), size=size),
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
        return Body(b"", meta.size, meta.generation, meta.crc32c, lambda: meta)

    def _told(self, key: str, read: Callable[[], T]) -> T:
        """Return what `read` makes of an answer; one that is damaged is asked for again."""
        try:
            return read()
        except ValueError as exc:
            raise self._damaged(key, exc) from exc

    def _damaged(self, key: str, exc: ValueError) -> TransientError:
        uri = self.uri(key)
        return TransientError(
            f"could not read what the service told of {uri}: {exc}", uri=uri, maybe_done=True
        )

    def _meta(self, resource: wire.ObjectResource, key: str) -> ObjectMeta:
        return self._told(
            key, lambda: wire.meta_from_resource(resource, key=key, uri=self.uri(key))
        )

    def _stored(
        self,
        response: Response,
        key: str,
        size: int,
        content_type: str,
        metadata: Mapping[str, str] | None,
    ) -> ObjectMeta:
        try:
            meta = wire.meta_from_headers(
                response.headers,
                key=key,
                uri=self.uri(key),
                size=size,
                # The answer's own Content-Type is that of its own body, not the object's.
                content_type=content_type,
                metadata=metadata or {},
            )
        except ValueError as exc:
            raise self._damaged(key, exc) from exc
        if not meta.generation:
            raise self._foreign("write", key, response)
        return meta

    def _foreign(self, action: str, key: str, response: Response) -> StorageError:
        """Return the error for a success that another server than Cloud Storage tells."""
        uri = self.uri(key)
        return StorageError(
            f"could not {action} {uri}: the answer, HTTP {response.status}, is not one of Cloud "
            "Storage; check the endpoint, and what stands between here and there",
            uri=uri,
            status=response.status,
        )

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
        headers = wire.object_headers(content_type, metadata) + wire.precondition_headers(
            precondition
        )
        headers += wire.hash_headers(crc32c)
        response = await self._send(
            b"PUT", self._path(key), "write", key, headers=headers, body=data
        )
        return self._stored(
            response, key, memoryview(data).nbytes, content_type or wire.DEFAULT_TYPE, metadata
        )

    async def delete(self, key: str, *, generation: str = "") -> None:
        # On the data plane: aiohttp sends a DELETE again by itself where its connection was lost,
        # and the second answer to a delete that was done is "not found".
        headers = wire.precondition_headers(Precondition(if_generation_match=generation or None))
        response = await self._send(b"DELETE", self._path(key), "delete", key, headers=headers)
        if response.num_bytes:
            raise self._foreign("delete", key, response)

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
        query = {
            "fields": listing.LIST_FIELDS,
            "prettyPrint": "false",  # by default a third of an answer is spaces
            "maxResults": str(page_size or self.capabilities.page_size),
            "prefix": self._prefix + prefix,
            "startOffset": start_offset and self._prefix + start_offset,
            "endOffset": end_offset and self._prefix + end_offset,
            "delimiter": delimiter,
            "matchGlob": match_glob and listing.escape_glob(self._prefix) + match_glob,
            "pageToken": page_token,
        }
        query = {name: value for name, value in query.items() if value}
        target = f"{self._list_path}?{urlencode(query)}".encode()
        response = await self._send(b"GET", target, "list", prefix)
        uri = self.uri(prefix)
        try:
            page = listing.decode_page(response.body, expected=self._listed_kind)
        except ValueError as exc:
            raise TransientError(
                f"could not list {uri}: the answer is not a listing ({exc})", uri=uri
            ) from exc
        try:
            listing.check_page(
                page,
                prefix=self._prefix + prefix,
                start_offset=query.get("startOffset", ""),
                end_offset=query.get("endOffset", ""),
                page_token=page_token,
            )
        except ValueError as exc:
            raise StorageError(
                f"could not list {uri}: the page is not what was asked for, {exc}", uri=uri
            ) from exc
        self._listed_kind = listing.expected_kind(page)
        cut = len(self._prefix)
        return Page(
            objects=self._told(
                prefix,
                lambda: listing.listing_of(page.items, prefix=self._prefix, root=self.uri()),
            ),
            prefixes=[name[cut:] for name in page.prefixes],
            next_token=page.next_page_token,
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
        resource = await self._control.compose(
            self._name(key),
            [(self._name(source.key), source) for source in sources],
            precondition=precondition,
            content_type=content_type,
            metadata=metadata,
            uri=uri,
        )
        return self._meta(resource, key)

    async def copy(self, source: Source, key: str, *, precondition: Precondition) -> ObjectMeta:
        resource = await self._control.copy(
            source,
            self._name(source.key),
            self._name(key),
            precondition=precondition,
            uri=self.uri(source.key),
            target_uri=self.uri(key),
        )
        return self._meta(resource, key)

    async def initiate_upload(
        self, key: str, *, content_type: str = "", metadata: Mapping[str, str] | None = None
    ) -> str:
        response = await self._send(
            b"POST",
            multipart.initiate_target(self._path(key)),
            "begin an upload of",
            key,
            headers=wire.object_headers(content_type, metadata),
            body=b"",
        )
        upload_id = self._field(response, "UploadId", key)
        self._begun[upload_id] = (content_type or wire.DEFAULT_TYPE, dict(metadata or {}))
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
        response = await self._send(
            b"PUT",
            multipart.part_target(self._path(key), upload_id, number),
            f"write part {number} of",
            key,
            headers=wire.hash_headers(crc32c),
            body=pieces,
        )
        etag = (response.headers.get(b"etag") or b"").decode("latin-1")
        if not etag:
            raise self._foreign(f"write part {number} of", key, response)
        size = sum(memoryview(piece).nbytes for piece in pieces)
        told = response.headers.get(b"x-goog-hash")
        return UploadedPart(number, etag, size, self._told(key, lambda: wire.hash_crc32c(told)))

    async def complete_upload(
        self,
        key: str,
        upload_id: str,
        parts: Sequence[UploadedPart],
        *,
        precondition: Precondition,
    ) -> ObjectMeta:
        assert not precondition  # the service would complete in silence whatever it says
        response = await self._send(
            b"POST",
            multipart.abort_target(self._path(key), upload_id),
            "complete the upload of",
            key,
            headers=[(b"Content-Type", b"application/xml")],
            body=multipart.complete_body(parts),
            head_seconds=_COMPLETE_SECONDS,
        )
        etag = self._field(response, "ETag", key).strip('"')
        size = sum(part.size for part in parts)
        # What the upload was begun with: the headers describe the answer's own XML.
        content_type, metadata = self._begun.get(upload_id, ("", {}))
        meta = self._stored(response, key, size, content_type, metadata)
        self._begun.pop(upload_id, None)
        return replace(meta, etag=etag)

    async def abort_upload(self, key: str, upload_id: str) -> None:
        target = multipart.abort_target(self._path(key), upload_id)
        action = "abort the upload of"
        response = await self._send(b"DELETE", target, action, key, accept=404)
        if response.num_bytes and response.status != 404:
            raise self._foreign(action, key, response)
        self._begun.pop(upload_id, None)

    async def list_uploads(self, prefix: str) -> Sequence[OpenUpload]:
        found: list[OpenUpload] = []
        key_marker = id_marker = ""
        while True:
            target = multipart.list_uploads_target(
                self._bucket_path,
                prefix=self._prefix + prefix,
                key_marker=key_marker,
                id_marker=id_marker,
            )
            response = await self._send(b"GET", target, "list the uploads of", prefix)
            try:
                uploads, key_marker, id_marker = multipart.parse_uploads(response.body)
            except (ValueError, KeyError) as exc:
                uri = self.uri(prefix)
                raise TransientError(
                    f"could not list the uploads of {uri}: {exc}", uri=uri
                ) from exc
            cut = len(self._prefix)
            found += [replace(upload, key=upload.key[cut:]) for upload in uploads]
            if not key_marker:
                return sorted(found, key=lambda upload: (upload.key, upload.upload_id))

    async def granted_permissions(self, permissions: Sequence[str]) -> Sequence[str]:
        return await self._control.granted_permissions(permissions, uri=self.uri())

    async def aclose(self) -> None:
        await self._pool.aclose()
        await self._control.aclose()
        await self._token.close()

    def _path(self, key: str) -> bytes:
        name = self._prefix + key
        if _PLAIN_NAME.fullmatch(name) is None:
            name = quote(self._name(key), safe="/")
        return b"%b/%b" % (self._bucket_path, name.encode())

    def _name(self, key: str) -> str:
        """Return the object's whole name.

        Raises:
            ValueError: No object can have it.
        """
        name = self._prefix + key
        check_name(name)
        return name

    def _field(self, response: Response, name: str, key: str) -> str:
        # A complete can answer 200 and carry an error in its body, as on S3.
        try:
            return multipart.parse_fields(response.body)[name]
        except (ValueError, KeyError) as exc:
            code, detail = multipart.parse_error(response.body)
            uri = self.uri(key)
            raise TransientError(
                f"could not upload {uri}: the answer has no {name} ({code} {detail})",
                uri=uri,
                status=response.status,
                maybe_done=True,
            ) from exc

    async def _send(
        self,
        method: bytes,
        target: bytes,
        action: str,
        key: str,
        *,
        headers: Sequence[tuple[bytes, bytes]] = (),
        body: Any = None,
        into: Any = None,
        max_body_bytes: int | None = _MAX_ANSWER_BYTES,
        accept: int = 0,
        head_seconds: float | None = None,
        is_stored: bool = False,
    ) -> Response:
        """Send one request; with another token once more, where the service refuses the first.

        Args:
            method: Method.
            target: Path and query.
            action: What is asked, as a verb; errors say it.
            key: Of what.
            headers: Headers of this request alone.
            body: See `Pool.request`, as for `into`, `max_body_bytes` and `head_seconds`.
            into: Where the answer goes.
            max_body_bytes: Longest answer that is taken.
            accept: A status beside 2xx that is an answer.
            head_seconds: Time for the answer to begin.
            is_stored: The bytes are wanted as they are stored.
        """
        is_again = False
        while True:
            token = self._token.ready()
            if token is WAIT:
                token = await token_of(self._token, action=action, uri=self.uri(key))
            if token != self._fixed_token:
                self._fix_headers(token)
            try:
                response = await self._pool.request(
                    self._origin,
                    method,
                    target,
                    headers,
                    body=body,
                    into=into,
                    max_body_bytes=max_body_bytes,
                    head_seconds=head_seconds,
                    fixed=self._fixed_for_stored if is_stored else self._fixed,
                )
            except (RuntimeError, TransportError) as exc:
                raise self._failed(exc, action, key) from exc
            if response.status != 401 or token is None or is_again:
                break
            self._token.refuse(token)
            is_again = True
        if 200 <= response.status < 300 or response.status == accept:
            return response
        raise self._refused(response, action, key)

    def _fix_headers(self, token: str | None) -> None:
        """Encode the headers that requests have in common; anew with each new token."""
        headers = [_USER_AGENT]
        if token is not None:
            headers.append((b"Authorization", b"Bearer " + token.encode()))
        self._fixed = FixedHeaders(headers)
        self._fixed_for_stored = FixedHeaders([*headers, _STORED_BYTES])
        self._fixed_token = token

    def _failed(self, exc: Exception, action: str, key: str) -> StorageError:
        """Return our error for one of the data plane; the one place where they are mapped."""
        uri = self.uri(key)
        if not isinstance(exc, TransportError):
            return StorageError(f"could not {action} {uri}: the store was closed", uri=uri)
        message = f"could not {action} {uri}: {exc}"
        if isinstance(exc, (ProtocolError, CertificateError)):
            return StorageError(message, uri=uri)
        return TransientError(
            message,
            uri=uri,
            num_bytes_received=exc.num_bytes_received,
            generation=wire.generation_of(exc.head.headers) if exc.head else "",
            maybe_done=exc.request_sent,
        )

    def _refused(self, response: Response, action: str, key: str) -> StorageError:
        code, detail = multipart.parse_error(response.body)
        retry_after = response.headers.get(b"retry-after")
        return error_from_status(
            response.status,
            action=action,
            uri=self.uri(key),
            code=code,
            detail=detail or wire.decode_error(response.body),
            retry_after=retry_after.decode("latin-1") if retry_after else None,
        )

"""Google Cloud Storage: the XML API for bytes and deletes, the JSON API for other requests.

`control` has copies and composes. The XML API has preconditions and checksums in headers, and
multipart uploads. Reads send `Accept-Encoding: gzip` to receive the stored bytes of a
compressed object, which have the known checksum; without the header, the service would decompress
the object.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from typing import TYPE_CHECKING, Any, Final
from urllib.parse import quote, urlencode

from aioflux._auth.google import NO_PRIVATE_KEY, GoogleToken, open_token
from aioflux._auth.redaction import add_secret, redact, redact_error
from aioflux._http import FixedHeaders, Origin, open_pool
from aioflux._services import xml_multipart as multipart
from aioflux._services.base import Body, Capabilities, Page, Precondition
from aioflux._services.gcs import wire
from aioflux._services.http import COMPLETE_SECONDS
from aioflux._services.responses import (
    Failure,
    RequestKind,
    byte_range,
    error_from_status,
    malformed_page,
    malformed_response,
    size_from_unsatisfied,
    unexpected_page,
)
from aioflux._services.sender import (
    MAX_PAGE_BYTES,
    ErrorResponse,
    TokenSender,
    resolve_credentials,
)
from aioflux._services.xml_multipart import XMLService
from aioflux._services.xml_reader import parse_error, parse_fields
from aioflux.errors import CredentialsError, StorageError, TransientError
from aioflux.options import as_gcs_access

if TYPE_CHECKING:
    from aioflux._http import Response
    from aioflux._services.base import (
        ListRequest,
        PartRequest,
        ReadRequest,
        ServiceConfig,
        Source,
        UploadedPart,
        WriteRequest,
    )
    from aioflux._services.gcs.control import GCSControl
    from aioflux._services.http import EncodedRead
    from aioflux._values.listing import Kind
    from aioflux._values.meta import ObjectMeta

_STORED_BYTES: Final = (b"Accept-Encoding", b"gzip")

_PLAIN_NAME: Final = re.compile(r"[A-Za-z0-9_~-][A-Za-z0-9_.~/-]{0,1023}")
"""Names that need no percent-encoding, and that `check_name` accepts."""


class GCSSender(TokenSender):
    """Sender of the requests to one bucket."""

    def _encode_headers(self, token: str | None) -> tuple[FixedHeaders, FixedHeaders]:
        headers = [*self._common]
        if token is not None:
            add_secret(token)
            headers.append((b"Authorization", b"Bearer " + token.encode()))
        return FixedHeaders(headers), FixedHeaders([*headers, _STORED_BYTES])

    async def presign(
        self, method: bytes, path: bytes, query: bytes, key: str, *, seconds: int, now: float
    ) -> str:
        """Return a signed url; arguments as in `Signer.presign` of `sigv4`."""
        action, uri, origin = "sign a url of", self._uri(key), self._origin
        if not isinstance(self._token, GoogleToken):
            raise CredentialsError(f"could not {action} {uri}: an access token {NO_PRIVATE_KEY}")
        signing = self._token.presign(
            method, path, query, origin.authority, seconds=seconds, now=now
        )
        query = await resolve_credentials(signing, action, uri)
        return f"{origin.url}{path.decode()}?{query.decode()}"

    async def project(self) -> str:
        """Return the project whose buckets are listed; empty if it is not known."""
        project = os.environ.get("GOOGLE_CLOUD_PROJECT", "")
        if not project and isinstance(self._token, GoogleToken):
            project = await resolve_credentials(self._token.project(), "list", self._uri(""))
        return project

    def _generation_of(self, headers: Mapping[bytes, bytes]) -> str:
        return wire.generation_of(headers)

    def _parse_error(self, response: ErrorResponse) -> tuple[str, str]:
        from aioflux._services.gcs import listing

        code, detail = parse_error(response.body)
        return code, detail or listing.decode_error(response.body)

    def _service_error(self, failure: Failure) -> StorageError:
        return error_from_status(failure)


class GCSService(XMLService):
    """One bucket and prefix of Google Cloud Storage."""

    capabilities = Capabilities(page_size=5000, match_glob=True, versions=True)
    _service_name = "Cloud Storage"
    _sender: GCSSender

    def __init__(self, config: ServiceConfig) -> None:
        bucket = config.location.bucket
        # Without a bucket for `list_buckets`.
        super().__init__(
            root_uri=f"gs://{bucket}/" if bucket else "gs://", prefix=config.location.key
        )
        endpoint_url, is_emulator = wire.resolve_endpoint(config.endpoint_url, os.environ)
        origin = Origin.from_url(endpoint_url)
        self.capabilities = replace(
            GCSService.capabilities, guarded_transport=origin.scheme == "https"
        )
        access = as_gcs_access(config.credentials)
        token = open_token(access.credentials, emulator=is_emulator)
        pool = open_pool(
            origin,
            max_idle=config.max_idle,
            timeouts=config.timeouts,
            ssl_context=config.ssl_context,
        )
        project = access.user_project
        # The header is that of the XML API; the JSON API and signed urls have a parameter.
        billing = [(b"x-goog-user-project", project.encode())] if project else []
        self._params = {"userProject": project} if project else {}
        self._sender = GCSSender(token, pool, origin, self.uri, billing)
        self._kms_key = access.kms_key
        self._bucket = bucket
        self._bucket_path = f"/{quote(bucket, safe='')}/".encode()
        self._json_path = f"/storage/v1/b/{quote(bucket, safe='')}"
        self._listed_kind: Kind | None = None

    @cached_property
    def _control(self) -> GCSControl:
        """Copies and composes, imported on first use.

        The import of gcloud-aio takes 0.12 s of CPU time, and most processes do not need it.
        """
        from aioflux._services.gcs.control import GCSControl

        return GCSControl(
            self._bucket, self._json_path, self._sender, self._params, self._kms_key, uri=self.uri
        )

    async def head(self, key: str, generation: str = "") -> ObjectMeta:
        action = "read the metadata of"
        query = urlencode(self._params | ({"generation": generation} if generation else {}))
        target = f"{self._json_path}/o/{wire.quote_key(self._name(key))}{query and '?'}{query}"
        kind = RequestKind(generation=generation)
        response = await self._sender.send(b"GET", target.encode(), action, key, kind=kind)
        try:
            return self._meta(response.body, action, key, generation=generation)
        except TransientError:
            response.discard_connection()
            raise

    def _encode_read(self, request: ReadRequest) -> EncodedRead:
        generation, start, end = request.generation, request.start, request.end
        has_range = start > 0 or end is not None
        headers = ((b"Range", byte_range(start, end)),) if has_range else ()
        target = self._path(request.key)
        if generation:
            target = b"%b?generation=%b" % (target, generation.encode())
        return target, headers, has_range, False

    def _decode_read(self, request: ReadRequest, response: Response) -> Body | None:
        if response.status == 416:
            size = size_from_unsatisfied(response.headers, start=request.start)
            return None if size is None else self._body(request.key, response, b"", size)
        size = wire.object_size(request, response)
        return self._body(request.key, response, response.body, size)

    def _body(self, key: str, response: Response, data: Any, size: int) -> Body:
        headers = response.headers
        try:
            crc32c = wire.hash_crc32c(headers.get(b"x-goog-hash"))
        except ValueError as exc:
            raise self._malformed_response(key, exc) from exc
        return Body(
            data,
            size,
            headers.get(b"x-goog-generation", b"").decode("latin-1"),
            # A 416 response for an empty object has no checksum, but the crc32c of no bytes is 0.
            0 if crc32c is None and not size else crc32c,
            lambda: wire.meta_from_headers(headers, key=key, uri=self.uri(key), size=size),
        )

    def _meta(
        self, data: Any, action: str, key: str, *, generation: str = "", maybe_done: bool = False
    ) -> ObjectMeta:
        """Return the metadata in an object resource, which must have the requested generation."""
        from aioflux._services.gcs import listing

        uri = self.uri(key)
        try:
            resource = listing.decode_resource(data)
            meta = listing.meta_from_resource(resource, key=key, uri=uri)
        except ValueError as exc:
            why = f"the response is not an object resource ({redact_error(exc)})"
            raise malformed_response(action, uri, why, maybe_done=maybe_done) from exc
        if resource.name != self._prefix + key or generation not in {"", resource.generation}:
            raise StorageError(
                f"could not {action} {uri}: the response is for "
                f"{redact(f'{resource.name!r} in generation {resource.generation}')}",
                uri=uri,
            )
        return meta

    def _written_meta(self, request: WriteRequest, response: Response, size: int) -> ObjectMeta:
        key = request.key
        try:
            meta = wire.meta_from_headers(
                response.headers,
                key=key,
                uri=self.uri(key),
                size=size,
                written=request,
            )
        except ValueError as exc:
            raise self._malformed_response(key, exc) from exc
        if not meta.generation:
            raise self._not_from_service("write", key, response)
        return meta

    async def put(
        self, request: WriteRequest, pieces: Sequence[bytes | memoryview], *, crc32c: int | None
    ) -> ObjectMeta:
        headers = wire.object_headers(request.attributes, self._kms_key)
        headers += wire.precondition_headers(request.precondition)
        headers += wire.hash_headers(crc32c)
        response = await self._sender.send(
            b"PUT", self._path(request.key), "write", request.key, headers=headers, body=pieces
        )
        return self._written_meta(request, response, sum(map(len, pieces)))

    async def delete(self, key: str, *, generation: str = "") -> None:
        headers = wire.precondition_headers(Precondition(if_generation_match=generation or None))
        response = await self._sender.send(
            b"DELETE", self._path(key), "delete", key, headers=headers
        )
        if response.num_bytes:
            raise self._not_from_service("delete", key, response)

    async def delete_version(self, key: str, *, generation: str) -> None:
        # Preconditions are compared with the current generation only.
        target = b"%b?generation=%b" % (self._path(key), generation.encode())
        kind = RequestKind(generation=generation)
        response = await self._sender.send(b"DELETE", target, "delete", key, kind=kind)
        if response.num_bytes:
            raise self._not_from_service("delete", key, response)

    async def list_page(self, request: ListRequest) -> Page:
        from aioflux._services.gcs import listing

        prefix, glob = request.prefix, request.match_glob
        query = {
            **self._params,
            "fields": listing.VERSION_FIELDS if request.versions else listing.LIST_FIELDS,
            "versions": "true" if request.versions else "",
            "prettyPrint": "false",  # by default, a third of a response is spaces
            "maxResults": str(request.page_size or self.capabilities.page_size),
            "prefix": self._prefix + prefix,
            "startOffset": request.start_offset and self._prefix + request.start_offset,
            "endOffset": request.end_offset and self._prefix + request.end_offset,
            "delimiter": request.delimiter,
            "matchGlob": glob and listing.escape_glob(self._prefix) + glob,
            "pageToken": request.page_token,
        }
        query = {name: value for name, value in query.items() if value}
        target = f"{self._json_path}/o?{urlencode(query)}".encode()
        response = await self._sender.send(
            b"GET", target, "list", prefix, max_body_bytes=MAX_PAGE_BYTES
        )
        uri = self.uri(prefix)
        try:
            page = listing.decode_page(response.body, expected=self._listed_kind)
        except ValueError as exc:
            response.discard_connection()
            raise malformed_page(uri, exc) from exc
        try:
            listing.check_page(
                page,
                prefix=self._prefix + prefix,
                start_offset=query.get("startOffset", ""),
                end_offset=query.get("endOffset", ""),
                page_token=request.page_token,
                versions=request.versions,
            )
        except ValueError as exc:
            raise unexpected_page(uri, exc) from exc
        self._listed_kind = listing.expected_kind(page)
        objects: Sequence[ObjectMeta]
        try:
            objects = listing.listing_of(page.items, prefix=self._prefix, root=self.uri())
        except ValueError as exc:
            raise self._malformed_response(prefix, exc) from exc
        if request.versions:
            objects = [
                replace(meta, is_latest=not item.time_deleted)
                for meta, item in zip(objects, page.items, strict=True)
            ]
        num_cut = len(self._prefix)
        return Page(
            objects=objects,
            prefixes=[name[num_cut:] for name in page.prefixes],
            next_token=page.next_page_token,
        )

    async def list_buckets(self) -> Sequence[str]:
        from aioflux._services.gcs import listing

        query = {
            **self._params,
            "fields": "kind,items(name),nextPageToken",
            "project": await self._sender.project(),
        }
        if not query["project"]:
            raise CredentialsError(
                f"could not list {self.uri()}: the credentials have no project; set "
                "GOOGLE_CLOUD_PROJECT"
            )
        names: list[str] = []
        while True:
            target = f"/storage/v1/b?{urlencode(query)}".encode()
            response = await self._sender.send(
                b"GET", target, "list", "", max_body_bytes=MAX_PAGE_BYTES
            )
            try:
                page = listing.decode_page(response.body, kind=listing.BUCKETS)
            except ValueError as exc:
                response.discard_connection()
                raise malformed_page(self.uri(), exc) from exc
            names += (item.name for item in page.items)
            if page.next_page_token in {"", query.get("pageToken")}:
                return names
            query["pageToken"] = page.next_page_token

    async def compose(self, request: WriteRequest, sources: Sequence[Source]) -> ObjectMeta:
        resource = await self._control.compose(
            self._name(request.key),
            [(self._name(source.key), source) for source in sources],
            request,
        )
        return self._meta(resource, "compose", request.key, maybe_done=True)

    async def copy(self, source: Source, key: str, *, precondition: Precondition) -> ObjectMeta:
        resource = await self._control.copy(
            source, self._name(source.key), self._name(key), key, precondition
        )
        return self._meta(resource, "copy to", key, maybe_done=True)

    def _upload_headers(self, request: WriteRequest) -> list[tuple[bytes, bytes]]:
        return wire.object_headers(request.attributes, self._kms_key)

    async def _part_headers(self, request: PartRequest) -> Sequence[tuple[bytes, bytes]]:
        return wire.hash_headers(request.crc32c)

    def _part_crc32c(self, response: Response, request: PartRequest) -> int | None:
        return wire.hash_crc32c(response.headers.get(b"x-goog-hash"))

    async def complete_upload(
        self, request: WriteRequest, upload_id: str, parts: Sequence[UploadedPart]
    ) -> ObjectMeta:
        assert not request.precondition  # the service would ignore it
        key, action = request.key, "complete the upload of"
        response = await self._sender.send(
            b"POST",
            multipart.upload_target(self._path(key), upload_id),
            action,
            key,
            headers=[(b"Content-Type", b"application/xml")],
            body=multipart.complete_body(parts),
            head_seconds=COMPLETE_SECONDS,
        )
        etag = self._fields(response, "ETag", action, key)["ETag"].strip('"')
        meta = self._written_meta(request, response, sum(part.size for part in parts))
        return replace(meta, etag=etag)

    async def granted_permissions(self, permissions: Sequence[str]) -> Sequence[str]:
        from aioflux._services.gcs import listing

        action = "test the permissions of"
        names = [("permissions", permission) for permission in permissions]
        query = urlencode([*names, *self._params.items()])
        target = f"{self._json_path}/iam/testPermissions?{query}".encode()
        response = await self._sender.send(b"GET", target, action, "")
        try:
            return listing.decode_permissions(response.body)
        except ValueError as exc:
            response.discard_connection()
            why = f"the response is not a list of permissions ({redact_error(exc)})"
            raise malformed_response(action, self.uri(), why, maybe_done=False) from exc

    async def sign(self, key: str, *, method: str, seconds: int, now: float) -> str:
        path, query = self._path(key), urlencode(self._params, quote_via=quote).encode()
        return await self._sender.presign(
            method.encode(), path, query, key, seconds=seconds, now=now
        )

    def _path(self, key: str) -> bytes:
        name = self._prefix + key
        if _PLAIN_NAME.fullmatch(name) is None:
            name = quote(self._name(key), safe="/")
        return self._bucket_path + name.encode()

    def _fields(self, response: Response, name: str, action: str, key: str) -> Mapping[str, str]:
        # Like S3, the service can return status 200 with an error in the body.
        try:
            fields = parse_fields(response.body)
            fields[name]
        except (ValueError, KeyError) as exc:
            response.discard_connection()
            code, detail = parse_error(response.body)
            uri = self.uri(key)
            why = redact(f" ({code} {detail[:300]})") if code else ""
            raise TransientError(
                f"could not upload {uri}: the response has no {name}{why}",
                uri=uri,
                status=response.status,
                maybe_done=True,
                is_malformed=not code,
            ) from exc
        return fields

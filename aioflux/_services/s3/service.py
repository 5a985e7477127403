"""Amazon S3, and other servers with its API.

    operation -> `sender`: endpoint, access keys, signature, HTTP request -> decoded response

Over 500 lines because it is one class with a method for each operation of the contract.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, ClassVar

from aioflux._auth.redaction import redact
from aioflux._services import xml_multipart as multipart
from aioflux._services.base import (
    Body,
    Capabilities,
    PartRequest,
    Precondition,
    WriteRequest,
    combined_crc32c,
)
from aioflux._services.http import COMPLETE_SECONDS
from aioflux._services.responses import CONDITIONAL, PLAIN, RequestKind, written_fields
from aioflux._services.s3 import wire
from aioflux._services.s3.endpoint import is_amazon
from aioflux._services.s3.listing import S3Lister
from aioflux._services.s3.sender import S3Sender
from aioflux._services.s3.wire import deletion_error, error_in_success
from aioflux._services.s3.writes import (
    MAX_COPY_BYTES,
    copy_by_parts,
    copy_headers,
    delete_many,
    fits_xml,
    reject_ignored_condition,
    unquoted_endpoints,
)
from aioflux._services.xml_multipart import XMLService
from aioflux._services.xml_reader import parse_fields
from aioflux._values.checksums import crc32c as crc32c_of
from aioflux._values.meta import ObjectMeta, attributes_of
from aioflux.errors import NotFoundError, PreconditionFailedError, StorageError, TransientError
from aioflux.options import as_s3_access

if TYPE_CHECKING:
    from aioflux._http import Headers, Response
    from aioflux._services.base import (
        ListRequest,
        Page,
        ReadRequest,
        ServiceConfig,
        Source,
        UploadedPart,
    )
    from aioflux._services.http import EncodedRead


class S3Service(XMLService):
    """One bucket and prefix of S3."""

    capabilities = Capabilities(
        compose=False,
        conditional_complete=True,
        delete_page_size=1000,
        listed_checksums=False,
        page_size=1000,
        versions=True,
    )
    _service_name = "S3"
    _compose_advice = (
        "S3 does not concatenate objects; read the sources and write their bytes with open_writer, "
        "or use the sources as they are"
    )
    _encodes_keys = True
    sender_class: ClassVar[type[S3Sender]] = S3Sender
    """Class of the sender; tests set another."""
    _sender: S3Sender
    _lister: S3Lister

    def __init__(self, config: ServiceConfig) -> None:
        bucket, prefix = config.location.bucket, config.location.key
        root_uri = f"{config.location.scheme}://{bucket}"
        # Without a bucket for `list_buckets`.
        super().__init__(root_uri=f"{root_uri}/" if bucket else root_uri, prefix=prefix)
        access = as_s3_access(config.credentials)
        self._bucket = bucket
        self._has_checksums = access.checksums
        self._encryption = wire.encryption_headers(access.kms_key)
        self._requires_conditions = access.require_conditions
        self.conditions_known = False
        self._is_amazon = False
        self._server = ""
        self._verify = config.verify
        self._sender = self.sender_class(
            config, access, uri=self.uri, on_endpoint=self._update_trust
        )
        self._update_trust()
        self._guesses = wire.WholeObjectGuesses()
        self._lister = S3Lister(
            self._sender, prefix, uri=self.uri, note_unsorted=self._note_unsorted
        )

    def _update_trust(self) -> None:
        """Set `guarded_transport`, which is False until the endpoint is known."""
        self.capabilities = replace(self.capabilities, guarded_transport=self._sender.is_guarded)

    def _note_unsorted(self) -> None:
        if self.capabilities.list_ranges:
            self.capabilities = replace(self.capabilities, list_ranges=False)

    async def unprobed_server(self) -> str:
        if self.conditions_known:
            return ""
        endpoint = await self._sender.endpoint_url()
        if is_amazon(endpoint):
            self.conditions_known = self._is_amazon = True
            return ""
        self._server = f"{endpoint.rstrip('/')}/{self._bucket}"
        return self._server

    def reject_condition(self, key: str, precondition: Precondition, *, warns: bool = True) -> None:
        reject_ignored_condition(
            precondition,
            uri=self.uri(key),
            server=self._server,
            is_required=self._requires_conditions,
            warns=warns,
        )

    async def has_conditional_delete(self, *, in_pages: bool = False) -> bool:
        await self.unprobed_server()
        # The probe tries only deletes of one object, not those of a page.
        is_probed = self.conditions_known and not in_pages
        return self._is_amazon or (is_probed and self.capabilities.conditional_delete)

    def _server_compares(self, precondition: Precondition) -> bool:
        """Return whether the server compares a precondition; True before a probe."""
        if precondition.if_absent:
            return self.capabilities.conditional_create
        return self.capabilities.conditional_replace

    async def _precondition_to_send(self, key: str, precondition: Precondition) -> Precondition:
        """Return the precondition to send; check it here and return an empty one if it is ignored.

        Raises:
            PreconditionFailedError: The precondition was checked here, and does not hold.
        """
        if not precondition or self._server_compares(precondition):
            return precondition
        await self._check_precondition(key, precondition)
        return Precondition()

    async def _send_matching(
        self, key: str, generation: str, send: Callable[[bool], Awaitable[Response]]
    ) -> Response:
        """Send a request with `If-Match`, and find out if the server wants quotes around the ETag.

        Some servers accept only one of the two forms. If the endpoint rejects the current ETag of
        the object, the other form is sent, and used for later requests if the endpoint accepts it.
        The argument of `send` is whether the ETag has quotes.

        Raises:
            PreconditionFailedError: The object has another generation, or does not exist.
        """
        endpoint = await self._sender.endpoint_url()
        is_quoted = endpoint not in unquoted_endpoints
        try:
            return await send(is_quoted)
        except PreconditionFailedError as exc:
            if exc.status != 412 or is_amazon(endpoint):
                raise
            try:
                current = (await self.head(key)).generation
            except NotFoundError:
                current = ""
            except TransientError as failure:
                failure.maybe_done = False  # the server rejected the request that `send` sent
                raise
            if not wire.is_same_generation(generation, current):
                raise
        response = await send(not is_quoted)
        if is_quoted:
            unquoted_endpoints.add(endpoint)
        else:
            unquoted_endpoints.discard(endpoint)
        return response

    async def head(self, key: str, generation: str = "") -> ObjectMeta:
        pin = wire.parse_pin(generation)
        response = await self._sender.send(
            b"HEAD",
            self._target(key, pin),
            "read the metadata of",
            key,
            headers=wire.read_headers(pin),
            kind=RequestKind(generation=generation) if generation else PLAIN,
        )
        headers = response.headers
        length = headers.get(b"content-length", b"")
        if not wire.is_etag(wire.etag_of(headers)) or not length.isdigit():
            raise self._not_from_service("read the metadata of", key, response)
        if pin.etag and wire.etag_of(headers) != pin.etag:
            # The server ignores `If-Match`.
            uri = self.uri(key)
            raise NotFoundError(
                f"could not read the metadata of {uri}: it was replaced since it was listed; list "
                "it again",
                uri=uri,
                status=412,
            )
        size = int(length)
        try:
            wire.require_size(pin, size)
            checksum = self._checksum_from_headers(headers)
        except ValueError as exc:
            raise self._malformed_response(key, exc) from exc
        meta = wire.meta_from_headers(
            headers, key=key, uri=self.uri(key), size=size, crc32c=checksum
        )
        return replace(meta, generation=generation) if pin.version else meta

    def _encode_read(self, request: ReadRequest) -> EncodedRead:
        generation, start, end = request.generation, request.start, request.end
        pin = wire.parse_pin(generation)
        is_guess = not generation and start == 0 and self._guesses.omits_range(end)
        byte_range = b"" if is_guess else wire.byte_range(start, end, pin)
        headers = wire.read_headers(pin, byte_range)
        return self._target(request.key, pin), headers, bool(byte_range), is_guess

    def _note_wrong_guess(self) -> None:
        self._guesses.note_wrong()

    def _decode_read(self, request: ReadRequest, response: Response) -> Body | None:
        key, headers = request.key, response.headers
        etag = wire.etag_of(headers)
        if response.status == 416:
            size = wire.size_past_the_end(headers, response.body, start=request.start)
            return None if size is None else self._body(key, headers, etag, b"", size, None)
        size = wire.object_size(request, response, etag)
        is_whole = response.num_bytes == size
        checksum = self._checksum_of_whole(key, response) if is_whole else None
        return self._body(key, headers, etag, response.body, size, checksum)

    def _checksum_of_whole(self, key: str, response: Response) -> int | None:
        """Return the crc32c of a whole object, from its response.

        If the response has no crc32c but another checksum, compare the bytes with that, and compute
        the crc32c. None if the response has no checksum, or none that is worth comparing.

        Raises:
            TransientError: The bytes do not match the other checksum.
        """
        headers = response.headers
        try:
            checksum = self._checksum_from_headers(headers)
        except ValueError as exc:
            raise self._malformed_response(key, exc) from exc
        if checksum is not None or not self._verify:
            return checksum
        # Over TLS, bytes cannot change without an error, and an MD5 may cost more than the read.
        is_same = wire.is_same_content(headers, response.body, uses_md5=not self._sender.is_guarded)
        if is_same is None:
            return None
        if is_same:
            return crc32c_of(response.body)
        uri = self.uri(key)
        raise TransientError(
            f"could not read {uri}: the bytes do not match the checksum of the response",
            uri=uri,
            num_bytes_received=response.num_bytes,
            is_damaged=True,
        )

    def _body(
        self,
        key: str,
        headers: Headers,
        etag: str,
        data: Any,
        size: int,
        checksum: int | None,
    ) -> Body:
        checksum = 0 if checksum is None and not size else checksum
        return Body(
            data,
            size,
            wire.generation_of(etag, size),
            checksum,
            lambda: wire.meta_from_headers(
                headers, key=key, uri=self.uri(key), size=size, crc32c=checksum
            ),
        )

    async def put(
        self, request: WriteRequest, pieces: Sequence[bytes | memoryview], *, crc32c: int | None
    ) -> ObjectMeta:
        key = request.key
        headers = wire.object_headers(request.attributes) + self._encryption
        if self._has_checksums:
            headers += wire.hash_headers(crc32c)
        condition = await self._precondition_to_send(key, request.precondition)

        async def send(is_quoted: bool) -> Response:
            conditions = wire.precondition_headers(condition, is_quoted=is_quoted)
            return await self._sender.send(
                b"PUT",
                self._path(key),
                "write",
                key,
                headers=headers + conditions,
                body=pieces,
                kind=CONDITIONAL if condition else PLAIN,
            )

        expected = condition.if_generation_match
        response = await (self._send_matching(key, expected, send) if expected else send(True))
        etag = wire.etag_of(response.headers)
        if not etag:
            raise self._not_from_service("write", key, response)
        try:
            checksum = self._checksum_from_headers(response.headers)
        except ValueError as exc:
            raise self._malformed_response(key, exc) from exc
        return self._written_meta(request, etag, sum(map(len, pieces)), checksum)

    async def delete(self, key: str, *, generation: str = "") -> None:
        pin = wire.parse_pin(generation)
        if not generation:
            # S3 also returns success for a missing object.
            await self.head(key)

        async def send(is_quoted: bool) -> Response:
            etag = pin.quoted if is_quoted else pin.etag.encode()
            return await self._sender.send(
                b"DELETE",
                self._target(key, pin),
                "delete",
                key,
                headers=[(b"If-Match", etag)] if pin.etag else (),
                kind=CONDITIONAL if pin.etag else PLAIN,
            )

        try:
            response = await (
                self._send_matching(key, generation, send) if pin.etag else send(True)
            )
        except PreconditionFailedError:
            # S3 also returns 412 for a missing object.
            await self.head(key)
            raise
        if response.num_bytes:
            raise self._not_from_service("delete", key, response)

    async def delete_page(self, sources: Sequence[Source]) -> Mapping[str, StorageError]:
        failed: dict[str, StorageError] = {}
        key_by_name: dict[str, str] = {}
        rows: list[tuple[str, wire.Pin]] = []
        for source in sources:
            name = self._name(source.key)
            if fits_xml(name):
                key_by_name[name] = source.key
                rows.append((name, wire.parse_pin(source.generation)))
            else:
                try:
                    await self.delete(source.key, generation=source.generation)
                except StorageError as exc:
                    failed[source.key] = exc
        if not rows:
            return failed
        rejected = await delete_many(self._sender, rows, uri=self.uri())
        for name, (code, detail) in rejected.items():
            key = key_by_name.get(name)
            if key is None:
                # The error may belong to one of the requested objects, so none counts as deleted.
                uri = self.uri()
                raise TransientError(
                    f"could not delete objects of {uri}: the service returned "
                    f"{redact(f'{code} for {name!r}')}, which is not in the request",
                    uri=uri,
                    maybe_done=True,
                )
            failed[key] = deletion_error(code, detail, uri=self.uri(key))
        return failed

    async def list_page(self, request: ListRequest) -> Page:
        size = request.page_size or self.capabilities.page_size
        if request.versions:
            return await self._lister.version_page(request, size)
        return await self._lister.page(request, size)

    async def list_buckets(self) -> Sequence[str]:
        return await self._lister.buckets()

    async def copy(self, source: Source, key: str, *, precondition: Precondition) -> ObjectMeta:
        original = await self.head(source.key, generation=source.generation)
        await self._check_precondition(key, precondition)
        pin = wire.parse_pin(source.generation or original.generation)
        source_headers = copy_headers(self._bucket, self._name(source.key), pin)
        action = "copy to"
        condition = precondition if self._server_compares(precondition) else Precondition()
        try:
            if original.size > MAX_COPY_BYTES:
                request = WriteRequest(key, precondition, attributes_of(original))
                return await copy_by_parts(
                    self, self.put_part_copy, request, original.size, source_headers
                )
            headers = source_headers + wire.precondition_headers(condition) + self._encryption
            if original.storage_class:  # S3 copies the other attributes
                headers.append((wire.CLASS_HEADER, original.storage_class.encode()))
            response = await self._sender.send(
                b"PUT",
                self._path(key),
                action,
                key,
                headers=headers,
                head_seconds=COMPLETE_SECONDS,
                kind=CONDITIONAL if condition else PLAIN,
            )
        except PreconditionFailedError:
            # S3 returns 412 for the precondition of the source, and for that of the destination.
            pinned = f"version:{pin.version}" if pin.version else original.generation
            await self._check_source(source, pinned)
            raise
        fields = self._fields(response, "ETag", action, key)
        etag = fields["ETag"].strip('"')
        checksum = self._checksum_from_fields(fields, key)
        return replace(
            original,
            key=key,
            uri=self.uri(key),
            etag=etag,
            generation=wire.generation_of(etag, original.size),
            crc32c=original.crc32c if checksum is None else checksum,
            updated=None,
        )

    async def _check_source(self, source: Source, generation: str) -> None:
        """Check that the source of a copy was not replaced or deleted.

        Raises:
            NotFoundError: The source has changed, and the caller pinned its generation.
            TransientError: The source has changed, and the caller did not pin its generation: the
                next attempt copies the new object, if there is one.
        """
        try:
            await self.head(source.key, generation=generation)
        except NotFoundError as exc:
            if source.generation:
                raise
            uri = self.uri(source.key)
            raise TransientError(
                f"could not copy {uri}: it was replaced or deleted during the copy", uri=uri
            ) from exc

    async def _check_precondition(self, key: str, precondition: Precondition) -> None:
        """Compare a precondition with the object's metadata, since the server may ignore it.

        Raises:
            PreconditionFailedError: The precondition does not hold.
        """
        if not precondition:
            return
        current = ""
        try:
            current = (await self.head(key)).generation
        except NotFoundError:
            if precondition.if_absent:
                return
        expected = precondition.if_generation_match
        if precondition.if_absent or not wire.is_same_generation(expected or "", current):
            raise PreconditionFailedError.of("write", self.uri(key), status=412)

    def _upload_headers(self, request: WriteRequest) -> list[tuple[bytes, bytes]]:
        return [
            *wire.object_headers(request.attributes),
            *self._encryption,
            *wire.upload_headers(has_checksums=self._has_checksums),
        ]

    async def _part_headers(self, request: PartRequest) -> Sequence[tuple[bytes, bytes]]:
        return wire.hash_headers(request.crc32c) if self._has_checksums else ()

    def _part_crc32c(self, response: Response, request: PartRequest) -> int | None:
        checksum = self._checksum_from_headers(response.headers)
        # If the response has no checksum, the service has compared the checksum of the request.
        return request.crc32c if checksum is None else checksum

    async def put_part_copy(
        self, key: str, upload_id: str, number: int, headers: Sequence[tuple[bytes, bytes]]
    ) -> str:
        """Copy the bytes of one part from an object; return the ETag of the part."""
        action = f"copy part {number} of"
        response = await self._sender.send(
            b"PUT",
            self._part_target(PartRequest(key, upload_id, number)),
            action,
            key,
            headers=headers,
            head_seconds=COMPLETE_SECONDS,
        )
        return self._fields(response, "ETag", action, key)["ETag"]

    async def complete_upload(
        self, request: WriteRequest, upload_id: str, parts: Sequence[UploadedPart]
    ) -> ObjectMeta:
        key, precondition = request.key, request.precondition
        await self._check_precondition(key, precondition)
        size = sum(part.size for part in parts)
        condition = precondition if self._server_compares(precondition) else Precondition()
        headers = [(b"Content-Type", b"application/xml")]
        headers += wire.precondition_headers(condition)
        checksum = combined_crc32c(parts) if self._has_checksums else None
        if checksum is not None:
            headers += [*wire.hash_headers(checksum), (b"x-amz-checksum-type", b"FULL_OBJECT")]
        action = "complete the upload of"
        response = await self._sender.send(
            b"POST",
            multipart.upload_target(self._path(key), upload_id),
            action,
            key,
            headers=headers,
            body=multipart.complete_body(parts),
            head_seconds=COMPLETE_SECONDS,
            kind=RequestKind(is_conditional=bool(condition), is_completion=True),
        )
        fields = self._fields(response, "ETag", action, key)
        checksum = self._checksum_from_fields(fields, key)
        return self._written_meta(request, fields["ETag"].strip('"'), size, checksum)

    async def sign(self, key: str, *, method: str, seconds: int, now: float) -> str:
        path = self._path(key)
        return await self._sender.presign(method.encode(), path, key, seconds=seconds, now=now)

    def _path(self, key: str) -> bytes:
        return wire.quote_name(self._prefix + key)

    def _name(self, key: str) -> str:
        name = self._prefix + key
        wire.check_name(name)
        return name

    def _target(self, key: str, pin: wire.Pin) -> bytes:
        path = self._path(key)
        return b"%b?%b" % (path, wire.version_query(pin)) if pin.version else path

    def _fields(self, response: Response, name: str, action: str, key: str) -> Mapping[str, str]:
        try:
            fields = parse_fields(response.body)
        except ValueError:
            fields = {}
        if fields.get(name):
            return fields
        response.discard_connection()
        raise error_in_success(fields, action=action, uri=self.uri(key))

    def _checksum_from_headers(self, headers: Mapping[bytes, bytes]) -> int | None:
        """Return the crc32c of a whole object; None if missing, or if `S3Access.checksums` is off.

        Raises:
            ValueError: The header is malformed.
        """
        if not self._has_checksums:
            return None
        get = headers.get
        return wire.full_crc32c(get(b"x-amz-checksum-crc32c"), get(b"x-amz-checksum-type"))

    def _checksum_from_fields(self, fields: Mapping[str, str], key: str) -> int | None:
        try:
            checksum, kind = fields.get("ChecksumCRC32C", ""), fields.get("ChecksumType", "")
            return wire.full_crc32c(checksum.encode(), kind.encode())
        except ValueError as exc:
            raise self._malformed_response(key, exc) from exc

    def _written_meta(
        self, request: WriteRequest, etag: str, size: int, checksum: int | None
    ) -> ObjectMeta:
        return ObjectMeta(
            key=request.key,
            uri=self.uri(request.key),
            size=size,
            etag=etag,
            generation=wire.generation_of(etag, size),
            crc32c=checksum if self._has_checksums else None,
            **written_fields(request.attributes),
        )

"""S3 and what speaks as it does: all of it on the data plane, signed here.

    operation -> `_s3_send`: site, keys, signature, data plane -> what the answer means

Over 500 lines because all operations of the contract are declared here: their signatures are a
third of it. What answers are worth is decided in `_s3_read`, `_s3_list`, `_s3_wire`, `_s3_errors`.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, Final

from aioflux._access import S3Access
from aioflux._checksums import combine_crc32c
from aioflux._checksums import crc32c as crc32c_of
from aioflux._errors import (
    NotFoundError,
    PreconditionFailedError,
    StorageError,
    TransientError,
)
from aioflux._meta import ObjectMeta
from aioflux._uri import check_name
from aioflux.http import ConnectionLostError, ProtocolError
from aioflux.service import _multipart as multipart
from aioflux.service import _s3_list as listing
from aioflux.service import _s3_read as reading
from aioflux.service import _s3_wire as wire
from aioflux.service._base import Body, Capabilities, Page, Precondition, Service, UploadedPart
from aioflux.service._s3_copy import copy_by_parts
from aioflux.service._s3_errors import deletion_error, error_in_success
from aioflux.service._s3_send import Asked, Sender

if TYPE_CHECKING:
    import ssl
    from collections.abc import Mapping, Sequence

    from aioflux._meta import OpenUpload
    from aioflux._policy import Timeouts
    from aioflux.http import Response, Waiter
    from aioflux.service._base import Exchange, Into, Source

__all__ = ["S3Service"]

_COMPLETE_SECONDS: Final = 600.0
"""Completing an upload of many parts, or copying an object, can take minutes."""
_UNSORTED_SERVERS: Final = (b"SeaweedFS",)
"""Servers that list what lies below a name before names that only begin with it."""
_MAX_GUESSED_BYTES: Final = 4 * 1024 * 1024
_NOT_GUESSED: Final = 1000
"""Reads by name that ask for a range after one that turned out to be longer."""
_MAX_SORTED: Final = 4
"""Listings sorted here that are kept for their next page."""


class S3Service(Service):
    """One bucket and prefix of S3."""

    capabilities = Capabilities(
        compose=False,
        conditional_complete=True,
        delete_page_size=1000,
        listed_checksums=False,
        page_size=1000,
    )

    def __init__(
        self,
        bucket: str,
        prefix: str,
        *,
        access: S3Access | None = None,
        endpoint_url: str = "",
        timeouts: Timeouts,
        max_connections: int,
        ssl_context: ssl.SSLContext | None = None,
        verify: bool = True,
    ) -> None:
        super().__init__(root_uri=f"s3://{bucket}/", prefix=prefix)
        access = access or S3Access()
        self._bucket = bucket
        self._has_checksums = access.checksums
        self._verify = verify
        self._sender = Sender(
            bucket,
            access=access,
            endpoint_url=endpoint_url,
            timeouts=timeouts,
            max_connections=max_connections,
            ssl_context=ssl_context,
        )
        self.capabilities = replace(
            S3Service.capabilities, guarded_transport=self._sender.is_guarded
        )
        self._num_not_guessed = 0
        self._guesses_under_way: set[Exchange] = set()
        # Listings come out of order: they are read whole, and sorted here.
        self._is_unsorted = False
        # What is left of such listings, by the tokens of their next pages.
        self._sorted: dict[str, listing.ListPage] = {}
        # Content type and metadata of the uploads under way, which no later answer repeats.
        self._begun: dict[str, tuple[str, Mapping[str, str]]] = {}

    async def head(self, key: str, *, generation: str = "") -> ObjectMeta:
        pin = wire.parse_pin(generation)
        response = await self._sender.send(
            b"HEAD",
            self._path(key),
            self._asked("look at", key, is_pinned=bool(generation)),
            query=wire.version_query(pin),
            headers=wire.read_headers(pin),
        )
        headers = response.headers
        told = headers.get(b"content-length", b"")
        if not wire.etag_of(headers) or not told.isdigit():
            raise self._foreign("look at", key, response)
        size = int(told)
        try:
            wire.require_size(pin, size)
            checksum = self._told_checksum(headers)
        except ValueError as exc:
            raise self._damaged(key, exc) from exc
        return wire.meta_from_headers(
            headers, key=key, uri=self.uri(key), size=size, crc32c=checksum
        )

    async def get(
        self,
        key: str,
        *,
        generation: str = "",
        start: int = 0,
        end: int | None = None,
        into: Into | None = None,
    ) -> Body:
        pin = wire.parse_pin(generation)
        is_guess = not generation and start == 0 and self._guesses(end)
        asked = b"" if is_guess else reading.byte_range(start, end, pin)
        try:
            response = await self._sender.send(
                b"GET",
                self._path(key),
                self._asked("read", key, is_pinned=bool(generation)),
                query=wire.version_query(pin),
                headers=wire.read_headers(pin, asked),
                into=bytes if into is None else into,
                # Of a service that ignores the range, no more than was asked for is taken.
                max_body_bytes=None if end is None else end - start,
                accept=416 if asked else 0,
            )
        except StorageError as exc:
            if not (is_guess and isinstance(exc.__cause__, ProtocolError)):
                raise
            self._guessed_wrong()
            return await self.get(key, start=start, end=end, into=into)
        body = self._read(key, response, start=start, end=end, pin=pin)
        return await self._look_again(key, generation, start) if body is None else body

    def begin_get(self, key: str, *, generation: str, end: int, waiter: Waiter) -> Exchange | None:
        try:
            pin = wire.parse_pin(generation)
        except ValueError:
            return None  # `get` says so
        is_guess = not generation and self._guesses(end)
        asked = b"" if is_guess else reading.byte_range(0, end, pin)
        exchange = self._sender.begin(
            self._path(key), wire.version_query(pin), pin, asked, end=end, waiter=waiter
        )
        if is_guess and exchange is not None:
            self._guesses_under_way.add(exchange)
        return exchange

    def _guesses(self, end: int | None) -> bool:
        """Tell whether all of an object is asked for, where `[0, end)` is wanted.

        Only then S3 tells a checksum. Most reads of small objects by name ask for more than there
        is; where one asked for less, the connection is lost, and so is the wish to guess, for a
        while.
        """
        if end is None or end > _MAX_GUESSED_BYTES:
            return False
        if self._num_not_guessed:
            self._num_not_guessed -= 1
        return not self._num_not_guessed

    def _guessed_wrong(self) -> None:
        self._num_not_guessed = _NOT_GUESSED

    def end_get(
        self, key: str, exchange: Exchange, answer: Response, *, generation: str, end: int
    ) -> Body | None:
        sender = self._sender
        self._guesses_under_way.discard(exchange)
        site, signer = sender.end(exchange)
        if not (200 <= answer.status < 300 or answer.status == 416):
            if sender.mend(answer, site, signer):
                return None
            raise sender.refused(answer, self._asked("read", key, is_pinned=bool(generation)))
        return self._read(key, answer, start=0, end=end, pin=wire.parse_pin(generation))

    def fail_get(self, key: str, exchange: Exchange, error: Exception) -> StorageError | None:
        is_guess = exchange in self._guesses_under_way
        self._guesses_under_way.discard(exchange)
        self._sender.end(exchange)
        if isinstance(error, ConnectionLostError) and exchange.is_stale:
            return None
        if is_guess and isinstance(error, ProtocolError):
            # Maybe it is longer than was guessed: `get` looks again, and asks for a range.
            self._guessed_wrong()
            return None
        return self._sender.failed(error, self._asked("read", key))

    def drop_get(self, exchange: Exchange) -> None:
        exchange.abort()
        self._guesses_under_way.discard(exchange)
        self._sender.end(exchange)

    def _read(
        self, key: str, response: Response, *, start: int, end: int | None, pin: wire.Pin
    ) -> Body | None:
        """Make of an answer what was read; None where it is past the end and tells no size.

        Raises:
            StorageError: It is another answer than the one that was asked for.
        """
        headers = response.headers
        if response.status == 416:
            past = reading.size_past_the_end(headers, response.body, start=start)
            if past is None:
                return None
            return self._body(key, response, b"", past, None)
        try:
            size = reading.object_size(
                response.status, headers, response.num_bytes, start=start, end=end, pin=pin
            )
        except ValueError as exc:
            uri = self.uri(key)
            raise StorageError(
                f"could not read {uri}: {exc}", uri=uri, status=response.status
            ) from exc
        is_whole = response.num_bytes == size
        checksum = self._checksum_of_whole(key, response) if is_whole else None
        return self._body(key, response, response.body, size, checksum)

    def _checksum_of_whole(self, key: str, response: Response) -> int | None:
        """Return the crc32c of a whole object, which its answer told or vouches for in another way.

        Raises:
            TransientError: The bytes are others than those it vouches for.
        """
        headers = response.headers
        try:
            told = self._told_checksum(headers)
        except ValueError as exc:
            raise self._damaged(key, exc) from exc
        if told is not None or not self._verify:
            return told
        # Over TLS nothing changes bytes unseen, and an MD5 may cost more than the read.
        is_same = reading.is_same_content(
            headers, response.body, takes_md5=not self._sender.is_guarded
        )
        if is_same is None:
            return None
        if is_same:
            return crc32c_of(response.body)
        uri = self.uri(key)
        raise TransientError(
            f"could not read {uri}: the bytes that came do not match the checksum that S3 tells of "
            "them",
            uri=uri,
        )

    def _body(
        self, key: str, response: Response, data: Any, size: int, checksum: int | None
    ) -> Body:
        headers = response.headers
        checksum = 0 if checksum is None and not size else checksum
        return Body(
            data,
            size,
            wire.generation_of(wire.etag_of(headers), size),
            checksum,
            lambda: wire.meta_from_headers(
                headers, key=key, uri=self.uri(key), size=size, crc32c=checksum
            ),
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
        headers = wire.object_headers(content_type, metadata)
        headers += wire.precondition_headers(precondition)
        if self._has_checksums:
            headers += wire.hash_headers(crc32c)
        response = await self._sender.send(
            b"PUT",
            self._path(key),
            self._asked("write", key, is_conditional=bool(precondition)),
            headers=headers,
            body=data,
        )
        etag = wire.etag_of(response.headers)
        if not etag:
            raise self._foreign("write", key, response)
        try:
            checksum = self._told_checksum(response.headers)
        except ValueError as exc:
            raise self._damaged(key, exc) from exc
        size = memoryview(data).nbytes
        return self._stored(key, etag, size, checksum, content_type, metadata)

    async def delete(self, key: str, *, generation: str = "") -> None:
        pin = wire.parse_pin(generation)
        if not generation:
            # S3 answers alike whether there was something or not.
            await self.head(key)
        try:
            response = await self._sender.send(
                b"DELETE",
                self._path(key),
                self._asked("delete", key, is_conditional=bool(pin.etag)),
                query=wire.version_query(pin),
                headers=[(b"If-Match", pin.quoted)] if pin.etag else (),
            )
        except PreconditionFailedError:
            # Also the answer where nothing is there.
            await self.head(key)
            raise
        if response.num_bytes:
            raise self._foreign("delete", key, response)

    async def delete_page(self, sources: Sequence[Source]) -> Mapping[str, StorageError]:
        failed: dict[str, StorageError] = {}
        names: dict[str, str] = {}
        rows: list[tuple[str, wire.Pin]] = []
        for source in sources:
            name = self._name(source.key)
            if wire.can_be_xml(name):
                names[name] = source.key
                rows.append((name, wire.parse_pin(source.generation)))
            else:
                try:
                    await self.delete(source.key, generation=source.generation)
                except StorageError as exc:
                    failed[source.key] = exc
        if not rows:
            return failed
        body = wire.delete_body(rows)
        asked = self._asked("delete objects of", "")
        response = await self._sender.send(
            b"POST",
            b"",
            asked,
            query=b"delete=",
            headers=[(b"Content-Type", b"application/xml"), wire.digest_header(body)],
            body=body,
        )
        try:
            told = wire.parse_deletions(response.body)
        except ValueError as exc:
            uri = asked.uri()
            raise TransientError(
                f"could not delete objects of {uri}: the answer is none ({exc})",
                uri=uri,
                maybe_done=True,
            ) from exc
        for name, (code, words) in told.items():
            key = names.get(name, "")
            failed[key] = deletion_error(code, words, uri=self.uri(key))
        return failed

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
        start = start_offset and self._prefix + start_offset
        end = end_offset and self._prefix + end_offset
        most = page_size or self.capabilities.page_size
        ask = partial(self._ask_page, prefix, delimiter, most)
        page = self._sorted.pop(page_token, None)
        if page is None and not self._is_unsorted:
            page = await ask(start, page_token)
        if page is None or self._is_unsorted or not listing.is_sorted(page):
            self._is_unsorted = True
            page = await self._sorted_page(ask, page, page_token, 0 if delimiter else most)
        if page_token and page.next_token == page_token:
            raise self._wrong_page(prefix, "the next page is the same one again")
        listing.cut(page, start=start, end=end)
        try:
            objects = listing.listing_of(page, prefix=self._prefix, root=self.uri())
        except ValueError as exc:
            raise self._wrong_page(prefix, str(exc)) from exc
        skipped = len(self._prefix)
        return Page(
            objects=objects,
            prefixes=[name[skipped:] for name in page.prefixes],
            next_token=page.next_token,
        )

    async def _ask_page(
        self, prefix: str, delimiter: str, size: int, start: str, token: str
    ) -> listing.ListPage:
        response = await self._sender.send(
            b"GET",
            b"",
            self._asked("list", prefix),
            query=listing.list_query(
                prefix=self._prefix + prefix,
                start_after=listing.after(start),
                delimiter=delimiter,
                token=token,
                size=size,
            ),
        )
        if response.headers.get(b"server", b"").startswith(_UNSORTED_SERVERS):
            self._is_unsorted = True
        try:
            return listing.decode_page(response.body)
        except ValueError as exc:
            uri = self.uri(prefix)
            raise TransientError(
                f"could not list {uri}: the answer is not a listing ({exc})", uri=uri
            ) from exc

    async def _sorted_page(
        self, ask: Any, page: listing.ListPage | None, token: str, most: int
    ) -> listing.ListPage:
        """Return a page of a listing that the server does not sort: of all of it, sorted here.

        Args:
            ask: Asks for a page, by where it starts and its token.
            page: What has come of it: what is left of it in order, or a page of the server.
            token: Token of the page.
            most: Objects of a page; 0 for all.
        """
        if page is None or not token.startswith(listing.AFTER):
            page = await ask("", "")
            while page.next_token:
                other = await ask("", page.next_token)
                page.extend(other)
                page.next_token = "" if other.next_token == page.next_token else other.next_token
            listing.sort(page)
            if token.startswith(listing.AFTER):
                # What was left is forgotten, for want of room.
                listing.cut(page, start=token.removeprefix(listing.AFTER) + "\0", end="")
        if most and len(page.names) > most:
            rest = page.split(most)
            page.next_token = listing.AFTER + page.names[-1]
            self._sorted[page.next_token] = rest
            while len(self._sorted) > _MAX_SORTED:
                del self._sorted[next(iter(self._sorted))]
        return page

    def _wrong_page(self, prefix: str, why: str) -> StorageError:
        uri = self.uri(prefix)
        return StorageError(
            f"could not list {uri}: the page is not what was asked for, {why}", uri=uri
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
            f"could not compose {uri}: S3 does not concatenate objects; read the sources and write "
            "their bytes with open_writer, or keep them as they are",
            uri=uri,
        )

    async def copy(self, source: Source, key: str, *, precondition: Precondition) -> ObjectMeta:
        original = await self.head(source.key, generation=source.generation)
        await self._check(key, precondition)
        pin = wire.parse_pin(source.generation or original.generation)
        source_headers = wire.copy_headers(self._bucket, self._name(source.key), pin)
        if original.size > wire.MAX_COPY_BYTES:
            return await copy_by_parts(
                self, original, key, source_headers, precondition=precondition
            )
        asked = self._asked("copy to", key, is_conditional=bool(precondition))
        try:
            response = await self._sender.send(
                b"PUT",
                self._path(key),
                asked,
                headers=source_headers + wire.precondition_headers(precondition),
                head_seconds=_COMPLETE_SECONDS,
            )
        except PreconditionFailedError:
            # Of the source, or of what is there.
            await self.head(source.key, generation=pin_text(pin, original))
            raise
        fields = self._told(response, "ETag", asked)
        etag = fields["ETag"].strip('"')
        checksum = self._told_crc32c(fields, key)
        return replace(
            original,
            key=key,
            uri=self.uri(key),
            etag=etag,
            generation=wire.generation_of(etag, original.size),
            crc32c=original.crc32c if checksum is None else checksum,
            updated=None,
            storage_class="",
        )

    async def _check(self, key: str, precondition: Precondition) -> None:
        """Look whether a condition holds, for servers that do not know it where it is sent.

        Raises:
            PreconditionFailedError: It does not.
        """
        if not precondition:
            return
        found = ""
        try:
            found = (await self.head(key)).generation
        except NotFoundError:
            if precondition.if_absent:
                return
        expected = precondition.if_generation_match
        if precondition.if_absent or not wire.is_same_generation(expected or "", found):
            uri = self.uri(key)
            raise PreconditionFailedError(
                f"could not write {uri}: it is not what was expected there", uri=uri, status=412
            )

    async def initiate_upload(
        self, key: str, *, content_type: str = "", metadata: Mapping[str, str] | None = None
    ) -> str:
        asked = self._asked("begin an upload of", key)
        response = await self._sender.send(
            b"POST",
            self._path(key),
            asked,
            query=b"uploads=",
            headers=[
                *wire.object_headers(content_type, metadata),
                *wire.upload_headers(has_checksums=self._has_checksums),
            ],
            body=b"",
        )
        upload_id = self._told(response, "UploadId", asked)["UploadId"]
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
        action = f"write part {number} of"
        response = await self._sender.send(
            b"PUT",
            self._path(key),
            self._asked(action, key),
            query=wire.part_query(upload_id, number),
            headers=wire.hash_headers(crc32c) if self._has_checksums else (),
            body=pieces,
        )
        etag = (response.headers.get(b"etag") or b"").decode("latin-1")
        if not etag:
            raise self._foreign(action, key, response)
        try:
            told = self._told_checksum(response.headers)
        except ValueError as exc:
            raise self._damaged(key, exc) from exc
        size = sum(memoryview(piece).nbytes for piece in pieces)
        # What was compared is what it holds, whether it says so or not.
        return UploadedPart(number, etag, size, crc32c if told is None else told)

    async def put_part_copy(
        self, key: str, upload_id: str, number: int, headers: Sequence[tuple[bytes, bytes]]
    ) -> str:
        """Have one part copied from an object, and return its entity tag."""
        asked = self._asked(f"copy part {number} of", key)
        response = await self._sender.send(
            b"PUT",
            self._path(key),
            asked,
            query=wire.part_query(upload_id, number),
            headers=headers,
            head_seconds=_COMPLETE_SECONDS,
        )
        return self._told(response, "ETag", asked)["ETag"]

    async def complete_upload(
        self,
        key: str,
        upload_id: str,
        parts: Sequence[UploadedPart],
        *,
        precondition: Precondition,
    ) -> ObjectMeta:
        await self._check(key, precondition)
        size = sum(part.size for part in parts)
        headers = [(b"Content-Type", b"application/xml")]
        headers += wire.precondition_headers(precondition)
        whole = _combined(parts) if self._has_checksums else None
        if whole is not None:
            headers += [*wire.hash_headers(whole), (b"x-amz-checksum-type", b"FULL_OBJECT")]
        asked = self._asked(
            "complete the upload of",
            key,
            is_conditional=bool(precondition),
            is_completion=True,
        )
        response = await self._sender.send(
            b"POST",
            self._path(key),
            asked,
            query=wire.upload_query(upload_id),
            headers=headers,
            body=multipart.complete_body(parts),
            head_seconds=_COMPLETE_SECONDS,
        )
        fields = self._told(response, "ETag", asked)
        content_type, metadata = self._begun.pop(upload_id, ("", {}))
        told = self._told_crc32c(fields, key)
        etag = fields["ETag"].strip('"')
        return self._stored(key, etag, size, told, content_type, metadata)

    async def abort_upload(self, key: str, upload_id: str) -> None:
        response = await self._sender.send(
            b"DELETE",
            self._path(key),
            self._asked("abort the upload of", key),
            query=wire.upload_query(upload_id),
            accept=404,
        )
        if response.num_bytes and response.status != 404:
            raise self._foreign("abort the upload of", key, response)
        self._begun.pop(upload_id, None)

    async def list_uploads(self, prefix: str) -> Sequence[OpenUpload]:
        found: list[OpenUpload] = []
        key_marker = id_marker = ""
        while True:
            target = multipart.list_uploads_target(
                b"", prefix=self._prefix + prefix, key_marker=key_marker, id_marker=id_marker
            )
            response = await self._sender.send(
                b"GET",
                b"",
                self._asked("list the uploads of", prefix),
                query=wire.canonical_query(target.partition(b"?")[2]),
            )
            try:
                uploads, key_marker, id_marker = multipart.parse_uploads(response.body)
            except (ValueError, KeyError) as exc:
                uri = self.uri(prefix)
                raise TransientError(
                    f"could not list the uploads of {uri}: {exc}", uri=uri
                ) from exc
            skipped, whole = len(self._prefix), self._prefix + prefix
            found += [
                replace(upload, key=upload.key[skipped:])
                for upload in uploads
                if upload.key.startswith(whole)
            ]
            if not key_marker:
                return sorted(found, key=lambda upload: (upload.key, upload.upload_id))

    async def aclose(self) -> None:
        await self._sender.aclose()

    def _asked(self, action: str, key: str, **how: bool) -> Asked:
        return Asked(action, partial(self.uri, key), **how)

    def _name(self, key: str) -> str:
        """Return the object's whole name.

        Raises:
            ValueError: No object can have it.
        """
        name = self._prefix + key
        check_name(name)
        return name

    def _path(self, key: str) -> bytes:
        return wire.quote_name(self._prefix + key)

    def _told(self, response: Response, name: str, asked: Asked) -> Mapping[str, str]:
        """Return the fields of an answer that has one of this name.

        Raises:
            StorageError: It is an error that the answer tells with status 200.
        """
        try:
            fields = multipart.parse_fields(response.body)
        except ValueError:
            fields = {}
        if fields.get(name):
            return fields
        raise error_in_success(fields, action=asked.action, uri=asked.uri())

    def _told_checksum(self, headers: Mapping[bytes, bytes]) -> int | None:
        """Return the crc32c that an answer tells of a whole object, where the server is believed.

        Raises:
            ValueError: It is damaged.
        """
        return reading.told_crc32c(headers) if self._has_checksums else None

    def _told_crc32c(self, fields: Mapping[str, str], key: str) -> int | None:
        try:
            return wire.full_crc32c(fields.get("ChecksumCRC32C"), fields.get("ChecksumType"))
        except ValueError as exc:
            raise self._damaged(key, exc) from exc

    def _stored(
        self,
        key: str,
        etag: str,
        size: int,
        checksum: int | None,
        content_type: str,
        metadata: Mapping[str, str] | None,
    ) -> ObjectMeta:
        return ObjectMeta(
            key=key,
            uri=self.uri(key),
            size=size,
            etag=etag,
            generation=wire.generation_of(etag, size),
            crc32c=checksum if self._has_checksums else None,
            content_type=content_type or wire.DEFAULT_TYPE,
            metadata=dict(metadata or {}),
        )

    def _damaged(self, key: str, exc: ValueError) -> TransientError:
        uri = self.uri(key)
        return TransientError(
            f"could not read what the service told of {uri}: {exc}", uri=uri, maybe_done=True
        )

    def _foreign(self, action: str, key: str, response: Response) -> StorageError:
        """Return the error for a success that another server than one of S3 tells."""
        uri = self.uri(key)
        return StorageError(
            f"could not {action} {uri}: the answer, HTTP {response.status}, is not one of S3; "
            "check the endpoint, and what stands between here and there",
            uri=uri,
            status=response.status,
        )


def pin_text(pin: wire.Pin, meta: ObjectMeta) -> str:
    """Return the generation that a copy was pinned to."""
    return f"version:{pin.version}" if pin.version else meta.generation


def _combined(parts: Sequence[UploadedPart]) -> int | None:
    """Return the crc32c of parts one after the other; None where one has none."""
    whole = 0
    for part in parts:
        if part.crc32c is None:
            return None
        whole = combine_crc32c(whole, part.crc32c, part.size)
    return whole

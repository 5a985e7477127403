"""What the services on the data plane have in common: reads, parts, and answers in doubt.

    get ------> read_request -> Sender.send --> read_answer -> Body
    begin_get -> (the service) -> Sender.begin ~> end_get -> read_answer -> Body

A service says how its requests are built and what its answers tell. Which answers are errors, and
what is sent again, is in `sender`.
"""

from __future__ import annotations

from abc import abstractmethod
from typing import TYPE_CHECKING, Any, ClassVar, TypeAlias

from aioflux._http import ConnectionLostError, ProtocolError
from aioflux._services.base import Body, Page, Service, UploadedPart
from aioflux._services.sender import READ, Terms
from aioflux.errors import StorageError, TransientError, UnsupportedError

if TYPE_CHECKING:
    from collections.abc import Awaitable, Mapping, Sequence

    from aioflux._http import Response
    from aioflux._services.base import Exchange, Into, Precondition, Source
    from aioflux._services.lister import Lister
    from aioflux._services.sender import Sender
    from aioflux._values.meta import ObjectMeta

__all__ = ["COMPLETE_SECONDS", "DELETE_SECONDS", "HTTPService", "ReadRequest", "is_too_long"]

COMPLETE_SECONDS = 600.0
"""Completing an upload of many parts, or copying an object, can take minutes
(cloud.google.com/storage/docs/xml-api/post-object-complete)."""
DELETE_SECONDS = 120.0
"""One request that deletes many objects begins its answer when all are deleted: 256 took an
emulator of Azure 10 s."""


ReadRequest: TypeAlias = "tuple[bytes, Sequence[tuple[bytes, bytes]], bool, bool]"
"""The request of one read: path and query, its own headers, whether a range is asked for, which may
turn out to be past the end, and whether all is asked for where a range is wanted, in the hope that
there is not more."""


def is_too_long(error: BaseException | None) -> bool:
    """Return whether an answer with a valid head was given up, as where its body is too long."""
    return isinstance(error, ProtocolError) and error.head is not None


class HTTPService(Service):
    """One bucket and prefix of a service that is asked over HTTP."""

    _service_name: ClassVar[str]
    """What it is called in errors."""
    _no_compose: ClassVar[str] = ""
    """What to do instead of a compose, where there is none."""
    _sender: Sender
    _lister: Lister[Any]
    """Reads listings, where the service does not list as the contract wants it."""

    def __init__(self, *, root_uri: str, prefix: str) -> None:
        super().__init__(root_uri=root_uri, prefix=prefix)
        # Content type and metadata of the uploads under way, which no later answer repeats.
        self._begun: dict[str, tuple[str, Mapping[str, str]]] = {}

    # --- reads ---------------------------------------------------------------------------

    async def get(
        self,
        key: str,
        *,
        generation: str = "",
        start: int = 0,
        end: int | None = None,
        into: Into | None = None,
    ) -> Body:
        target, headers, is_range, is_guess = self._read_request(key, generation, start, end)
        try:
            response = await self._sender.send(
                b"GET",
                target,
                "read",
                key,
                headers=headers,
                into=bytes if into is None else into,
                # Of a service that ignores the range, no more than was asked for is taken.
                max_body_bytes=None if end is None else end - start,
                accept=416 if is_range else 0,
                terms=Terms(is_read=True, generation=generation) if generation else READ,
            )
        except StorageError as exc:
            if not (is_guess and is_too_long(exc.__cause__)):
                raise
            self._guessed_wrong()
            return await self.get(key, start=start, end=end, into=into)
        try:
            body = self._read_answer(key, response, start, end, generation)
        except ValueError as exc:
            raise self._unasked(key, response, exc) from exc
        if body is None:
            return await self._look_again(key, generation, start)
        check = self._check_whole(key, response, body, start)
        if check is not None:
            await check
        return body

    def end_get(
        self, key: str, exchange: Exchange, answer: Response, *, generation: str, end: int
    ) -> Body | None:
        signer = self._sender.end(exchange)
        if 200 <= answer.status < 300 or answer.status == 416:
            try:
                return self._read_answer(key, answer, 0, end, generation)
            except ValueError as exc:
                raise self._unasked(key, answer, exc) from exc
        # A 401 is told all the same: who reads asks again then, and it counts as an attempt.
        if self._sender.learn(answer, signer) and answer.status != 401:
            return None
        raise self._sender.refused(answer, "read", key, Terms(is_read=True, generation=generation))

    def fail_get(self, key: str, exchange: Exchange, error: Exception) -> StorageError | None:
        self._sender.end(exchange)
        if isinstance(error, ConnectionLostError) and exchange.is_stale:
            return None
        return self._sender.failed(error, "read", key)

    def drop_get(self, exchange: Exchange) -> None:
        exchange.abort()
        self._sender.end(exchange)

    @abstractmethod
    def _read_request(self, key: str, generation: str, start: int, end: int | None) -> ReadRequest:
        """Build the request that reads the bytes `[start, end)` of an object.

        Raises:
            ValueError: No object can have this key, or this generation.
        """

    @abstractmethod
    def _read_answer(
        self, key: str, response: Response, start: int, end: int | None, generation: str
    ) -> Body | None:
        """Make of an answer, 2xx or 416, what was read; None for a 416 that tells no size.

        Raises:
            ValueError: It is another answer than the one that was asked for.
        """

    def _guessed_wrong(self) -> None:
        """Take note that there was more than was hoped."""

    def _check_whole(
        self, key: str, response: Response, body: Body, start: int
    ) -> Awaitable[None] | None:
        """Return what compares bytes with what their answer tells of them, where that is left."""
        return None

    def _unasked(self, key: str, response: Response, exc: ValueError) -> TransientError:
        """Return the error for another answer to a read than the one that was asked for."""
        response.discard_connection()
        uri = self.uri(key)
        return TransientError(
            f"could not read {uri}: {exc}", uri=uri, status=response.status, is_malformed=True
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

    # --- parts ---------------------------------------------------------------------------

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
            self._part_target(key, upload_id, number),
            action,
            key,
            headers=() if crc32c is None else await self._part_headers(pieces, crc32c),
            body=pieces,
        )
        etag = self._part_etag(response, upload_id, number)
        if not etag:
            raise self._foreign(action, key, response)
        size = sum(memoryview(piece).nbytes for piece in pieces)
        try:
            held = self._part_crc32c(response, crc32c)
        except ValueError as exc:
            raise self._damaged(key, exc) from exc
        return UploadedPart(number, etag, size, held)

    @abstractmethod
    def _part_target(self, key: str, upload_id: str, number: int) -> bytes:
        """Return path and query of one part."""

    @abstractmethod
    async def _part_headers(
        self, pieces: Sequence[bytes | memoryview], crc32c: int
    ) -> Sequence[tuple[bytes, bytes]]:
        """Write the checksum that the service compares with what it receives."""

    @abstractmethod
    def _part_etag(self, response: Response, upload_id: str, number: int) -> str:
        """Return what completes the upload; empty where the answer is none of the service."""

    def _part_crc32c(self, response: Response, crc32c: int | None) -> int | None:
        """Return the crc32c of what the service holds, where that is known.

        Raises:
            ValueError: The answer tells one that is damaged.
        """
        return None

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
        """See base class. Services that cannot do it tell what to do instead."""
        uri = self.uri(key)
        raise UnsupportedError(f"could not compose {uri}: {self._no_compose}", uri=uri)

    # --- listings and the rest --------------------

    def _damaged(self, key: str, exc: ValueError) -> TransientError:
        """Return the error for an answer that tells nonsense: it is asked for again."""
        uri = self.uri(key)
        return TransientError(
            f"could not read what the service told of {uri}: {exc}",
            uri=uri,
            maybe_done=True,
            is_malformed=True,
        )

    def _foreign(self, action: str, key: str, response: Response) -> TransientError:
        """Return the error for a success that another server than the service's tells."""
        response.discard_connection()
        uri = self.uri(key)
        return TransientError(
            f"could not {action} {uri}: the answer, HTTP {response.status}, is not one of "
            f"{self._service_name}; check the endpoint, and what stands between here and there",
            uri=uri,
            status=response.status,
            maybe_done=True,
            is_malformed=True,
        )

    async def aclose(self) -> None:
        await self._sender.aclose()

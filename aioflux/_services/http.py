"""Reads and parts, as the services on the data plane share them.

    get -------> _encode_read -> Sender.send ------------------> _decode_read -> Body
    begin_get -> _encode_read -> Pool.start_get ----~> end_get -> _decode_read -> Body

A service encodes requests and decodes responses. Errors, and requests that are sent again, are in
`sender`.
"""

from __future__ import annotations

from abc import abstractmethod
from typing import TYPE_CHECKING, ClassVar, TypeAlias

from aioflux._http import ConnectionLostError, ProtocolError
from aioflux._services.base import Body, Service, UploadedPart
from aioflux._services.sender import READ, RequestKind, as_read
from aioflux._services.status import malformed_response
from aioflux.errors import StorageError, TransientError, UnsupportedError

if TYPE_CHECKING:
    from collections.abc import Awaitable, Sequence

    from aioflux._http import Response, ResponseFuture
    from aioflux._services.base import (
        Exchange,
        Into,
        ReadRequest,
        Source,
        WriteRequest,
    )
    from aioflux._services.sender import Sender
    from aioflux._values.meta import ObjectMeta

__all__ = ["COMPLETE_SECONDS", "DELETE_SECONDS", "EncodedRead", "HTTPService", "is_too_long"]

COMPLETE_SECONDS = 600.0
"""Completing an upload of many parts, or copying an object, can take minutes
(cloud.google.com/storage/docs/xml-api/post-object-complete)."""
DELETE_SECONDS = 120.0
"""The response to one request that deletes many objects begins when all are deleted: 256 took an
emulator of Azure 10 s."""


EncodedRead: TypeAlias = "tuple[bytes, Sequence[tuple[bytes, bytes]], bool, bool]"
"""A read as a service encodes it: path and query, the headers of this request alone, whether they
have a Range, which may turn out to be past the end of the object, and whether it is a guess: it
reads all of the object for a range that is expected to hold all of it. A bare tuple, since every
read makes one."""


def is_too_long(error: BaseException | None) -> bool:
    """Return whether a response was abandoned after a valid head, as when its body is too long."""
    return isinstance(error, ProtocolError) and error.head is not None


class HTTPService(Service):
    """One bucket and prefix of a service with an HTTP API."""

    _service_name: ClassVar[str]
    """Name of the service, for errors."""
    _no_compose: ClassVar[str] = ""
    """Advice in the error of a compose, if the service has none."""
    _sender: Sender

    # --- reads ---------------------------------------------------------------------------

    async def get(self, request: ReadRequest, *, into: Into | None = None) -> Body:
        key, generation, end = request.key, request.generation, request.end
        target, headers, has_range, is_guess = self._encode_read(request)
        try:
            response = await self._sender.send(
                b"GET",
                target,
                "read",
                key,
                headers=headers,
                into=bytes if into is None else into,
                # A service that ignores the range is not read further.
                max_body_bytes=None if end is None else end - request.start,
                accept=416 if has_range else 0,
                kind=RequestKind(is_read=True, generation=generation) if generation else READ,
            )
        except StorageError as exc:
            if not (is_guess and is_too_long(exc.__cause__)):
                raise
            self._note_wrong_guess()
            return await self.get(request, into=into)
        try:
            body = self._decode_read(request, response)
        except ValueError as exc:
            raise self._unexpected_response(key, response, exc) from exc
        if body is None:
            return await self._resolve_unsatisfied(request)
        check = self._verify_body(request, response, body)
        if check is not None:
            await check
        return body

    def begin_get(self, request: ReadRequest, waiter: ResponseFuture) -> Exchange | None:
        target, headers, _, is_guess = self._encode_read(request)
        sender = self._sender
        authorized = sender.authorize_nowait(target, headers)
        pool = sender.pool
        if authorized is None or pool is None:
            return None
        origin, whole, signed, fixed, credentials = authorized
        connection = pool.start_get(origin, whole, signed, waiter, bytes, request.end, fixed)
        return None if connection is None else (connection, credentials, is_guess)

    def end_get(self, request: ReadRequest, exchange: Exchange, response: Response) -> Body | None:
        connection, credentials, _ = exchange
        connection.release()
        if 200 <= response.status < 300 or response.status == 416:
            try:
                return self._decode_read(request, response)
            except ValueError as exc:
                raise self._unexpected_response(request.key, response, exc) from exc
        # A 401 is raised, too: the caller sends the request again, which counts as an attempt.
        if self._sender.should_resend(response, credentials) and response.status != 401:
            return None
        kind = RequestKind(is_read=True, generation=request.generation)
        raise as_read(self._sender.response_error(response, "read", request.key, kind))

    def fail_get(
        self, request: ReadRequest, exchange: Exchange, error: Exception
    ) -> StorageError | None:
        connection, _, is_guess = exchange
        connection.release()
        if is_guess and is_too_long(error):
            # `get` reads a range then.
            self._note_wrong_guess()
            return None
        if isinstance(error, ConnectionLostError) and connection.is_stale:
            return None
        return as_read(self._sender.transport_error(error, "read", request.key))

    def abort_get(self, exchange: Exchange) -> None:
        connection = exchange[0]
        connection.abort()
        connection.release()

    @abstractmethod
    def _encode_read(self, request: ReadRequest) -> EncodedRead:
        """Return a read as it is sent.

        Raises:
            ValueError: No object can have this key, or this generation.
        """

    @abstractmethod
    def _decode_read(self, request: ReadRequest, response: Response) -> Body | None:
        """Return what a response, 2xx or 416, holds; None for a 416 without the object's size.

        Raises:
            ValueError: It is not the response to this request.
        """

    def _note_wrong_guess(self) -> None:
        """Record that a guess (`EncodedRead`) was wrong."""

    def _verify_body(
        self, request: ReadRequest, response: Response, body: Body
    ) -> Awaitable[None] | None:
        """Return the verification of the bytes, if some of it takes long."""
        return None

    def _unexpected_response(self, key: str, response: Response, exc: ValueError) -> TransientError:
        """Return the error for a response that is not that of this read."""
        response.discard_connection()
        return malformed_response(
            "read", self.uri(key), exc, status=response.status, maybe_done=False
        )

    async def _resolve_unsatisfied(self, request: ReadRequest) -> Body:
        """Return the body of a read past the end, after a 416 without the object's size."""
        meta = await self.head(request.key, generation=request.generation)
        if meta.size > request.start:
            raise TransientError(
                f"could not read {meta.uri}: the service says that byte {request.start} is past "
                f"its end, and that it has {meta.size} bytes",
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
            raise self._not_from_service(action, key, response)
        size = sum(memoryview(piece).nbytes for piece in pieces)
        try:
            held = self._part_crc32c(response, crc32c)
        except ValueError as exc:
            raise self._malformed_response(key, exc) from exc
        return UploadedPart(number, etag, size, held)

    @abstractmethod
    def _part_target(self, key: str, upload_id: str, number: int) -> bytes:
        """Return path and query of the request for one part."""

    @abstractmethod
    async def _part_headers(
        self, pieces: Sequence[bytes | memoryview], crc32c: int
    ) -> Sequence[tuple[bytes, bytes]]:
        """Return the headers by which the service checks the bytes that it receives."""

    @abstractmethod
    def _part_etag(self, response: Response, upload_id: str, number: int) -> str:
        """Return the ETag that completes the upload; empty if the service did not respond."""

    def _part_crc32c(self, response: Response, crc32c: int | None) -> int | None:
        """Return the crc32c of the part that the service holds, if it is known.

        Raises:
            ValueError: It is malformed.
        """
        return None

    async def compose(self, request: WriteRequest, sources: Sequence[Source]) -> ObjectMeta:
        """See base class. The error of a service without it says what to do instead."""
        uri = self.uri(request.key)
        raise UnsupportedError(f"could not compose {uri}: {self._no_compose}", uri=uri)

    # --- errors --------------------------------------------------------------------------

    def _malformed_response(self, key: str, exc: ValueError) -> TransientError:
        """Return the error for a response with a malformed field; another attempt is made."""
        return malformed_response("parse the response about", self.uri(key), exc)

    def _not_from_service(self, action: str, key: str, response: Response) -> TransientError:
        """Return the error for a success that is not a response of the service."""
        response.discard_connection()
        why = (
            f"the response, HTTP {response.status}, is not from {self._service_name}; check the "
            "endpoint, and any proxy in between"
        )
        return malformed_response(action, self.uri(key), why, status=response.status)

    async def aclose(self) -> None:
        await self._sender.aclose()

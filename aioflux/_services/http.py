"""Base class of the services with an HTTP API: reads, and parts of uploads.

    get -------> _encode_read -> Sender.send ------------------> _decode_read -> Body
    begin_get -> _encode_read -> Pool.start_get ~~~~~> end_get -> _decode_read -> Body

    ~~~>  later: the pool delivers the response to a future, and the caller then calls `end_get`

Subclasses encode requests and decode responses. `sender` maps error responses. It sends a request
again only with new credentials, a new region or a corrected clock; all other retries are in
`_transfer`.
"""

from __future__ import annotations

import logging
from abc import abstractmethod
from collections.abc import Awaitable, Sequence
from typing import TYPE_CHECKING, ClassVar, TypeAlias

from aioflux._http import ConnectionLostError, ProtocolError
from aioflux._services.base import Body, Service, UploadedPart
from aioflux._services.responses import READ, RequestKind, malformed_response
from aioflux._services.sender import as_read_error
from aioflux.errors import StorageError, TransientError, UnsupportedError

if TYPE_CHECKING:
    from aioflux._http import Response, ResponseFuture
    from aioflux._services.base import (
        Exchange,
        Into,
        PartRequest,
        ReadRequest,
        Source,
        WriteRequest,
    )
    from aioflux._services.sender import Sender
    from aioflux._values.meta import ObjectMeta

_log = logging.getLogger("aioflux.requests")

COMPLETE_SECONDS = 600.0
"""Maximum time until the response to a request that completes an upload or copies an object. Both
may take minutes (cloud.google.com/storage/docs/xml-api/post-object-complete)."""
DELETE_SECONDS = 120.0
"""Maximum time until the response to a request that deletes many objects. The service responds
after the last delete: an emulator of Azure took 10 s for 256 objects."""


EncodedRead: TypeAlias = "tuple[bytes, Sequence[tuple[bytes, bytes]], bool, bool]"
"""An encoded request of a read: path and query; its own headers; whether they have a Range, so that
the response may be 416; and whether the request is a guess: it has no Range, because the object
probably ends within the range. A plain tuple, since each read creates one."""


def is_body_error(error: BaseException | None) -> bool:
    """Return whether an error came after the head of a response, as for a body that is too long."""
    return isinstance(error, ProtocolError) and error.head is not None


class HTTPService(Service):
    """One bucket and prefix of a service with an HTTP API."""

    _service_name: ClassVar[str]
    """Name of the service, for error messages."""
    _compose_advice: ClassVar[str] = ""
    """Text of the error of `compose`, for a service that cannot compose."""
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
                # If the service ignores the range, do not receive more than the range.
                max_body_bytes=None if end is None else end - request.start,
                accept=416 if has_range else 0,
                kind=RequestKind(is_read=True, generation=generation) if generation else READ,
            )
        except StorageError as exc:
            if not (is_guess and is_body_error(exc.__cause__)):
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
        if _log.isEnabledFor(logging.DEBUG):
            return None  # the caller awaits `get`, whose request `Sender.send` logs
        target, headers, _, is_guess = self._encode_read(request)
        sender = self._sender
        authorized = sender.authorize_nowait(target, headers)
        pool = sender.pool
        if authorized is None or pool is None:
            return None
        origin, full_target, signed_headers, fixed, credentials = authorized
        connection = pool.start_get(
            origin, full_target, signed_headers, waiter, bytes, request.end, fixed
        )
        return None if connection is None else (connection, credentials, is_guess)

    def end_get(self, request: ReadRequest, exchange: Exchange, response: Response) -> Body | None:
        connection, credentials, _ = exchange
        if connection.slow_request == connection.num_requests:
            self._sender.note_slow(request.key, connection)
        connection.release()
        if 200 <= response.status < 300 or response.status == 416:
            try:
                return self._decode_read(request, response)
            except ValueError as exc:
                raise self._unexpected_response(request.key, response, exc) from exc
        # After a 401, `should_resend` invalidates the token, and the error is raised: the caller
        # sends the request again as another attempt.
        if self._sender.should_resend(response, credentials) and response.status != 401:
            return None
        kind = RequestKind(is_read=True, generation=request.generation)
        raise as_read_error(self._sender.response_error(response, "read", request.key, kind))

    def fail_get(
        self, request: ReadRequest, exchange: Exchange, error: Exception
    ) -> StorageError | None:
        connection, _, is_guess = exchange
        connection.release()
        if is_guess and is_body_error(error):
            # The caller awaits `get`, which sends a Range after a wrong guess.
            self._note_wrong_guess()
            return None
        if isinstance(error, ConnectionLostError) and connection.is_stale:
            return None
        return as_read_error(self._sender.transport_error(error, "read", request.key))

    def abort_get(self, exchange: Exchange) -> None:
        connection = exchange[0]
        connection.abort()
        connection.release()

    @abstractmethod
    def _encode_read(self, request: ReadRequest) -> EncodedRead:
        """Encode the request of a read.

        Raises:
            ValueError: No object can have this key, or this generation.
        """

    @abstractmethod
    def _decode_read(self, request: ReadRequest, response: Response) -> Body | None:
        """Decode a response with status 2xx or 416; None for a 416 without the object's size.

        Raises:
            ValueError: The response does not match the request.
        """

    def _note_wrong_guess(self) -> None:
        """Record that an object was larger than the range of a guess (see `EncodedRead`)."""

    def _verify_body(
        self, request: ReadRequest, response: Response, body: Body
    ) -> Awaitable[None] | None:
        """Return an awaitable that verifies the bytes; None if there is nothing to verify."""
        return None

    def _unexpected_response(self, key: str, response: Response, exc: ValueError) -> TransientError:
        """Return the error for a response that does not match the request of a read."""
        response.discard_connection()
        error = malformed_response(
            "read", self.uri(key), exc, status=response.status, maybe_done=False
        )
        error.num_bytes_received = response.num_bytes  # none of which is kept
        return error

    async def _resolve_unsatisfied(self, request: ReadRequest) -> Body:
        """Return the empty body of a read past the end, after a 416 without the object's size."""
        meta = await self.head(request.key, generation=request.generation)
        if meta.size > request.start:
            raise TransientError(
                f"could not read {meta.uri}: the service returned HTTP 416 for byte "
                f"{request.start}, but the object has {meta.size} bytes",
                uri=meta.uri,
            )
        return Body(b"", meta.size, meta.generation, meta.crc32c, lambda: meta)

    # --- parts ---------------------------------------------------------------------------

    async def put_part(self, request: PartRequest) -> UploadedPart:
        key, number, pieces = request.key, request.number, request.pieces
        action = f"write part {number} of"
        response = await self._sender.send(
            b"PUT",
            self._part_target(request),
            action,
            key,
            headers=() if request.crc32c is None else await self._part_headers(request),
            body=pieces,
        )
        etag = self._part_etag(response, request)
        if not etag:
            raise self._not_from_service(action, key, response)
        size = sum(map(len, pieces))
        try:
            stored_crc32c = self._part_crc32c(response, request)
        except ValueError as exc:
            raise self._malformed_response(key, exc) from exc
        return UploadedPart(number, etag, size, stored_crc32c)

    @abstractmethod
    def _part_target(self, request: PartRequest) -> bytes:
        """Return path and query of the request for one part."""

    @abstractmethod
    async def _part_headers(self, request: PartRequest) -> Sequence[tuple[bytes, bytes]]:
        """Return headers with a checksum of the part, which the service compares."""

    @abstractmethod
    def _part_etag(self, response: Response, request: PartRequest) -> str:
        """Return the ETag of the part; empty if the response is not from the service."""

    def _part_crc32c(self, response: Response, request: PartRequest) -> int | None:
        """Return the crc32c of the part as the service stored it; None if unknown.

        Raises:
            ValueError: The checksum in the response is malformed.
        """
        return None

    async def compose(self, request: WriteRequest, sources: Sequence[Source]) -> ObjectMeta:
        """Raise an error that says what to do instead. A service that can compose overrides it."""
        uri = self.uri(request.key)
        raise UnsupportedError(f"could not compose {uri}: {self._compose_advice}", uri=uri)

    # --- errors --------------------------------------------------------------------------

    def _malformed_response(self, key: str, exc: ValueError) -> TransientError:
        """Return the error for a response with a malformed field; the request is retried."""
        return malformed_response("parse the response for", self.uri(key), exc)

    def _not_from_service(self, action: str, key: str, response: Response) -> TransientError:
        """Return the error for a success response that the service itself cannot have sent."""
        response.discard_connection()
        why = (
            f"the response, HTTP {response.status}, is not from {self._service_name}; check the "
            "endpoint, and any proxy in between"
        )
        return malformed_response(action, self.uri(key), why, status=response.status)

    @property
    def sender(self) -> Sender:
        """The sender, to examine the server and the credentials."""
        return self._sender

    async def aclose(self) -> None:
        await self._sender.aclose()

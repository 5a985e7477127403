"""Ambiguous writes: after a lost response, the object shows whether the write was done."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, TypeAlias, TypeVar

from aioflux._services.base import ReadRequest
from aioflux._transfer.retry import with_retry
from aioflux._transfer.session import THROTTLED
from aioflux._values.checksums import crc32c
from aioflux.errors import (
    AlreadyExistsError,
    ChecksumError,
    NotFoundError,
    PreconditionFailedError,
    StorageError,
    TransientError,
)

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Mapping

    from aioflux._services.base import WriteRequest
    from aioflux._transfer.session import Session
    from aioflux._values.meta import ObjectMeta

__all__ = [
    "AmbiguousWrite",
    "ResendLimit",
    "checksum_of",
    "find_written",
    "has_attributes",
    "send_write",
]

T = TypeVar("T")
Buffer: TypeAlias = bytes | bytearray | memoryview

_FIND_SECONDS = 10.0
"""Time to look for the object after the deadline of the request itself."""

_MAX_SENDS = 3
"""Attempts to send bytes that the service reports as damaged in transit."""


class AmbiguousWrite:
    """The attempts of one request that may have been carried out without a response.

    Attributes:
        maybe_done: There is such an attempt.
        needs_check: There is one that was not throttled. A throttled one (429, 503) is seldom
            carried out, and a check would add to the load: its object is looked for only if a
            later attempt is rejected, which suggests that the write was carried out.
    """

    __slots__ = ("maybe_done", "needs_check")

    def __init__(self) -> None:
        self.maybe_done = False
        self.needs_check = False

    async def watch(self, request: Awaitable[T]) -> T:
        """Await one attempt, and record its failure."""
        try:
            return await request
        except (TransientError, asyncio.CancelledError) as exc:
            self.add(exc)
            raise

    def add(self, error: TransientError | asyncio.CancelledError) -> None:
        """Record the failure of an attempt."""
        # A cancelled request, also one cancelled by a deadline, may have been carried out.
        is_throttled = False
        if isinstance(error, TransientError):
            if not error.maybe_done:
                return
            is_throttled = error.status in THROTTLED
        self.maybe_done = True
        self.needs_check = self.needs_check or not is_throttled


class ResendLimit:
    """The limit of attempts whose bytes arrived damaged."""

    def __init__(self) -> None:
        self._num_wrong = 0

    def next_error(self, error: ChecksumError) -> StorageError:
        """Return an error that is retried, or `error` itself once the limit is reached."""
        self._num_wrong += 1
        if self._num_wrong >= _MAX_SENDS:
            return error
        return TransientError(error.message, uri=error.uri, status=error.status)


async def send_write(
    session: Session,
    request: WriteRequest,
    send: Callable[[], Awaitable[ObjectMeta]],
    find: Callable[[], Awaitable[ObjectMeta | None]],
    *,
    ambiguous: AmbiguousWrite | None = None,
    resends: ResendLimit | None = None,
    num_bytes: int = 0,
    find_first: bool = False,
    find_if_throttled: bool = False,
) -> ObjectMeta:
    """Send a write until it is carried out; after an ambiguous attempt find its object.

    Args:
        session: The session.
        request: The write.
        send: Sends it once.
        find: Returns the object that the write should have made, if it exists.
        ambiguous: Collects the failures of the attempts.
        resends: Limits the attempts whose bytes arrived damaged.
        num_bytes: Bytes of its body.
        find_first: Look for the object before another attempt, which would cost more.
        find_if_throttled: Look for it even after throttling alone: its sources are deleted next.

    Raises:
        AlreadyExistsError: `mode="create"`, and another object has the key.
        PreconditionFailedError: The object has another generation.
    """
    ambiguous = ambiguous or AmbiguousWrite()

    async def attempt(_: int) -> ObjectMeta:
        if find_first and ambiguous.needs_check and (found := await find()):
            return found
        try:
            return await send()
        except (TransientError, asyncio.CancelledError) as exc:
            ambiguous.add(exc)
            raise
        except ChecksumError as exc:
            if resends is None:
                raise
            raise resends.next_error(exc) from exc
        except (PreconditionFailedError, NotFoundError) as exc:
            # An ambiguous attempt may have been carried out since the last look.
            if ambiguous.maybe_done and (found := await find()):
                return found
            if isinstance(exc, PreconditionFailedError) and request.precondition.if_absent:
                raise _exists_error(exc) from exc
            raise

    try:
        return await session.call(request.key, attempt, num_bytes=num_bytes)
    except TransientError as exc:
        if ambiguous.needs_check or (ambiguous.maybe_done and find_if_throttled):
            if found := await _find_at_last(find, exc):
                return found
        elif ambiguous.maybe_done:
            exc.add_note("the write may have been carried out; check it before you repeat it")
        raise


def _exists_error(error: PreconditionFailedError) -> AlreadyExistsError:
    return AlreadyExistsError(
        f"could not create {error.uri}: an object of this name exists; "
        'mode="overwrite" replaces it',
        uri=error.uri,
        status=error.status,
    )


async def _find_at_last(
    find: Callable[[], Awaitable[ObjectMeta | None]], error: TransientError
) -> ObjectMeta | None:
    try:
        async with asyncio.timeout(_FIND_SECONDS):
            return await find()
    except (StorageError, TimeoutError) as exc:
        error.add_note(f"whether the write was carried out could not be determined: {exc!r}")
        return None


async def find_written(
    session: Session, request: WriteRequest, *, size: int, crc32c: int | None
) -> ObjectMeta | None:
    """Return the object if it is the one that an earlier attempt should have written.

    If the service returns no checksum, the object is read: equal sizes may be a coincidence.
    """
    try:
        meta = await session.service.head(request.key)
        is_alike = meta.size == size and has_attributes(
            meta, request.content_type, request.metadata
        )
        is_same = is_alike and crc32c is not None and await checksum_of(session, meta) == crc32c
    except NotFoundError:
        return None
    return meta if is_same else None


async def checksum_of(session: Session, meta: ObjectMeta) -> int:
    """Return the crc32c of an object, read if the service returned none.

    Raises:
        NotFoundError: It was replaced meanwhile.
    """
    if meta.crc32c is not None:
        return meta.crc32c
    value, step = 0, session.options.range_size_bytes
    for start in range(0, meta.size, step):
        value = crc32c(await _read(session, meta, start, min(start + step, meta.size)), value)
    return value


async def _read(session: Session, meta: ObjectMeta, start: int, end: int) -> Buffer:
    """Read a range; not by `Session.call`, since the write that waits for it holds a slot."""
    request = ReadRequest(meta.key, meta.generation, start, end)

    async def attempt(_: int) -> Buffer:
        body = await session.service.get(request)
        if len(body.data) != end - start:
            raise TransientError(f"could not read {meta.uri}: its body is short", uri=meta.uri)
        return body.data

    return await with_retry(attempt, session.retry, uri_of=lambda: meta.uri, clock=session.clock)


def has_attributes(meta: ObjectMeta, content_type: str, metadata: Mapping[str, str] | None) -> bool:
    """Return whether an object has the content type and the metadata of a write."""
    if content_type and meta.content_type != content_type:
        return False
    return metadata is None or dict(meta.metadata) == dict(metadata)

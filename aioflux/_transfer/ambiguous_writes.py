"""Ambiguous writes: reads of the object after a lost response, to see if the write happened."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, TypeAlias, TypeVar

from aioflux._services.base import ReadRequest
from aioflux._transfer.admission import THROTTLED
from aioflux._transfer.retry import with_retry
from aioflux._values.checksums import crc32c
from aioflux._values.meta import portable_attributes
from aioflux.errors import (
    AlreadyExistsError,
    ChecksumError,
    NotFoundError,
    PreconditionFailedError,
    StorageError,
    TransientError,
)

if TYPE_CHECKING:
    from aioflux._services.base import WriteRequest
    from aioflux._transfer.session import Session
    from aioflux._values.meta import ObjectAttributes, ObjectMeta

T = TypeVar("T")
Buffer: TypeAlias = bytes | bytearray | memoryview

_FIND_SECONDS = 10.0
"""Maximum time to check for the object after the last attempt of a write has failed."""

_REJECTIONS = (AlreadyExistsError, NotFoundError, PreconditionFailedError)
"""Errors of a write after which `find` was called already, if an earlier attempt was ambiguous."""

_MAX_SENDS = 3
"""Largest number of attempts to send a body that the service reports as damaged."""


class AmbiguousAttempts:
    """A record of the failed attempts of one request, which may have been carried out nevertheless.

    Attributes:
        maybe_done: At least one attempt may have been carried out.
        needs_check: At least one of these attempts failed for another reason than throttling
            (429, 503). Services seldom carry out a throttled write, and a check would add to their
            load. So after throttling alone, the object is only checked if a later attempt is
            rejected, which suggests that a throttled write was carried out after all.
    """

    maybe_done = False
    needs_check = False

    async def run_attempt(self, request: Awaitable[T]) -> T:
        """Await one attempt, and record its failure if it fails."""
        try:
            return await request
        except (TransientError, asyncio.CancelledError) as exc:
            self.add_failure(exc)
            raise

    def add_failure(self, error: TransientError | asyncio.CancelledError) -> None:
        """Record the failure of an attempt."""
        # A request that was cancelled, by the caller or by a deadline, may have been carried out.
        is_throttled = False
        if isinstance(error, TransientError):
            if not error.maybe_done:
                return
            is_throttled = error.status in THROTTLED
        self.maybe_done = True
        self.needs_check = self.needs_check or not is_throttled


def mark_maybe_done(error: StorageError) -> None:
    """Set `maybe_done` of an error, and say so in its message."""
    error.maybe_done = True
    error.message += (
        "; the request may have been carried out nevertheless, because a response was lost or did "
        "not come from the service: read the object before you repeat the request"
    )


@dataclass(eq=False)
class AmbiguousWrite(AmbiguousAttempts):
    """A write that is sent until it is carried out, or its object is found."""

    session: Session
    request: WriteRequest
    send: Callable[[], Awaitable[ObjectMeta]]
    """Sends the write once."""
    find: Callable[[], Awaitable[ObjectMeta | None]]
    """Returns the object that the write should have created, or None if there is none."""
    _resends: ResendLimit | None = field(default=None, init=False)

    async def run(
        self,
        *,
        num_bytes: int | None = None,
        is_costly: bool = False,
        deletes_sources: bool = False,
    ) -> ObjectMeta:
        """Send the write, and return the metadata of its object.

        Args:
            num_bytes: Size of the body, which is resent up to twice if it arrives damaged; None if
                the write has no body.
            is_costly: An attempt costs more than `find`, which is called before another attempt.
            deletes_sources: The caller deletes the sources of the object next, so `find` is called
                at the end even if all attempts were throttled.

        Raises:
            AlreadyExistsError: The write is `mode="create"`, and another object has the key.
            PreconditionFailedError: The object has another generation than required.

        An error after an ambiguous attempt has `maybe_done`.
        """
        if num_bytes is not None:
            self._resends = ResendLimit()
        attempt = self._find_or_send if is_costly else self._attempt
        try:
            return await self.session.call(self.request.key, attempt, num_bytes=num_bytes or 0)
        except StorageError as exc:
            needs_check = self.needs_check or (self.maybe_done and deletes_sources)
            is_open = needs_check and not isinstance(exc, _REJECTIONS)
            if is_open and (written := await self._find_after(exc, max_seconds=_FIND_SECONDS)):
                return written
            if self.maybe_done:
                mark_maybe_done(exc)
            raise

    async def _find_or_send(self) -> ObjectMeta:
        if self.needs_check and (written := await self.find()):
            return written
        return await self._attempt()

    async def _attempt(self) -> ObjectMeta:
        try:
            return await self.send()
        except (TransientError, asyncio.CancelledError) as exc:
            self.add_failure(exc)
            raise
        except ChecksumError as exc:
            if self._resends is not None:
                self._resends.raise_transient(exc)
            raise
        except (PreconditionFailedError, NotFoundError) as exc:
            # An ambiguous attempt may have been carried out since the last check.
            if self.maybe_done and (written := await self._find_after(exc)):
                return written
            if isinstance(exc, PreconditionFailedError) and self.request.precondition.if_absent:
                raise AlreadyExistsError(
                    f"could not create {exc.uri}: an object of this name exists; "
                    'mode="overwrite" replaces it',
                    uri=exc.uri,
                    status=exc.status,
                ) from exc
            raise

    async def _find_after(
        self, error: StorageError, *, max_seconds: float | None = None
    ) -> ObjectMeta | None:
        """Return the object, or None; a failure is added to `error`, the failure of the write.

        Without `max_seconds` another attempt may follow, so a TransientError is raised instead.
        """
        try:
            async with asyncio.timeout(max_seconds):
                return await self.find()
        except (StorageError, TimeoutError) as exc:
            if isinstance(exc, TransientError) and max_seconds is None:
                raise
            error.add_note(f"whether the write was carried out could not be determined: {exc!r}")
            return None


class ResendLimit:
    """A limit of the attempts to send one body that arrives damaged each time."""

    _num_wrong = 0

    def raise_transient(self, error: ChecksumError) -> None:
        """Raise a TransientError, which is retried; return if the limit is reached."""
        self._num_wrong += 1
        if self._num_wrong < _MAX_SENDS:
            raise TransientError(error.message, uri=error.uri, status=error.status) from error


async def find_written(
    session: Session, request: WriteRequest, *, size: int, crc32c: int | None
) -> ObjectMeta | None:
    """Return the object if it is what an earlier attempt sent, or None.

    If the service returns no checksum, the object is read to compute it: two objects of the same
    size can differ.
    """
    try:
        meta = await session.service.head(request.key)
        is_alike = meta.size == size and has_attributes(meta, request.attributes)
        is_same = is_alike and crc32c is not None and await checksum_of(session, meta) == crc32c
    except NotFoundError:
        return None
    return meta if is_same else None


async def checksum_of(session: Session, meta: ObjectMeta) -> int:
    """Return the crc32c of an object; read the object if the service returned no checksum.

    Raises:
        NotFoundError: The object was replaced or deleted meanwhile.
    """
    if meta.crc32c is not None:
        return meta.crc32c
    value, step = 0, session.options.range_size_bytes
    for start in range(0, meta.size, step):
        value = crc32c(await _read(session, meta, start, min(start + step, meta.size)), value)
    return value


async def _read(session: Session, meta: ObjectMeta, start: int, end: int) -> Buffer:
    """Read a range, without a request slot: during an attempt, the write already holds one."""
    request = ReadRequest(meta.key, meta.generation, start, end)

    async def attempt(_: int) -> Buffer:
        body = await session.service.get(request)
        if len(body.data) != end - start:
            raise TransientError(f"could not read {meta.uri}: the body is too short", uri=meta.uri)
        return body.data

    return await with_retry(attempt, session.retry, uri_of=lambda: meta.uri, clock=session.clock)


def has_attributes(meta: ObjectMeta, attributes: ObjectAttributes) -> bool:
    """Return whether an object has the attributes of a write.

    The storage class is not compared: the service may have another name for it, or none.
    """
    for name, value in portable_attributes(meta).items():
        expected = getattr(attributes, name)
        if expected not in ("", None, value):
            return False
    return True

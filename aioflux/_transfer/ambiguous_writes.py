"""Answers that were not heard: what a request may have done is looked for, never guessed."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, TypeAlias, TypeVar

from aioflux._services.base import ReadRequest
from aioflux._transfer.retry import with_retry
from aioflux._transfer.session import THROTTLED
from aioflux._values.checksums import crc32c
from aioflux.errors import NotFoundError, StorageError, TransientError

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Mapping

    from aioflux._transfer.session import Session
    from aioflux._values.meta import ObjectMeta

__all__ = ["Fate", "call_or_find", "checksum_of", "find_written", "is_as_asked"]

T = TypeVar("T")
Buffer: TypeAlias = bytes | bytearray | memoryview

_LOOK_SECONDS = 10.0
"""Time for the last look, after the time of the request itself has run out."""


class Fate:
    """What became of the attempts of one request.

    Attributes:
        is_open: One of them may have been carried out, and its answer was not heard.
        is_unanswered: The same, of an attempt that was not answered by 429 or 503. Behind these
            there is seldom any work, and the service is asked too much already: a look is spent on
            them only when a later attempt is refused, which shows that there was.
    """

    __slots__ = ("is_open", "is_unanswered")

    def __init__(self) -> None:
        self.is_open = False
        self.is_unanswered = False

    async def hear(self, request: Awaitable[T]) -> T:
        """Await one attempt, and remember whether its answer was lost."""
        try:
            return await request
        except (TransientError, asyncio.CancelledError) as exc:
            self.note(exc)
            raise

    def note(self, error: TransientError | asyncio.CancelledError) -> None:
        """Remember whether the answer to an attempt that ended so was lost."""
        # Cancelled, also by a deadline: the request is on its way.
        is_throttled = False
        if isinstance(error, TransientError):
            if not error.maybe_done:
                return
            is_throttled = error.status in THROTTLED
        self.is_open = True
        self.is_unanswered = self.is_unanswered or not is_throttled


async def call_or_find(
    session: Session,
    key: str,
    attempt: Callable[[int], Awaitable[ObjectMeta]],
    fate: Fate,
    find: Callable[[], Awaitable[ObjectMeta | None]],
    *,
    num_bytes: int = 0,
    must_know: bool = False,
) -> ObjectMeta:
    """Run one request; where attempts or time ran out after a lost answer, look a last time.

    Args:
        session: Where.
        key: What it writes.
        attempt: As for `Session.call`; it hears its answers through `fate`.
        fate: What is known of the attempts.
        find: Returns what the request should have made, if it is there.
        num_bytes: As for `Session.call`.
        must_know: Look also if the service was only asked too often (429 and 503), because what the
            request used up is cleaned up after it; otherwise the error says that it is not known.
    """
    try:
        return await session.call(key, attempt, num_bytes=num_bytes)
    except TransientError as exc:
        if fate.is_unanswered or (fate.is_open and must_know):
            if found := await _look(find, exc):
                return found
        elif fate.is_open:
            exc.add_note("whether it was done all the same is not known; look before you repeat it")
        raise


async def _look(
    find: Callable[[], Awaitable[ObjectMeta | None]], error: TransientError
) -> ObjectMeta | None:
    try:
        async with asyncio.timeout(_LOOK_SECONDS):
            return await find()
    except (StorageError, TimeoutError) as exc:
        error.add_note(f"whether it was done all the same could not be found out: {exc!r}")
        return None


async def find_written(
    session: Session,
    key: str,
    *,
    size: int,
    crc32c: int | None,
    content_type: str = "",
    metadata: Mapping[str, str] | None = None,
) -> ObjectMeta | None:
    """Return the object if it is what an earlier attempt should have written.

    Of a service that tells no checksum of it, it is read: two objects may be of one size by chance.
    """
    try:
        meta = await session.service.head(key)
        is_alike = meta.size == size and is_as_asked(meta, content_type, metadata)
        is_same = is_alike and crc32c is not None and await checksum_of(session, meta) == crc32c
    except NotFoundError:
        return None
    return meta if is_same else None


async def checksum_of(session: Session, meta: ObjectMeta) -> int:
    """Return the crc32c of an object; of one that has none, by reading it.

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
    """Read a range; not by `Session.call`, since a request that waits for this has a place."""
    request = ReadRequest(meta.key, meta.generation, start, end)

    async def attempt(_: int) -> Buffer:
        body = await session.service.get(request)
        if len(body.data) != end - start:
            raise TransientError(f"could not read {meta.uri}: its body is short", uri=meta.uri)
        return body.data

    return await with_retry(attempt, session.retry, uri_of=lambda: meta.uri)


def is_as_asked(meta: ObjectMeta, content_type: str, metadata: Mapping[str, str] | None) -> bool:
    """Tell whether an object has the content type and the metadata that a write asked for."""
    if content_type and meta.content_type != content_type:
        return False
    return metadata is None or dict(meta.metadata) == dict(metadata)

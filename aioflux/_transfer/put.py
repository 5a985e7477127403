"""What to write where, and writing it in one request."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from aioflux._services.base import Precondition, WriteRequest
from aioflux._transfer.ambiguous_writes import Fate, call_or_find, find_written
from aioflux._transfer.arguments import lower_names
from aioflux._transfer.conditions import require
from aioflux._transfer.delete import delete
from aioflux._transfer.temp_keys import COMPOSITE_PREFIX, TEMPORARY_PREFIX, is_staged
from aioflux._values.checksums import crc32c
from aioflux.errors import (
    AlreadyExistsError,
    ChecksumError,
    PreconditionFailedError,
    StorageError,
    TransientError,
)

if TYPE_CHECKING:
    from collections.abc import Mapping

    from aioflux._transfer.session import Session
    from aioflux._values.meta import ObjectMeta

__all__ = ["Sends", "compare_stored", "put_once", "unmet", "write_request"]

_MAX_SENDS = 3
"""Times that the same bytes are sent where the service says that others arrived."""


def write_request(
    key: str,
    precondition: Precondition,
    content_type: str = "",
    metadata: Mapping[str, str] | None = None,
) -> WriteRequest:
    """Return a write that a caller requests, metadata names in lower case.

    Raises:
        ValueError: Two names of metadata differ in case only, or the key is below the prefixes of
            temporary objects, which listings leave out.
    """
    if is_staged(key):
        raise ValueError(
            f"{key!r} cannot be written: listings leave out keys below {TEMPORARY_PREFIX!r} and "
            f"{COMPOSITE_PREFIX!r}, which are for temporary objects of aioflux; take another key"
        )
    return WriteRequest(
        key, precondition, content_type, lower_names(metadata) if metadata else metadata
    )


def unmet(error: PreconditionFailedError, precondition: Precondition) -> StorageError:
    """Return the error that a caller expects for a condition that did not hold."""
    if not precondition.if_absent:
        return error
    return AlreadyExistsError(
        f"could not create {error.uri}: an object of this name exists; "
        'mode="overwrite" replaces it',
        uri=error.uri,
        status=error.status,
    )


class Sends:
    """Counts how often the same bytes arrived as others, and decides what follows."""

    def __init__(self) -> None:
        self._num_wrong = 0

    def wrong(self, error: ChecksumError) -> StorageError:
        """Return what to raise: a failure that asks for another attempt, or at last the error."""
        self._num_wrong += 1
        if self._num_wrong >= _MAX_SENDS:
            return error
        return TransientError(error.message, uri=error.uri, status=error.status)


async def put_once(session: Session, request: WriteRequest, data: memoryview) -> ObjectMeta:
    """Write a whole object in one request.

    A conditional write whose answer was lost is resolved by looking. Bytes that arrive as others
    are sent again, three times in all.
    """
    await require(session, request.key, request.precondition)
    # Also compared with the stored object below, so it is needed where it is not sent, too.
    checksum = crc32c(data)
    fate, sends = Fate(), Sends()

    async def find() -> ObjectMeta | None:
        return await find_written(
            session,
            request.key,
            size=data.nbytes,
            crc32c=checksum,
            content_type=request.content_type,
            metadata=request.metadata,
        )

    async def attempt(_: int) -> ObjectMeta:
        try:
            return await session.service.put(
                request, data, crc32c=checksum if session.options.verify else None
            )
        except (TransientError, asyncio.CancelledError) as exc:
            fate.note(exc)
            raise
        except ChecksumError as exc:
            raise sends.wrong(exc) from exc
        except PreconditionFailedError as exc:
            if fate.is_open and (meta := await find()):
                return meta
            raise unmet(exc, request.precondition) from exc

    meta = await call_or_find(session, request.key, attempt, fate, find, num_bytes=data.nbytes)
    if meta.crc32c != checksum:
        await compare_stored(session, meta, checksum)
    return meta


async def compare_stored(session: Session, meta: ObjectMeta, checksum: int) -> None:
    """Remove an object whose stored bytes are not those that were sent.

    It is looked at again first: the answer may be damaged, and not the object.

    Raises:
        ChecksumError: They are not.
    """
    if not session.options.verify or meta.crc32c in {None, checksum}:
        return
    error = ChecksumError(
        f"could not write {meta.uri}: the stored object has crc32c {meta.crc32c:#010x}, what was "
        f"sent has {checksum:#010x}; write it again",
        uri=meta.uri,
    )
    try:
        seen = await session.call(
            meta.key, lambda _: session.service.head(meta.key, generation=meta.generation)
        )
        if (seen.generation, seen.crc32c) == (meta.generation, checksum):
            return
        await delete(session, meta.key, generation=meta.generation)
    except StorageError as exc:
        error.add_note(f"the stored object is still there: {exc}")
    else:
        error.add_note("the stored object was removed")
    raise error

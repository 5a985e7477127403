"""Writes of whole objects by one request each."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from aioflux._services.base import Precondition, WriteRequest
from aioflux._transfer.ambiguous_writes import ResendLimit, find_written, send_write
from aioflux._transfer.arguments import lower_names
from aioflux._transfer.conditions import require
from aioflux._transfer.delete import delete
from aioflux._transfer.temp_keys import TEMPORARY_PREFIXES, is_temporary
from aioflux._values.checksums import crc32c_of_pieces
from aioflux._values.uri import has_scheme
from aioflux.errors import ChecksumError, StorageError

if TYPE_CHECKING:
    from aioflux._transfer.session import Session
    from aioflux._values.meta import ObjectMeta


def write_request(
    key: str,
    precondition: Precondition,
    content_type: str = "",
    metadata: Mapping[str, str] | None = None,
) -> WriteRequest:
    """Return the request value of a write, with metadata names in lower case.

    Raises:
        ValueError: Two names of metadata differ only in case, the key is a uri, or it has a prefix
            of temporary objects, which listings leave out.
    """
    if has_scheme(key):
        raise ValueError(
            f"{key!r} cannot be written: it is a uri, and a key is relative to the uri of the "
            "store; use the key alone"
        )
    if is_temporary(key):
        raise ValueError(
            f"{key!r} cannot be written: listings leave out keys below "
            f"{', '.join(TEMPORARY_PREFIXES)}, which are for objects of aioflux; use another key"
        )
    return WriteRequest(
        key, precondition, content_type, lower_names(metadata) if metadata else metadata
    )


async def put_once(
    session: Session, request: WriteRequest, pieces: Sequence[memoryview]
) -> ObjectMeta:
    """Write a whole object in one request. A body that arrives damaged is resent up to twice."""
    await require(session, request.key, request.precondition)
    checksum = crc32c_of_pieces(pieces) if session.options.verify else None
    size = sum(map(len, pieces))
    meta = await send_write(
        session,
        request,
        lambda: session.service.put(request, pieces, crc32c=checksum),
        lambda: find_written(session, request, size=size, crc32c=crc32c_of_pieces(pieces)),
        resends=ResendLimit(),
        num_bytes=size,
    )
    if checksum is not None and meta.crc32c != checksum:
        await compare_stored(session, meta, checksum)
    return meta


async def compare_stored(session: Session, meta: ObjectMeta, checksum: int) -> None:
    """Compare the checksum of a stored object with that of the sent bytes; delete a damaged object.

    Before the delete, the metadata is read again, because the response could be damaged instead.

    Raises:
        ChecksumError: The stored object was damaged.
    """
    if not session.options.verify or meta.crc32c in {None, checksum}:
        return
    error = ChecksumError(
        f"could not write {meta.uri}: the stored object has crc32c {meta.crc32c:#010x}, but the "
        f"sent bytes have {checksum:#010x}; write it again",
        uri=meta.uri,
    )
    try:
        stored = await session.head(meta.key, meta.generation)
        if (stored.generation, stored.crc32c) == (meta.generation, checksum):
            return
        await delete(session, meta.key, generation=meta.generation)
    except StorageError as exc:
        error.add_note(f"the stored object may still exist: {exc}")
    else:
        error.add_note("the stored object was removed")
    raise error

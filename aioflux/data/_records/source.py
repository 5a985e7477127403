"""What every kind of records does with its source: decompress it, and name what went wrong."""

from __future__ import annotations

import gzip
import io
import zlib
from contextlib import contextmanager
from typing import TYPE_CHECKING, BinaryIO, cast

from aioflux.errors import RecordError

if TYPE_CHECKING:
    from collections.abc import Iterator

    from aioflux._values.meta import ObjectMeta

__all__ = ["TORN", "decompressed", "record_error", "torn_error"]

TORN = (EOFError, zlib.error, gzip.BadGzipFile)
"""What the reading of a gzip stream that is cut off or damaged raises."""

_GZIP = b"\x1f\x8b"


def record_error(meta: ObjectMeta, number: int, what: str) -> RecordError:
    """Return the error that a record, counted from 0, cannot be read because of `what`."""
    message = f"could not read record {number}, counted from 0, of {meta.uri}: {what}"
    return RecordError(f"{message}; check the object, or write it again", uri=meta.uri)


def torn_error(meta: ObjectMeta, number: int, torn: Exception) -> RecordError:
    """Return the error that the compressed bytes which a record comes from are torn."""
    return record_error(meta, number, f"its gzip stream is torn: {torn}")


@contextmanager
def decompressed(stream: BinaryIO) -> Iterator[BinaryIO]:
    """Give the bytes of a stream, decompressed where they begin as those of gzip do.

    Closes nothing that it was given.
    """
    if isinstance(stream, io.BufferedReader):
        peekable, is_ours = stream, False
    else:
        peekable, is_ours = io.BufferedReader(cast("io.RawIOBase", stream)), True
    try:
        if peekable.peek(len(_GZIP))[: len(_GZIP)] == _GZIP:
            with gzip.GzipFile(fileobj=peekable, mode="rb") as plain:
                yield cast("BinaryIO", plain)
        else:
            yield peekable
    finally:
        if is_ours and not stream.closed:
            peekable.detach()

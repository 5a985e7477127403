"""Interface of decoders of streams, decompression, and errors that name the record."""

from __future__ import annotations

import gzip
import io
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, BinaryIO, Protocol, TypeVar, cast

from aioflux.errors import RecordError

if TYPE_CHECKING:
    from aioflux._values.meta import ObjectMeta

T_co = TypeVar("T_co", covariant=True)

GZIP_ERRORS = (EOFError, zlib.error, gzip.BadGzipFile)
"""Errors of a gzip stream that is truncated or damaged."""

_GZIP_MAGIC = b"\x1f\x8b"


class StreamRecords(Protocol[T_co]):
    """Decoder of the records of an object from a stream, without the whole object in memory."""

    @property
    def takes_stream(self) -> bool:
        """Always True."""
        ...

    def __call__(self, stream: BinaryIO, meta: ObjectMeta, /) -> Iterator[T_co]:
        """Yield the records of one object."""
        ...


def record_error(meta: ObjectMeta, record_index: int, reason: str) -> RecordError:
    """Return the error for a record that cannot be read."""
    message = f"could not read record {record_index}, counted from 0, of {meta.uri}: {reason}"
    return RecordError(f"{message}; check the object, or write it again", uri=meta.uri)


def gzip_error(meta: ObjectMeta, record_index: int, error: Exception) -> RecordError:
    """Return the error for a record whose compressed bytes are truncated or damaged."""
    return record_error(meta, record_index, f"the gzip stream is damaged or truncated: {error}")


@contextmanager
def decompress(stream: BinaryIO) -> Iterator[BinaryIO]:
    """Yield `stream`, decompressed if it begins with the magic bytes of gzip.

    Does not close `stream`.
    """
    if isinstance(stream, io.BufferedReader):
        peekable, is_wrapper = stream, False
    else:
        peekable, is_wrapper = io.BufferedReader(cast("io.RawIOBase", stream)), True
    try:
        if peekable.peek(len(_GZIP_MAGIC))[: len(_GZIP_MAGIC)] == _GZIP_MAGIC:
            with gzip.GzipFile(fileobj=peekable, mode="rb") as plain:
                yield cast("BinaryIO", plain)
        else:
            yield peekable
    finally:
        if is_wrapper and not stream.closed:
            peekable.detach()

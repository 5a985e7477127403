"""Records: many samples in one object, decoded from memory or from a stream.

    IterableDataset(uri, records=jsonl())
    IterableDataset(uri, records=tar())
    IterableDataset(uri, records=parquet(columns=["text"]))

There are two kinds of `records` callables. One kind is called with a `Sample`, a whole object. The
other kind has an attribute `takes_stream = True`, and is called with a binary file and the metadata
of the object. `jsonl()`, `tar()` and `parquet()` are of the second kind. They raise RecordError,
with the uri and the record_index, if a record is damaged or the object is truncated.
"""

from __future__ import annotations

import io
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, BinaryIO, ClassVar, TypeAlias, TypeGuard, TypeVar

import msgspec

from aioflux.data._object_stream import open_stream
from aioflux.data._records.decompress import (
    GZIP_ERRORS,
    StreamRecords,
    decompress,
    gzip_error,
    record_error,
)
from aioflux.data._records.parquet import parquet
from aioflux.data._records.tar import tar
from aioflux.data._sample import Sample

if TYPE_CHECKING:
    from aioflux import sync
    from aioflux._values.meta import ObjectMeta

__all__ = [
    "Records",
    "StreamRecords",
    "jsonl",
    "parquet",
    "records_of_sample",
    "stream_records",
    "takes_stream",
    "tar",
]

T = TypeVar("T")

_MAX_RECORD_BYTES = 256 * 1024 * 1024


Records: TypeAlias = Callable[[Sample], Iterator[T]] | StreamRecords[T]
"""Decoder of the records of one object, given as a `Sample` or as a stream."""


def takes_stream(records: Records[T]) -> TypeGuard[StreamRecords[T]]:
    """Return whether a `records` callable is called with a stream, and not with a `Sample`."""
    return bool(getattr(records, "takes_stream", False))


def records_of_sample(records: Records[T], sample: Sample) -> Iterator[T]:
    """Iterate over the records of an object in memory, with either kind of `records`."""
    if takes_stream(records):
        return records(io.BytesIO(sample.data), sample.meta)
    return records(sample)  # type: ignore[call-arg, arg-type]


def stream_records(
    store: sync.Store, meta: ObjectMeta, records: StreamRecords[T], *, prefetch_bytes: int
) -> Iterator[T]:
    """Yield the records of an object from a stream that prefetches up to `prefetch_bytes`."""
    stream = open_stream(store, meta, prefetch_bytes=prefetch_bytes)
    try:
        yield from records(stream, meta)
        stream.close()
    finally:
        stream.abort()


@dataclass(frozen=True, slots=True)
class _Jsonl:
    decode: Callable[[bytes], Any]
    max_record_bytes: int
    takes_stream: ClassVar[bool] = True

    def __call__(self, stream: BinaryIO, meta: ObjectMeta, /) -> Iterator[Any]:
        decode, max_bytes, record_index = self.decode, self.max_record_bytes, 0
        with decompress(stream) as plain:
            try:
                for line in iter(partial(plain.readline, max_bytes + 1), b""):
                    if len(line) > max_bytes:
                        reason = f"it is longer than max_record_bytes={max_bytes}"
                        raise record_error(meta, record_index, reason)
                    if not line.isspace():
                        try:
                            record = decode(line)
                        except Exception as exc:
                            reason = f"{type(exc).__name__}: {exc}"
                            raise record_error(meta, record_index, reason) from exc
                        yield record
                    record_index += 1
            except GZIP_ERRORS as exc:
                raise gzip_error(meta, record_index, exc) from exc


def jsonl(
    *,
    decode: Callable[[bytes], Any] = msgspec.json.decode,
    max_record_bytes: int = _MAX_RECORD_BYTES,
) -> StreamRecords[Any]:
    """Return a decoder of JSON Lines: each line is a record. Objects may be compressed by gzip.

    Empty lines are not yielded, but they are counted in the record_index of error messages. A line
    that is not valid JSON raises RecordError, such as the last line of most truncated objects.

    Args:
        decode: Decodes one line, given as bytes. By default msgspec's decoder, which follows the
            standard and rejects NaN; `json.loads` accepts NaN.
        max_record_bytes: Largest length of a line in bytes, with its line end; 256 MiB by default.
            A longer line raises RecordError before all of it is in memory.

    Raises:
        ValueError: `max_record_bytes` is not above 0.
    """
    if max_record_bytes <= 0:
        raise ValueError(f"max_record_bytes must be above 0, not {max_record_bytes!r}")
    return _Jsonl(decode, max_record_bytes)

"""Records: many samples of one object, from its bytes or while it streams in.

    IterableDataset(uri, records=jsonl())
    IterableDataset(uri, records=tar())
    IterableDataset(uri, records=parquet(columns=["text"]))

A `records` callable is one of two kinds: a function of the whole `Sample`, or an object with
`takes_stream = True` that is called with a binary file and the object's metadata; those here are of
the second kind. A damaged record, or an object that ends in the middle of one, is a RecordError
that names the object and the record.
"""

from __future__ import annotations

import io
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, BinaryIO, ClassVar, Protocol, TypeAlias, TypeGuard, TypeVar

import msgspec

from aioflux.data._object_stream import open_stream
from aioflux.data._records.decompress import GZIP_ERRORS, decompress, gzip_error, record_error
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
T_co = TypeVar("T_co", covariant=True)

_MAX_RECORD_BYTES = 256 * 1024 * 1024


class StreamRecords(Protocol[T_co]):
    """Makes records of an object while it streams in, without all of it in memory."""

    @property
    def takes_stream(self) -> bool:
        """True."""
        ...

    def __call__(self, stream: BinaryIO, meta: ObjectMeta, /) -> Iterator[T_co]:
        """Yield the records of one object."""
        ...


Records: TypeAlias = Callable[[Sample], Iterator[T]] | StreamRecords[T]


def takes_stream(records: Records[T]) -> TypeGuard[StreamRecords[T]]:
    """Return whether a `records` callable takes a stream, rather than a `Sample`."""
    return bool(getattr(records, "takes_stream", False))


def records_of_sample(records: Records[T], sample: Sample) -> Iterator[T]:
    """Yield the records of an object in memory, with either kind of `records`."""
    if takes_stream(records):
        return records(io.BytesIO(sample.data), sample.meta)
    return records(sample)  # type: ignore[call-arg, arg-type]


def stream_records(
    store: sync.Store, meta: ObjectMeta, records: StreamRecords[T], *, prefetch_bytes: int
) -> Iterator[T]:
    """Yield the records of an object while it streams in, `prefetch_bytes` ahead at most."""
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
    """Make a record of each line of JSON Lines; of objects compressed by gzip as well.

    Empty lines are left out, and count as records in the message of an error. The last line of a
    truncated object is an error, because it is no JSON.

    Args:
        decode: Makes a value of a line, in bytes. msgspec's by default, which keeps to the standard
            and rejects NaN; `json.loads` accepts it.
        max_record_bytes: The longest line, in bytes; 256 MiB by default. A longer one is an error
            before it is in memory.

    Raises:
        ValueError: `max_record_bytes` is not above 0.
    """
    if max_record_bytes <= 0:
        raise ValueError(f"max_record_bytes must be above 0, not {max_record_bytes!r}")
    return _Jsonl(decode, max_record_bytes)

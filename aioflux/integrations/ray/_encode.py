"""Encoding of Arrow tables into objects: Parquet, JSON Lines, tar archives and raw objects."""

from __future__ import annotations

import io
import tarfile
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Final

import msgspec
import pyarrow.parquet as pq  # type: ignore[import-untyped]

from aioflux._values.checksums import crc32c

if TYPE_CHECKING:
    import pyarrow as pa

    from aioflux import sync
    from aioflux._values.meta import ObjectMeta


class _Sink:
    """Writable file of pyarrow and tarfile, which sends its bytes to an object."""

    closed = False

    def __init__(self, writer: sync.ObjectWriter) -> None:
        self.crc32c = 0  # of the bytes that were sent
        self._writer = writer
        self._buffer = bytearray()

    def write(self, data: Any) -> int:
        self._buffer += data
        if len(self._buffer) >= 1024 * 1024:
            self.flush()
        return len(data)

    def flush(self) -> None:
        self.crc32c = crc32c(self._buffer, self.crc32c)
        self._writer.write(self._buffer)
        self._buffer = bytearray()

    def tell(self) -> int:
        return self._writer.tell() + len(self._buffer)


def write_shards(
    store: sync.Store, prefix: str, tables: Iterator[pa.Table], extension: str, max_bytes: int
) -> Iterator[ObjectMeta]:
    """Write tables to the objects `<prefix>-00000.<extension>`, and so on; yield the metadata.

    An object ends after the table that makes it reach `max_bytes`, and a Parquet object also before
    a table with another schema.
    """
    table = next(tables, None)
    number = 0
    while table is not None:
        schema = table.schema
        with store.open_writer(f"{prefix}-{number:05d}.{extension}") as writer:
            sink = _Sink(writer)
            with ENCODERS[extension](sink, schema) as add_table:
                while table is not None and (extension != "parquet" or table.schema == schema):
                    add_table(table)
                    table = next(tables, None)
                    if sink.tell() >= max_bytes:
                        break
            sink.flush()
        yield replace(writer.meta, crc32c=sink.crc32c)
        number += 1


def write_rows(store: sync.Store, prefix: str, tables: Iterable[pa.Table]) -> Iterator[ObjectMeta]:
    """Write each row to an object, and yield the metadata of the objects."""
    checksums: dict[str, int] = {}

    def pairs() -> Iterator[tuple[str, bytes]]:
        for table in tables:
            for row in _rows(table.select(["key", "bytes"])):
                key, data = row["key"], row["bytes"]
                if not (key and isinstance(data, bytes)):
                    raise ValueError(f"a row of an object needs key and bytes, not {key!r}")
                checksums[f"{prefix}{key}"] = crc32c(data)
                yield f"{prefix}{key}", data

    for meta in store.put_many(pairs()):
        yield replace(meta, crc32c=checksums[meta.key])


def _rows(table: pa.Table) -> Iterator[dict[str, Any]]:
    """Yield the rows as dicts, converted 1,024 at a time."""
    for batch in table.to_batches(max_chunksize=1024):
        yield from batch.to_pylist()


@contextmanager
def _parquet(sink: _Sink, schema: pa.Schema) -> Iterator[Callable[[Any], object]]:
    with pq.ParquetWriter(sink, schema, write_page_checksum=True) as writer:
        yield writer.write_table


@contextmanager
def _jsonl(sink: _Sink, _: pa.Schema) -> Iterator[Callable[[Any], object]]:
    yield lambda table: sink.write(b"".join(_json.encode(row) + b"\n" for row in _rows(table)))


@contextmanager
def _tar(sink: Any, _: pa.Schema) -> Iterator[Callable[[Any], object]]:
    with tarfile.open(fileobj=sink, mode="w|") as archive:
        last_key = ""

        def add_table(table: pa.Table) -> None:
            nonlocal last_key
            for row in _rows(table):
                key = row.pop("__key__", None)
                if not key or key == last_key:
                    raise ValueError(f"rows need different values of __key__, not {key!r}")
                last_key = key
                members = [item for item in row.items() if item[1] is not None]
                if not members:
                    raise ValueError(f"the sample {key!r} has no value, so that it has no file")
                for extension, value in members:
                    _add_member(archive, key, extension, value)

        yield add_table


def _add_member(archive: tarfile.TarFile, key: str, extension: str, value: Any) -> None:
    from aioflux.data._records.tar import sample_name

    name = f"{key}.{extension}" if extension else key
    if sample_name(name) != (key, extension):
        raise ValueError(f"{name!r} is not a name of the sample {key!r} for `tar()`")
    data = value.encode() if isinstance(value, str) else value
    data = data if isinstance(data, bytes) else _json.encode(data)
    info = tarfile.TarInfo(name)
    info.size = len(data)
    archive.addfile(info, io.BytesIO(data))


def _listed(value: Any) -> Any:
    if not hasattr(value, "tolist"):  # only values of NumPy have it
        raise ValueError(f"a {type(value).__name__} cannot be written as JSON; convert it")
    return value.tolist()


_json = msgspec.json.Encoder(enc_hook=_listed)

ENCODERS: Final[dict[str, Any]] = {"parquet": _parquet, "jsonl": _jsonl, "tar": _tar}
"""Context managers that yield a function which adds a table to a file, by extension."""

"""Rows of a Parquet file, read by ranges of the requested columns.

pyarrow is an optional dependency, imported with the first file.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import import_module
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any, BinaryIO, ClassVar, Literal, cast, overload

from aioflux._values.distribution import pip_install
from aioflux.data._records.decompress import record_error
from aioflux.errors import StorageError

if TYPE_CHECKING:
    from aioflux._values.meta import ObjectMeta
    from aioflux.data._records.decompress import StreamRecords

_MAX_PYTHON_ROWS = 1024
"""Maximum number of rows converted to Python objects at once: the objects need many times the
memory of columns."""


@dataclass(frozen=True, slots=True)
class _Parquet:
    columns: tuple[str, ...] | None
    items: Literal["rows", "tables"]
    takes_stream: ClassVar[bool] = True

    @property
    def reads_parts(self) -> bool:
        """Return whether only parts of an object are read."""
        return self.columns is not None

    def __call__(self, stream: BinaryIO, meta: ObjectMeta, /) -> Iterator[Any]:
        for table in self._tables(stream, meta):
            if self.items == "tables":
                yield table
                continue
            for batch in table.to_batches(max_chunksize=_MAX_PYTHON_ROWS):
                yield from batch.to_pylist()

    def _tables(self, stream: BinaryIO, meta: ObjectMeta) -> Iterator[Any]:
        pyarrow, pq = import_module("pyarrow"), import_module("pyarrow.parquet")
        # Unbuffered reads request no more bytes than pyarrow needs.
        source = getattr(stream, "raw", stream)
        with _errors_named(pyarrow, meta, 0):
            file = pq.ParquetFile(source, pre_buffer=True, page_checksum_verification=True)
        columns = self._check_columns(file, meta)
        first_row, num_groups = 0, file.num_row_groups
        if not num_groups:
            return
        with ThreadPoolExecutor(1, thread_name_prefix="aioflux-parquet") as executor:
            prefetched = executor.submit(file.read_row_group, 0, columns)
            for next_group in range(1, num_groups + 1):
                with _errors_named(pyarrow, meta, first_row):
                    table = prefetched.result()
                if next_group < num_groups:  # read while the consumer uses `table`
                    prefetched = executor.submit(file.read_row_group, next_group, columns)
                yield table
                first_row += table.num_rows

    def _check_columns(self, file: Any, meta: ObjectMeta) -> list[str] | None:
        """Return the columns. Raise ValueError if one is missing: pyarrow would ignore it."""
        if self.columns is None:
            return None
        present = file.schema_arrow.names
        missing = [
            name
            for name in self.columns
            if name not in present and name.split(".")[0] not in present
        ]
        if missing:
            raise ValueError(
                f"{meta.uri} has no column {', '.join(missing)}, only {', '.join(present)}"
            )
        return list(self.columns)


@overload
def parquet(
    columns: Sequence[str] | None = None, *, items: Literal["rows"] = "rows"
) -> StreamRecords[dict[str, Any]]: ...
@overload
def parquet(
    columns: Sequence[str] | None = None, *, items: Literal["tables"]
) -> StreamRecords[Any]: ...
def parquet(
    columns: Sequence[str] | None = None, *, items: Literal["rows", "tables"] = "rows"
) -> StreamRecords[Any]:
    """Return a decoder of Parquet files. Each row, or each row group, becomes one record.

    The decoder reads the footer and the ranges of the requested columns. While one row group is
    used, the next one is read, so that two are in memory.

    Needs pyarrow: `pip install 'aioflux-storage[parquet]'`. If the pages of a file have checksums,
    as those that `write_objects` writes, they are compared.

    Args:
        columns: Names of the columns to read, with dots for nested fields; by default all columns.
        items: "rows" for a dict of each row; "tables" for a pyarrow.Table of each row group, which
            is much faster for code that works on columns.

    Raises:
        ModuleNotFoundError: pyarrow is not installed.
        TypeError: `columns` is one string.
        ValueError: `items` is neither "rows" nor "tables".
    """
    if isinstance(columns, str):
        raise TypeError(f"columns must be a sequence of names, not the string {columns!r}")
    if items not in {"rows", "tables"}:
        raise ValueError(f'items must be "rows" or "tables", not {items!r}')
    if find_spec("pyarrow") is None:
        message = f"records=parquet() needs pyarrow: {pip_install('parquet')}"
        raise ModuleNotFoundError(message, name="pyarrow")
    return _Parquet(None if columns is None else tuple(columns), items)


@contextmanager
def _errors_named(pyarrow: Any, meta: ObjectMeta, record_index: int) -> Iterator[None]:
    """Raise errors of pyarrow as RecordError with the uri and the index of the first row."""
    damaged = cast("tuple[type[Exception], ...]", (pyarrow.ArrowException, OSError))
    try:
        yield
    except StorageError:  # a failed read does not mean that the file is damaged
        raise
    except damaged as exc:
        raise record_error(meta, record_index, f"not a complete Parquet file: {exc}") from exc

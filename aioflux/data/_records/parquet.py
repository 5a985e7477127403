"""Rows of a Parquet file, by the ranges of the wanted columns alone.

pyarrow is imported on first use: it is an extra.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import import_module
from typing import TYPE_CHECKING, Any, BinaryIO, ClassVar, Literal, cast, overload

from aioflux.data._records.decompress import record_error
from aioflux.errors import StorageError

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from aioflux._values.meta import ObjectMeta
    from aioflux.data._records.formats import StreamRecords

__all__ = ["parquet"]

_MAX_PYTHON_ROWS = 1024
"""Rows converted to Python objects at once: these take many times the memory of the columns."""


@dataclass(frozen=True, slots=True)
class _Parquet:
    columns: tuple[str, ...] | None
    items: Literal["rows", "tables"]
    takes_stream: ClassVar[bool] = True

    @property
    def reads_parts(self) -> bool:
        """Return whether it reads parts of an object, so that reading it whole is a waste."""
        return self.columns is not None

    def __call__(self, stream: BinaryIO, meta: ObjectMeta, /) -> Iterator[Any]:
        for table in self._tables(stream, meta):
            if self.items == "tables":
                yield table
                continue
            for batch in table.to_batches(max_chunksize=_MAX_PYTHON_ROWS):
                yield from batch.to_pylist()

    def _tables(self, stream: BinaryIO, meta: ObjectMeta) -> Iterator[Any]:
        pyarrow, pq = _import_pyarrow()
        # Unbuffered reads request exactly what they return.
        source = getattr(stream, "raw", stream)
        with _errors_named(pyarrow, meta, 0):
            file = pq.ParquetFile(source, pre_buffer=True)
        columns = self._check_columns(file, meta)
        first_row, num_groups = 0, file.num_row_groups
        if not num_groups:
            return
        with ThreadPoolExecutor(1, thread_name_prefix="aioflux-parquet") as executor:
            prefetched = executor.submit(file.read_row_group, 0, columns)
            for next_group in range(1, num_groups + 1):
                with _errors_named(pyarrow, meta, first_row):
                    table = prefetched.result()
                if next_group < num_groups:  # arrives while this one is used
                    prefetched = executor.submit(file.read_row_group, next_group, columns)
                yield table
                first_row += table.num_rows

    def _check_columns(self, file: Any, meta: ObjectMeta) -> list[str] | None:
        """Return the columns; pyarrow would leave out missing ones without an error."""
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
                f"{meta.uri} has no column {', '.join(missing)}, but {', '.join(present)}"
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
    """Make a record of each row of a Parquet file, or of each row group.

    Reads the footer and the ranges of the wanted columns; one row group is used while the next one
    arrives, so that two are in memory. Needs pyarrow: `pip install 'aioflux[parquet]'`.

    Args:
        columns: Names of the columns to read, those of nested fields with dots; all by default.
        items: "rows" for a dict of each row; "tables" for a pyarrow.Table of each row group, which
            is much faster if the columns are used as such.

    Raises:
        TypeError: `columns` is one string.
        ValueError: `items` is neither.
    """
    if isinstance(columns, str):
        raise TypeError(f"columns must be several names, not the string {columns!r}")
    if items not in {"rows", "tables"}:
        raise ValueError(f'items must be "rows" or "tables", not {items!r}')
    return _Parquet(None if columns is None else tuple(columns), items)


def _import_pyarrow() -> tuple[Any, Any]:
    try:
        return import_module("pyarrow"), import_module("pyarrow.parquet")
    except ModuleNotFoundError as exc:
        raise ModuleNotFoundError(
            "records=parquet() needs pyarrow: pip install 'aioflux[parquet]'", name=exc.name
        ) from exc


@contextmanager
def _errors_named(pyarrow: Any, meta: ObjectMeta, record_index: int) -> Iterator[None]:
    """Name the object and the first row in errors of pyarrow."""
    damaged = cast("tuple[type[Exception], ...]", (pyarrow.ArrowException, OSError))
    try:
        yield
    except StorageError:  # of a read
        raise
    except damaged as exc:
        raise record_error(meta, record_index, f"it is no whole Parquet file: {exc}") from exc

"""Rows of a Parquet file, of which only the ranges of the wanted columns are read.

pyarrow loads on first use: it is an extra.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import import_module
from typing import TYPE_CHECKING, Any, BinaryIO, ClassVar, Literal, cast, overload

from aioflux.data._records.source import record_error
from aioflux.errors import StorageError

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from aioflux._values.meta import ObjectMeta
    from aioflux.data._records.formats import StreamRecords

__all__ = ["parquet"]

_ROWS_AT_ONCE = 1024
"""Rows that are Python objects at once: they take many times the memory of their columns."""


@dataclass(frozen=True, slots=True)
class _Parquet:
    columns: tuple[str, ...] | None
    items: Literal["rows", "tables"]
    takes_stream: ClassVar[bool] = True

    @property
    def reads_parts(self) -> bool:
        """Tell whether it asks for parts of an object, so that reading it whole is a waste."""
        return self.columns is not None

    def __call__(self, stream: BinaryIO, meta: ObjectMeta, /) -> Iterator[Any]:
        for table in self._tables(stream, meta):
            if self.items == "tables":
                yield table
                continue
            for batch in table.to_batches(max_chunksize=_ROWS_AT_ONCE):
                yield from batch.to_pylist()

    def _tables(self, stream: BinaryIO, meta: ObjectMeta) -> Iterator[Any]:
        pyarrow, pq = _imported()
        # Reads without a buffer bring exactly what they ask for.
        source = getattr(stream, "raw", stream)
        with _named(pyarrow, meta, 0):
            file = pq.ParquetFile(source, pre_buffer=True)
        columns = self._checked(file, meta)
        first_row = 0
        with ThreadPoolExecutor(1, thread_name_prefix="aioflux-parquet") as ahead:
            # One row group is used while the next one arrives.
            groups = iter(range(file.num_row_groups))
            coming = [ahead.submit(file.read_row_group, g, columns) for g in _first(groups)]
            while coming:
                with _named(pyarrow, meta, first_row):
                    table = coming.pop().result()
                coming = [ahead.submit(file.read_row_group, g, columns) for g in _first(groups)]
                yield table
                first_row += table.num_rows

    def _checked(self, file: Any, meta: ObjectMeta) -> list[str] | None:
        """Return the columns; pyarrow would leave out in silence those that are not there."""
        if self.columns is None:
            return None
        there = file.schema_arrow.names
        if missing := [
            name for name in self.columns if name not in there and name.split(".")[0] not in there
        ]:
            raise ValueError(
                f"{meta.uri} has no column {', '.join(missing)}, but {', '.join(there)}"
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
    arrives, so that two are held. Needs pyarrow: `pip install 'aioflux[parquet]'`.

    Args:
        columns: Names of the columns to read, those of nested fields with dots; all by default.
        items: "rows" for a dict of each row; "tables" for a pyarrow.Table of each row group, which
            is much faster where the columns are used as such.

    Raises:
        TypeError: `columns` is one string.
        ValueError: There are no such items.
    """
    if isinstance(columns, str):
        raise TypeError(f"columns must be several names, not the string {columns!r}")
    if items not in {"rows", "tables"}:
        raise ValueError(f'items must be "rows" or "tables", not {items!r}')
    return _Parquet(None if columns is None else tuple(columns), items)


def _imported() -> tuple[Any, Any]:
    try:
        return import_module("pyarrow"), import_module("pyarrow.parquet")
    except ModuleNotFoundError as exc:
        raise ModuleNotFoundError(
            "records=parquet() needs pyarrow: pip install 'aioflux[parquet]'", name=exc.name
        ) from exc


def _first(groups: Iterator[int]) -> list[int]:
    return [] if (group := next(groups, None)) is None else [group]


@contextmanager
def _named(pyarrow: Any, meta: ObjectMeta, number: int) -> Iterator[None]:
    """Name the object and the first row of what pyarrow cannot read."""
    broken = cast("tuple[type[Exception], ...]", (pyarrow.ArrowException, OSError))
    try:
        yield
    except StorageError:  # of the reads themselves
        raise
    except broken as exc:
        raise record_error(meta, number, f"it is no whole Parquet file: {exc}") from exc

"""Shares of a listing, and Arrow tables of objects and records. No I/O."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import accumulate, pairwise
from typing import TYPE_CHECKING, Any, Final, TypeVar

import pyarrow as pa  # type: ignore[import-untyped]
from ray.data.block import BlockAccessor

from aioflux.errors import RecordError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    from aioflux._values.meta import ObjectMeta

__all__ = [
    "OBJECT_TYPES",
    "grouped",
    "object_table",
    "row_size",
    "row_table",
    "select",
    "split_by_bytes",
]

T = TypeVar("T")

OBJECT_TYPES: Final = {
    "key": pa.string(),
    "bytes": pa.large_binary(),  # all objects of a block may have more than 2 GiB
    "size": pa.int64(),
    "generation": pa.string(),
    "uri": pa.string(),
}
"""Columns of objects, with their types."""

_OBJECT_WEIGHT: Final = 64 * 1024
"""Bytes that an object counts in addition to its size: a request takes as long as these bytes."""
_TABLE_BYTES: Final = 8 * 1024 * 1024
_TABLE_ROWS: Final = 4096


def split_by_bytes(sizes: Sequence[int], num_parts: int) -> list[tuple[int, int]]:
    """Return up to `num_parts` ranges of indexes with about the same number of bytes each."""
    ends = list(accumulate(size + _OBJECT_WEIGHT for size in sizes))
    bounds, part = [0], 1
    for index, end in enumerate(ends, 1):
        if end * num_parts >= ends[-1] * part:
            bounds.append(index)
            part = end * num_parts // ends[-1] + 1
    return list(pairwise(bounds))


def grouped(items: Iterable[T], size: Callable[[T], int]) -> Iterator[list[T]]:
    """Yield lists of consecutive items; a list ends at 8 MiB or 4096 items."""
    group: list[T] = []
    num_bytes = 0
    for item in items:
        group.append(item)
        num_bytes += size(item)
        if num_bytes >= _TABLE_BYTES or len(group) >= _TABLE_ROWS:
            yield group
            group, num_bytes = [], 0
    if group:
        yield group


def object_table(
    objects: Sequence[tuple[str, ObjectMeta, bytes]], columns: Sequence[str]
) -> pa.Table:
    """Return the rows of objects, which are given as name, metadata and bytes."""
    values: dict[str, list[Any]] = {
        "key": [name for name, _, _ in objects],
        "bytes": [data for _, _, data in objects],
        "size": [meta.size for _, meta, _ in objects],
        "generation": [meta.generation for _, meta, _ in objects],
        "uri": [meta.uri for _, meta, _ in objects],
    }
    arrays = {name: pa.array(values[name], OBJECT_TYPES[name]) for name in columns or ["size"]}
    return select(pa.table(arrays), columns)


def row_size(record: Any) -> int:
    """Return the approximate number of bytes of a record."""
    values = record.values() if isinstance(record, Mapping) else (record,)
    return sum(len(each) if isinstance(each, bytes | str) else 16 for each in values)


def row_table(
    records: Sequence[tuple[str, Any]], columns: Sequence[str] | None, *, include_uri: bool
) -> pa.Table:
    """Return the table of records, which are given with the uri of their object.

    The columns are the union of the keys; a record without one of them has a null.

    Raises:
        RecordError: The values of a column have no common type.
    """
    rows = [record if isinstance(record, Mapping) else {"item": record} for _, record in records]
    if include_uri:
        rows = [{**row, "uri": uri} for row, (uri, _) in zip(rows, records, strict=True)]
    arrays: dict[str, pa.Array] = {}
    for name in dict.fromkeys(name for row in rows for name in row) if columns is None else columns:
        try:
            arrays[name] = pa.array([row.get(name) for row in rows])
        except (pa.ArrowException, TypeError, OverflowError) as exc:
            raise RecordError(
                f"the values of {name!r} in the records of {records[0][0]} to {records[-1][0]} "
                f"have no common Arrow type ({exc}); convert them in a `records` function",
                uri=records[0][0],
            ) from exc
    return select(pa.table(arrays or {"item": pa.nulls(len(rows))}), list(arrays))


def select(table: pa.Table, columns: Sequence[str]) -> pa.Table:
    """Return some columns of a table. Ray counts the rows even if there are no columns."""
    return BlockAccessor.for_block(table).select(list(columns))

"""Shares of a listing, and Arrow tables of objects and records. No I/O."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import accumulate, pairwise
from typing import TYPE_CHECKING, Any, Final, TypeVar

import pyarrow as pa  # type: ignore[import-untyped]
from ray.data.block import BlockAccessor

from aioflux._values.dataset_keys import WrittenKey
from aioflux.errors import RecordError

if TYPE_CHECKING:
    from aioflux._values.meta import ObjectMeta

T = TypeVar("T")

OBJECT_TYPES: Final = {
    "key": pa.string(),
    "bytes": pa.large_binary(),  # a block may have more than 2 GiB
    "size": pa.int64(),
    "generation": pa.string(),
    "uri": pa.string(),
}
_OBJECT_WEIGHT: Final = 64 * 1024
"""Bytes that are added to the size of an object: a request takes as long as these bytes."""
_TASK_WEIGHT: Final = 128 * 1024 * 1024
"""Bytes of a read task, with `_OBJECT_WEIGHT` for each object; the size of a block of Ray."""


def split_by_bytes(sizes: Sequence[int], num_parts: int) -> list[tuple[int, int]]:
    """Return up to `num_parts` ranges of indexes with about the same number of bytes each."""
    ends = list(accumulate(size + _OBJECT_WEIGHT for size in sizes))
    bounds, part = [0], 1
    for index, end in enumerate(ends, 1):
        if end * num_parts >= ends[-1] * part:
            bounds.append(index)
            part = end * num_parts // ends[-1] + 1
    return list(pairwise(bounds))


def num_tasks(num_bytes: int, num_objects: int, num_cpus: int) -> int:
    """Return the number of read tasks: two for each processor, or more for tasks of 128 MiB."""
    return max(2 * num_cpus, (num_bytes + _OBJECT_WEIGHT * num_objects) // _TASK_WEIGHT)


def grouped(items: Iterable[T], size: Callable[[T], int]) -> Iterator[list[T]]:
    """Yield lists of consecutive items; a list ends at 8 MiB or 4096 items."""
    group: list[T] = []
    num_bytes = 0
    for item in items:
        group.append(item)
        num_bytes += size(item)
        if num_bytes >= 8 * 1024 * 1024 or len(group) >= 4096:
            yield group
            group, num_bytes = [], 0
    if group:
        yield group


def object_table(objects: Sequence[tuple[ObjectMeta, bytes]], columns: Sequence[str]) -> pa.Table:
    """Return a table with a row for each object; keys without what `write_objects` has added."""

    def values(name: str) -> list[Any]:
        if name == "bytes":
            return [data for _, data in objects]
        values = [getattr(meta, name) for meta, _ in objects]
        return [WrittenKey.parse(key).name or key for key in values] if name == "key" else values

    arrays = {name: pa.array(values(name), OBJECT_TYPES[name]) for name in columns or ["size"]}
    return select(pa.table(arrays), columns)


def row_size(record: Any) -> int:
    """Return the approximate number of bytes of a record."""
    values = record.values() if isinstance(record, Mapping) else (record,)
    return sum(len(each) if isinstance(each, bytes | str) else 16 for each in values)


def row_table(
    records: Sequence[tuple[str, Any]], columns: Sequence[str] | None, *, include_uri: bool
) -> pa.Table:
    """Return a table with a row for each record, given with the uri of its object.

    Without `columns`, the columns are the union of the keys. RecordError: the values of a column
    have no common Arrow type.
    """
    rows = [record if isinstance(record, Mapping) else {"item": record} for _, record in records]
    if include_uri:
        rows = [{**row, "uri": uri} for row, (uri, _) in zip(rows, records, strict=True)]
    arrays: dict[str, pa.Array] = {}
    for name in dict.fromkeys(name for row in rows for name in row) if columns is None else columns:
        try:
            arrays[name] = pa.array([row.get(name) for row in rows])
        except (pa.ArrowException, TypeError, OverflowError) as exc:
            first, last = records[0][0], records[-1][0]
            message = f"{name!r} has no common Arrow type in the records of {first} to {last}"
            raise RecordError(f"{message}: {exc}; convert it", uri=first) from exc
    return select(pa.table(arrays or {"item": pa.nulls(len(rows))}), list(arrays))


def select(table: pa.Table, columns: Sequence[str]) -> pa.Table:
    """Return some columns of a table. Without columns, the table keeps its number of rows."""
    return BlockAccessor.for_block(table).select(list(columns))

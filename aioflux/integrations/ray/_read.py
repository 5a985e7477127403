"""read_objects: a Ray dataset of the objects below a uri, or of their records.

driver: one listing -> shares of about the same number of bytes
task:   share, pinned -> objects, prefetched -> records -> tables, while further objects arrive
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Generator
from contextlib import closing
from dataclasses import dataclass, replace
from itertools import chain, groupby
from typing import TYPE_CHECKING, Any, ClassVar, Final, Literal, TypeAlias, cast

import pyarrow as pa  # type: ignore[import-untyped]
import ray.data
from ray.data.block import BlockMetadata
from ray.data.datasource import Datasource, ReadTask

from aioflux import sync
from aioflux._values.listing import Listing
from aioflux.errors import NotFoundError
from aioflux.integrations.ray._blocks import (
    OBJECT_TYPES,
    grouped,
    object_table,
    row_size,
    row_table,
    select,
    split_by_bytes,
)
from aioflux.integrations.ray._task_store import MAX_IN_FLIGHT_PER_NODE, TaskStore
from aioflux.store import WRITTEN_PREFIX

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

    from typing_extensions import Unpack

    from aioflux._values.meta import ObjectMeta
    from aioflux.data import Records
    from aioflux.options import StoreOptions

__all__ = ["MANIFEST_KEY", "object_name", "read_objects"]

OnError: TypeAlias = Literal["raise", "skip"] | Callable[[Exception, str], None]

MANIFEST_KEY: Final = "aioflux-manifest"
"""Default key of a manifest."""
_ROW_BYTES: Final = 128
"""Estimated memory of an object without its bytes."""
_PARQUET_RATIO: Final = 4
"""Estimated memory of rows, in bytes for each byte of Parquet."""

_log = logging.getLogger("aioflux")


def read_objects(
    uri: str,
    *,
    records: Records[Any] | None = None,
    columns: Sequence[str] | None = None,
    include_uri: bool = False,
    manifest: str | None = None,
    parallelism: int | None = None,
    on_error: OnError = "raise",
    max_in_flight_per_node: int = MAX_IN_FLIGHT_PER_NODE,
    ray_options: Mapping[str, Any] | None = None,
    **options: Unpack[StoreOptions],
) -> ray.data.Dataset:
    """Return a Ray dataset of the objects below a uri, or of their records.

    The objects are listed once, before the function returns. Every task, repeated or not, reads the
    listed generations: if an object was replaced since, its read raises an error. Failed requests
    are retried by aioflux, and not by Ray.

    Args:
        uri: Objects to read: a bucket or a prefix.
        records: Decoder of the records of an object, such as `jsonl()`, `tar()` or `parquet()` of
            `aioflux.data`. Each record is a row: a dict has a column for each key, a pyarrow.Table
            is many rows, another record is in the column `item`. By default each object is a row
            with the columns `key`, `bytes`, `size`, `generation` and `uri`.
        columns: Columns to read, all by default. Without `bytes`, no object is read; of Parquet,
            only these columns are. Other records without one of the columns have a null.
        include_uri: Add the uri of its object to each record as the column `uri`, which replaces a
            column of this name.
        manifest: Key of a manifest below `uri`, written by `write_objects` or `save_manifest`,
            which is read instead of listing. By default the objects are listed, and if there is a
            key `aioflux-manifest`, which `write_objects` writes by default, this manifest is read.
        parallelism: Number of read tasks, at most one for each object; chosen by Ray by default.
        on_error: "raise" ends the execution at an object that cannot be read or decoded; "skip"
            logs a warning and skips the rest of the object; a function of the error and the uri,
            called in the task, skips if it returns.
        max_in_flight_per_node: Requests in flight of all read tasks of a node; 256 by default. The
            tasks that fit on a node have equal shares, of at least one request, and each has at
            most the limits of `transfer`.
        ray_options: Further keywords of `ray.data.read_datasource`, such as `num_cpus`.
        **options: Keywords of `aioflux.open_store`, which are sent to the tasks.

    Raises:
        NotFoundError: There is no object below the uri, or no such manifest.
        TypeError: The options contain credentials, which are not sent to other processes.
        ValueError: An argument is invalid, or the manifest is damaged.
    """
    if not (callable(on_error) or on_error in {"raise", "skip"}):
        raise ValueError(f'on_error must be "raise", "skip" or a function, not {on_error!r}')
    if max_in_flight_per_node < 1:
        raise ValueError(f"max_in_flight_per_node must be above 0, not {max_in_flight_per_node!r}")
    if getattr(records, "items", None) == "rows":
        records = replace(cast("Any", records), items="tables")  # columns are faster than rows
    with sync.open_store(uri, **options) as store:
        listing = _list(store, manifest)
        tasks = TaskStore.of(store, options, max_in_flight_per_node, uri=listing.root)
    reader = _Reader(tasks, records, on_error, include_uri)
    keywords = dict(ray_options or {})
    if parallelism is not None:
        keywords["override_num_blocks"] = parallelism
    dataset: ray.data.Dataset = ray.data.read_datasource(
        ObjectDatasource(listing, reader, columns), **keywords
    )
    return dataset


def _list(store: sync.Store, manifest: str | None) -> Listing:
    if manifest is None:
        listing = store.list_all().without_directories()
        if not listing:
            raise NotFoundError(f"there is no object below {store.uri}", uri=store.uri)
        if MANIFEST_KEY not in listing.keys:
            return listing
    return Listing.from_bytes(store.get(manifest or MANIFEST_KEY))


def object_name(key: str) -> str:
    """Return the key of an object, and for an object of `write_objects` its key in its attempt."""
    _, _, written = f"/{key}".partition(f"/{WRITTEN_PREFIX}")
    return written.split("/", 3)[3] if written.count("/") >= 3 else key


class ObjectDatasource(Datasource):
    """Read tasks for the objects of one listing."""

    def __init__(self, listing: Listing, reader: _Reader, columns: Sequence[str] | None) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        if isinstance(columns, str):
            raise TypeError(f"columns must be a sequence of names, not the string {columns!r}")
        if reader.records is None:
            columns = list(OBJECT_TYPES if columns is None else columns)
            if unknown := set(columns) - OBJECT_TYPES.keys():
                raise ValueError(f"objects have no column {unknown}, only {[*OBJECT_TYPES]}")
        elif columns is not None and reader.include_uri:
            columns = [*columns, "uri"]
        self._projection_map = None if columns is None else {name: name for name in columns}
        self._listing = listing
        self._reader = reader

    def supports_projection_pushdown(self) -> bool:
        """Return whether columns that a later operator does not need are not read."""
        return self._reader.records is None or self._reader.reads_parquet

    def estimate_inmemory_data_size(self) -> int:
        """Return the estimated size of all blocks, in bytes."""
        return self._estimate(self._listing)

    def _estimate(self, listing: Listing) -> int:
        if self._reader.records is None:
            has_bytes = "bytes" in (self._projection_map or ())
            return sum(listing.sizes) * has_bytes + _ROW_BYTES * len(listing)
        return sum(listing.sizes) * (_PARQUET_RATIO if self._reader.reads_parquet else 1)

    def get_read_tasks(
        self, parallelism: int, per_task_row_limit: int | None = None, data_context: Any = None
    ) -> list[ReadTask]:
        """Return up to `parallelism` tasks, of about the same number of bytes each."""
        columns = self._get_data_columns()
        schema = None
        # Ray takes the number of rows for the result of `count`, so that it must be exact.
        is_exact = self._reader.records is None and self._reader.on_error == "raise"
        if self._reader.records is None and columns:
            schema = pa.schema([(name, OBJECT_TYPES[name]) for name in columns])
        tasks = []
        for start, end in split_by_bytes(self._listing.sizes, max(1, parallelism)):
            share = self._listing[start:end]
            metadata = BlockMetadata(
                num_rows=len(share) if is_exact else None,
                size_bytes=self._estimate(share),
                input_files=None,
                exec_stats=None,
            )
            read = _ReadShare(self._reader, share, columns)
            tasks.append(ReadTask(read, metadata, schema, per_task_row_limit))
        return tasks


@dataclass(frozen=True)
class _Reader:
    """Settings of all read tasks of a dataset."""

    tasks: TaskStore
    records: Records[Any] | None
    on_error: OnError
    include_uri: bool

    @property
    def reads_parquet(self) -> bool:
        return hasattr(self.records, "reads_parts")

    def handle(self, error: Exception, uri: str) -> None:
        """Raise the error, or return if the object is skipped."""
        if isinstance(error, MemoryError) or self.on_error == "raise":
            raise error
        if callable(self.on_error):
            self.on_error(error, uri)
        else:
            _log.warning("skipped %s: %s: %s", uri, type(error).__name__, error)


@dataclass(frozen=True)
class _ReadShare:
    """Function of one read task.

    A repeated task must yield the same tables: objects are read in the order of the listing, and
    the tables do not depend on the times at which they arrive.
    """

    reader: _Reader
    share: Listing
    columns: list[str] | None
    __name__: ClassVar[str] = "read_objects"  # Ray writes it into warnings

    def __call__(self) -> Iterator[pa.Table]:
        """Yield tables while further objects are read."""
        if self.reader.records is not None:
            yield from self._record_tables(self.reader.records)
            return
        columns = self.columns or []
        with closing(self._objects("bytes" in columns)) as objects:
            for group in grouped(objects, lambda row: row[1].size):
                yield object_table(group, columns)

    def _objects(self, has_bytes: bool) -> Generator[tuple[str, ObjectMeta, bytes], None, None]:
        if not has_bytes:
            yield from ((object_name(meta.key), meta, b"") for meta in self.share)
            return
        with closing(_fetch(self.reader.tasks.open(), self.share)) as fetched:
            for meta, data in fetched:
                if meta is None:
                    self.reader.handle(data, data.uri)
                else:
                    yield object_name(meta.key), meta, data

    def _record_tables(self, records: Records[Any]) -> Iterator[pa.Table]:
        columns = self.columns
        include_uri = self.reader.include_uri and (columns is None or "uri" in columns)
        if columns is not None and self.reader.reads_parquet:
            names = tuple(name for name in columns if not (include_uri and name == "uri"))
            records = replace(cast("Any", records), columns=names)
        with closing(self._records(records)) as pairs:
            for is_table, each in groupby(pairs, lambda pair: isinstance(pair[1], pa.Table)):
                if not is_table:
                    for group in grouped(each, lambda pair: row_size(pair[1])):
                        yield row_table(group, columns, include_uri=include_uri)
                    continue
                for uri, table in each:
                    if include_uri:
                        others = [name for name in table.column_names if name != "uri"]
                        uris = pa.array([uri] * table.num_rows, pa.string())
                        table = table.select(others).append_column("uri", uris)
                    yield table if columns is None else select(table, columns)

    def _records(self, records: Records[Any]) -> Generator[tuple[str, Any], None, None]:
        """Yield each record with the uri of its object."""
        with closing(self._decoded(records)) as objects:
            for uri, values in objects:
                try:
                    for value in values:
                        yield uri, value
                except Exception as exc:
                    self.reader.handle(exc, uri)

    def _decoded(self, records: Records[Any]) -> Generator[tuple[str, Iterator[Any]], None, None]:
        """Yield uri and records of each object. Large objects are streamed, others prefetched."""
        from aioflux.data._records.formats import records_of_sample, stream_records, takes_stream
        from aioflux.data._sample import make_sample

        store = self.reader.tasks.open()
        transfer = store.transfer
        reads_parts = getattr(records, "reads_parts", False)
        limit = transfer.range_size_bytes if reads_parts else transfer.max_buffered_bytes
        streams = takes_stream(records)
        whole = (meta for meta in self.share if not (streams and meta.size > limit))
        with closing(_fetch(store, whole)) as fetched:
            for meta in self.share:
                if takes_stream(records) and meta.size > limit:
                    prefetch_bytes = transfer.max_buffered_bytes
                    yield (
                        meta.uri,
                        stream_records(store, meta, records, prefetch_bytes=prefetch_bytes),
                    )
                    continue
                found, data = next(fetched)
                if found is None:
                    self.reader.handle(data, data.uri)
                else:
                    yield found.uri, records_of_sample(records, make_sample(found, data))


def _fetch(store: sync.Store, metas: Iterable[ObjectMeta]) -> Generator[Any, None, None]:
    """Yield `(meta, data)` of each object in order, or `(None, error)`."""
    with closing(cast("Generator[Any, None, None]", store.try_fetch_batches(metas))) as batches:
        yield from chain.from_iterable(batches)

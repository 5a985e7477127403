"""read_objects: a Ray dataset of the objects below a uri, or of their records.

driver: one listing -> shares of about the same number of bytes
task:   share, pinned -> objects, prefetched -> records -> tables, while further objects arrive
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from itertools import chain, groupby
from math import inf
from typing import TYPE_CHECKING, Any, ClassVar, Literal, TypeAlias, cast

import pyarrow as pa  # type: ignore[import-untyped]
import ray
import ray.data
from ray.data.block import BlockMetadata
from ray.data.datasource import Datasource, ReadTask

from aioflux import sync
from aioflux._values.dataset_keys import MANIFEST_KEY, WrittenKey
from aioflux._values.listing import Listing
from aioflux._values.uri import join_uri
from aioflux.errors import NotFoundError
from aioflux.integrations.ray import _tables
from aioflux.integrations.ray._tables import OBJECT_TYPES
from aioflux.integrations.ray._task_store import TaskStore
from aioflux.options import check_count

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from aioflux._values.meta import ObjectMeta
    from aioflux.data import Records
    from aioflux.options import StoreOptions

OnError: TypeAlias = Literal["raise", "skip"] | Callable[[Exception, str], None]

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
    max_in_flight_per_node: int = 256,
    ray_options: Mapping[str, Any] | None = None,
    **options: Unpack[StoreOptions],
) -> ray.data.Dataset:
    """Return a Ray dataset of the objects below a uri, or of their records.

    The objects are listed once, before the function returns. Every task, also a repeated one, reads
    the listed generations: if an object was replaced since, its read raises an error. aioflux
    retries failed requests, and Ray does not.

    Args:
        uri: Objects to read: a bucket or a prefix.
        records: Decoder of the records of an object, such as `jsonl()`, `tar()` or `parquet()` of
            `aioflux.data`. A dict is a row with a column for each key, a pyarrow.Table has many
            rows, and another record is a row with the column `item`. By default each object is a
            row with the columns `key`, `bytes`, `size`, `generation` and `uri`.
        columns: Columns to read, all by default. Without `bytes`, no object is read; of Parquet,
            only these columns are. A record without one of the columns has a null there.
        include_uri: Add to each record the uri of its object, as the column `uri`.
        manifest: Key of a manifest below `uri`, written by `write_objects` or `save_manifest`, to
            read instead of listing. By default, `aioflux-manifest` is read if it is in the listing.
        parallelism: Number of read tasks, at most one for each object. By default two for each
            processor of the cluster, or more, so that each reads at most about 128 MiB.
        on_error: "raise"; "skip" logs a warning and skips the rest of an object that cannot be read
            or decoded; a function of the error and the uri skips if it returns. If a repeated task
            does not skip the same objects, rows of other objects may be missing or doubled.
        max_in_flight_per_node: Requests in flight of all read tasks of a node; 256 by default. The
            tasks that a node's processors can run at once have equal shares, of at least one
            request. The limits of `transfer` apply to each task.
        ray_options: Further keywords of `ray.data.read_datasource`, such as `num_cpus`.
        **options: Keywords of `aioflux.open_store`, which are sent to the tasks.

    Raises:
        NotFoundError: There is no object below the uri, or no such manifest, or the objects are of
            a write that has not ended.
        TypeError: The options contain credentials, which are not sent to other processes.
        ValueError: An argument or the uri (`memory://`) is invalid, or the manifest is damaged.
    """
    if not (callable(on_error) or on_error in {"raise", "skip"}):
        raise ValueError(f'on_error must be "raise", "skip" or a function, not {on_error!r}')
    if isinstance(columns, str):
        raise TypeError(f"columns must be a list of names, such as [{columns!r}]")
    if not (records is None or callable(records)):
        raise TypeError(f"records must be a decoder such as jsonl(), not {records!r}")
    check_count("parallelism", 1 if parallelism is None else parallelism)
    check_count("max_in_flight_per_node", max_in_flight_per_node)
    if getattr(records, "items", None) == "rows":
        records = replace(cast("Any", records), items="tables")  # columns are faster than rows
    with sync.open_store(uri, **options) as store:
        tasks = TaskStore.of(store, options, max_in_flight_per_node=max_in_flight_per_node)
        if manifest is None:
            listing, manifests = store.list_all().without_directories().without_manifests()
            if MANIFEST_KEY in manifests:
                manifest = MANIFEST_KEY
            elif manifests:
                uri = join_uri(store.uri, manifests[0])
                _log.warning("%s is left out; manifest= reads what it lists", uri)
        if manifest is not None:
            uri = join_uri(store.uri, manifest)
            listing = Listing.from_bytes(store.get(manifest), uri=uri)
        elif not listing:
            raise NotFoundError(f"there is no object below {store.uri}", uri=store.uri)
        elif any(key.startswith("data-") and WrittenKey.parse(key).attempt for key in listing.keys):
            message = f"{store.uri} has objects of write_objects, but no manifest; the write"
            raise NotFoundError(f"{message} has not ended, or was killed", uri=store.uri)
    tasks = replace(tasks, uri=listing.root or tasks.uri)
    reader = _ReadShare(tasks, records, on_error, include_uri)
    source = ObjectDatasource(listing, reader, columns, parallelism)
    dataset: ray.data.Dataset = ray.data.read_datasource(
        source, override_num_blocks=source.num_tasks(), **(ray_options or {})
    )
    return dataset


class ObjectDatasource(Datasource):
    """Read tasks for the objects of one listing."""

    def __init__(
        self,
        listing: Listing,
        reader: _ReadShare,
        columns: Sequence[str] | None,
        parallelism: int | None = None,
    ) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        if reader.records is None:
            columns = list(OBJECT_TYPES if columns is None else columns)
            if unknown := set(columns) - OBJECT_TYPES.keys():
                raise ValueError(f"objects have no column {unknown}, only {[*OBJECT_TYPES]}")
        elif columns is not None and reader.include_uri:
            columns = [*columns, "uri"]
        self._projection_map = None if columns is None else {name: name for name in columns}
        self._listing = listing
        self._reader = reader
        self._parallelism = parallelism

    def supports_projection_pushdown(self) -> bool:
        """Return whether only the columns that later operators need are read."""
        return self._reader.records is None or self._reader.reads_parquet

    def estimate_inmemory_data_size(self) -> int:
        """Return the estimated size of all blocks, in bytes."""
        return self._estimate(self._listing)

    def num_tasks(self) -> int:
        """Return the number of read tasks.

        Ray's own number makes short tasks, which begin and end with few requests in flight.
        """
        if self._parallelism is not None:
            return self._parallelism
        if not ray.is_initialized():
            ray.init()  # as Ray Data does
        cluster: Any = ray.cluster_resources
        num_bytes, num_cpus = self._estimate(self._listing), int(cluster().get("CPU", 1))
        return _tables.num_tasks(num_bytes, len(self._listing), num_cpus)

    def _estimate(self, listing: Listing) -> int:
        if self._reader.records is None:  # 128 bytes for the other columns of an object
            has_bytes = "bytes" in (self._projection_map or ())
            return sum(listing.sizes) * has_bytes + 128 * len(listing)
        return sum(listing.sizes) * (4 if self._reader.reads_parquet else 1)

    def get_read_tasks(
        self, parallelism: int, per_task_row_limit: int | None = None, data_context: Any = None
    ) -> list[ReadTask]:
        """Return up to `parallelism` tasks, of about the same number of bytes each."""
        columns, schema, reader = self._get_data_columns(), None, self._reader
        if reader.records is None and columns:
            schema = pa.schema([(name, OBJECT_TYPES[name]) for name in columns])
        # Ray returns this number from `count`, so it must be exact.
        is_exact = reader.records is None and reader.on_error == "raise"

        def task(share: Listing) -> ReadTask:
            share = share[:per_task_row_limit] if is_exact else share
            num_rows, num_bytes = len(share) if is_exact else None, self._estimate(share)
            metadata = BlockMetadata(
                num_rows=num_rows, size_bytes=num_bytes, exec_stats=None, input_files=None
            )
            read = replace(reader, share=share, columns=columns)
            return ReadTask(read, metadata, schema, per_task_row_limit)

        num_tasks = max(1, min(parallelism, self.num_tasks()))  # fewer with fewer columns
        shares = _tables.split_by_bytes(self._listing.sizes, num_tasks)
        return [task(self._listing[start:end]) for start, end in shares]


@dataclass(frozen=True)
class _ReadShare:
    """Function that Ray calls in one read task.

    A repeated task must yield the same tables: objects are read in the order of the listing, and
    the tables do not depend on the times at which they are received.
    """

    tasks: TaskStore
    records: Records[Any] | None
    on_error: OnError
    include_uri: bool
    share: Sequence[ObjectMeta] = ()
    columns: list[str] | None = None
    __name__: ClassVar[str] = "read_objects"  # Ray writes it into warnings

    @property
    def reads_parquet(self) -> bool:
        return hasattr(self.records, "reads_parts")

    def __call__(self) -> Iterator[pa.Table]:
        """Yield tables while further objects are read."""
        if self.records is not None:
            yield from self._record_tables(self.records)
            return
        columns = self.columns or []
        objects: Any = ((meta, b"") for meta in self.share)
        if "bytes" in columns:
            objects = self._fetch(self.tasks.open(), inf)
        with closing(objects):
            for group in _tables.grouped(objects, lambda pair: pair[0].size):
                yield _tables.object_table(group, columns)

    def _fetch(self, store: sync.Store, limit: float) -> Generator[tuple[ObjectMeta, Any]]:
        """Yield the bytes of each object that can be read, or None above `limit` bytes."""
        whole = (meta for meta in self.share if meta.size <= limit)
        with closing(cast("Any", store.try_fetch_batches(whole))) as batches:
            fetched = chain.from_iterable(batches)
            for meta in self.share:
                found, data = cast("Any", next(fetched) if meta.size <= limit else (meta, None))
                if found is None:
                    self._handle(data, meta.uri)
                else:
                    yield meta, data

    def _handle(self, error: Exception, uri: str) -> None:
        """Raise the error, or return if the object is skipped."""
        if isinstance(error, MemoryError) or self.on_error == "raise":
            raise error
        if callable(self.on_error):
            self.on_error(error, uri)
        else:
            _log.warning("skipped %s: %s: %s", uri, type(error).__name__, error)

    def _record_tables(self, records: Records[Any]) -> Iterator[pa.Table]:
        columns = self.columns
        include_uri = self.include_uri and (columns is None or "uri" in columns)
        if columns is not None and self.reads_parquet:
            names = tuple(name for name in columns if not (include_uri and name == "uri"))
            records = replace(cast("Any", records), columns=names)
        with closing(self._records(records)) as pairs:
            for is_table, each in groupby(pairs, lambda pair: isinstance(pair[1], pa.Table)):
                if not is_table:
                    for group in _tables.grouped(each, lambda pair: _tables.row_size(pair[1])):
                        yield _tables.row_table(group, columns, include_uri=include_uri)
                    continue
                for uri, table in each:
                    shown = table
                    if include_uri:
                        others = [name for name in table.column_names if name != "uri"]
                        uris = pa.array([uri] * table.num_rows, pa.string())
                        shown = table.select(others).append_column("uri", uris)
                    yield shown if columns is None else _tables.select(shown, columns)

    def _records(self, records: Records[Any]) -> Generator[tuple[str, Any]]:
        """Yield each record with the uri of its object. Large objects are streamed."""
        from aioflux.data._records.formats import records_of_sample, stream_records, takes_stream
        from aioflux.data._sample import make_sample

        store = self.tasks.open()
        buffered = store.transfer.max_buffered_bytes
        reads_parts = getattr(records, "reads_parts", False)
        largest = store.transfer.range_size_bytes if reads_parts else buffered
        with closing(self._fetch(store, largest if takes_stream(records) else inf)) as objects:
            for meta, data in objects:
                try:
                    if data is not None:
                        values = records_of_sample(records, make_sample(meta, data))
                    else:
                        decode = cast("Any", records)
                        values = stream_records(store, meta, decode, prefetch_bytes=buffered)
                    for value in values:
                        yield meta.uri, value
                except Exception as exc:
                    self._handle(exc, meta.uri)

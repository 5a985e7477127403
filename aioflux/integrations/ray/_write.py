"""write_objects: a write of a Ray dataset that commits exactly once, by a manifest.

    task attempt: blocks -> objects below a prefix of its own, which listings omit
    driver:       accepted attempts -> list their objects -> manifest -> delete all other objects

The objects of an attempt that fails, or whose result Ray discards, are in no manifest. The driver
deletes them at the end. If it is killed, they remain until `Store.clean`.
"""

from __future__ import annotations

import logging
import uuid
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from ray.data.block import BlockAccessor
from ray.data.datasource import Datasink

from aioflux import sync
from aioflux._values.listing import Listing
from aioflux.errors import AlreadyExistsError, NotFoundError, StorageError
from aioflux.integrations.ray._encode import ENCODERS, python_rows, write_shards
from aioflux.integrations.ray._read import MANIFEST_KEY, object_name
from aioflux.integrations.ray._task_store import TaskStore
from aioflux.store import WRITTEN_PREFIX

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

    import pyarrow as pa  # type: ignore[import-untyped]
    import ray.data
    from ray.data._internal.execution.interfaces import TaskContext
    from ray.data.block import Block
    from ray.data.datasource import WriteResult
    from typing_extensions import Unpack

    from aioflux._values.meta import ObjectMeta
    from aioflux.options import StoreOptions
    from aioflux.store import WriteMode

__all__ = ["Attempt", "accepted_objects", "write_objects"]

_MAX_COPIES: Final = 32
"""Maximum number of copies in flight."""
_log = logging.getLogger("aioflux")


def write_objects(
    dataset: ray.data.Dataset,
    uri: str,
    *,
    format: str = "parquet",  # noqa: A002
    manifest: str = MANIFEST_KEY,
    mode: WriteMode = "create",
    copy: bool = False,
    max_object_bytes: int = 512 * 1024 * 1024,
    ray_options: Mapping[str, Any] | None = None,
    **options: Unpack[StoreOptions],
) -> ObjectMeta:
    """Execute a dataset and write each of its rows exactly once below a uri.

    Every attempt of a task writes its own objects below `aioflux-written-objects/`, which listings
    omit. When all tasks have ended, the manifest is written, which lists the objects of the
    accepted attempts. Before, nothing is visible; afterwards, the whole dataset is, for
    `read_objects` and for `from_manifest` of the PyTorch datasets. All other objects are deleted,
    or by `aioflux clean` if the driver was killed. `aioflux clean` also deletes the objects of a
    manifest that was deleted or replaced.

    Args:
        dataset: Rows to write.
        uri: Destination: a bucket or a prefix.
        format: "parquet"; "jsonl", in which NaN becomes null, and bytes base64; "tar", with a file
            for each column, whose name is the extension, and the name of the sample in the column
            `__key__`; or "objects", with the columns `key` and `bytes`.
        manifest: Key of the manifest below `uri`, without "/"; `aioflux-manifest` by default.
        mode: "create" raises an error if the manifest exists; "overwrite" replaces it.
        copy: After the commit, copy the objects on the service to keys that listings show, such as
            `00000-1a2b3c4d-0.parquet`, list the copies in the manifest, and delete the originals. A
            driver that is killed meanwhile leaves a committed manifest, and some of the copies.
        max_object_bytes: Size at which a task ends an object after a block; 512 MiB by default.
            Without effect for "objects".
        ray_options: Further keywords of `Dataset.write_datasink`, such as `concurrency`.
        **options: Keywords of `aioflux.open_store`, which are sent to the tasks.

    Returns:
        Metadata of the manifest.

    Raises:
        AlreadyExistsError: `mode` is "create" and the manifest exists, or a copy would replace an
            object.
        StorageError: The objects are not those that the tasks have written, because they were
            deleted during the write, or because two rows of "objects" have the same key.
        TypeError: The options contain credentials, which are not sent to other processes.
        ValueError: An argument is invalid, or a row does not fit the format.
    """
    if format not in {*ENCODERS, "objects"}:
        raise ValueError(f"format must be objects, {', '.join(ENCODERS)}, not {format!r}")
    if not manifest or "/" in manifest:
        raise ValueError(f'manifest must be a key without "/", not {manifest!r}')
    if mode not in {"create", "overwrite"} or (copy and mode == "overwrite"):
        raise ValueError(f'mode must be "create", or without copy= "overwrite", not {mode!r}')
    with sync.open_store(uri, **options) as store:
        commit = _Commit(store, manifest, mode, copy)
        sink = ObjectDatasink(TaskStore.of(store, options), format, max_object_bytes, commit)
        try:
            dataset.write_datasink(sink, **(ray_options or {}))
        except BaseException as exc:
            if not isinstance(exc, Exception):  # Ray calls `on_write_failed` for an Exception
                commit.abort(exc)
            raise
        assert commit.meta is not None
        return commit.meta


class Attempt(NamedTuple):
    """Result of one attempt of a write task."""

    name: str
    """Unique name, the first segment of the names of its objects."""
    num_objects: int
    num_bytes: int


def accepted_objects(
    names: Iterable[str], sizes: Iterable[int], attempts: Sequence[Attempt]
) -> list[int]:
    """Return the indexes of the objects of the accepted attempts, in a listing of all attempts.

    Raises:
        ValueError: The objects of an attempt are not those that it has written, or two objects have
            the same name in their attempts.
    """
    found = {attempt.name: [0, 0] for attempt in attempts}
    inner_names: set[str] = set()
    indexes = []
    for index, (name, size) in enumerate(zip(names, sizes, strict=True)):
        attempt_name, _, inner_name = name.partition("/")
        if attempt_name not in found:
            continue
        if inner_name in inner_names:
            raise ValueError(f"two rows have the key {inner_name!r}")
        inner_names.add(inner_name)
        indexes.append(index)
        found[attempt_name][0] += 1
        found[attempt_name][1] += size
    for name, *written in attempts:
        if found[name] != written:
            raise ValueError(
                f"of the attempt {name} [objects, bytes] are {found[name]}, not {written}; were "
                "objects deleted during the write, or do two rows have the same key?"
            )
    return indexes


class ObjectDatasink(Datasink[Attempt]):
    """Write tasks whose attempts write objects of their own."""

    def __init__(
        self, tasks: TaskStore, object_format: str, max_bytes: int, commit: _Commit
    ) -> None:
        self._tasks = tasks
        self._format = object_format
        self._max_bytes = max_bytes
        self._prefix = commit.prefix
        self._commit: _Commit = commit

    def __getstate__(self) -> dict[str, Any]:
        """Return the state of the copy in a task, which does not commit."""
        return self.__dict__ | {"_commit": None}

    def on_write_start(self, schema: pa.Schema | None = None) -> None:
        """Raise AlreadyExistsError before the first task if the commit would raise it."""
        self._commit.start()

    def write(self, blocks: Iterable[Block], ctx: TaskContext) -> Attempt:
        """Write blocks, in the process of a task."""
        number, unique = f"{ctx.task_idx:05d}", uuid.uuid4().hex
        attempt = f"{number}-{unique}"
        store = self._tasks.open(self._prefix)
        tables = (BlockAccessor.for_block(block).to_arrow() for block in blocks)
        filled = (table for table in tables if table.num_rows)
        if self._format == "objects":
            sizes = [meta.size for meta in store.put_many(_pairs(f"{attempt}/", filled))]
        else:
            prefix = f"{attempt}/{number}-{unique[:8]}"
            sizes = [*write_shards(store, prefix, filled, self._format, self._max_bytes)]
        return Attempt(attempt, len(sizes), sum(sizes))

    def on_write_complete(self, write_result: WriteResult[Attempt]) -> None:
        """Make the objects of the accepted attempts visible."""
        self._commit.finish(write_result.write_returns)

    def on_write_failed(self, error: Exception) -> None:
        """Delete the objects of all attempts, unless the manifest may exist."""
        self._commit.abort(error)


def _pairs(prefix: str, tables: Iterable[pa.Table]) -> Iterator[tuple[str, bytes]]:
    for table in tables:
        for rows in python_rows(table.select(["key", "bytes"])):
            for row in rows:
                if not (row["key"] and isinstance(row["bytes"], bytes)):
                    raise ValueError(f"a row of an object needs key and bytes, not {row['key']!r}")
                yield f"{prefix}{row['key']}", row["bytes"]


class _Commit:
    """The driver's part of a write."""

    def __init__(self, store: sync.Store, manifest: str, mode: WriteMode, copies: bool) -> None:
        self.prefix = f"{WRITTEN_PREFIX}{manifest}/{uuid.uuid4().hex}/"
        self.meta: ObjectMeta | None = None
        self._store = store
        self._manifest = manifest
        self._mode: WriteMode = mode
        self._copies = copies
        self._may_exist = False
        """Whether the manifest may exist."""

    def start(self) -> None:
        """Raise AlreadyExistsError if the manifest exists and must not."""
        if self._mode == "create":
            try:
                uri = self._store.head(self._manifest).uri
            except NotFoundError:
                return
            raise AlreadyExistsError(f"{uri} exists; choose another uri or manifest", uri=uri)

    def finish(self, attempts: Sequence[Attempt]) -> None:
        """Write the manifest, copy its objects if requested, and delete all other objects."""
        listing = self._store.list_all(self.prefix)
        names = (key.removeprefix(self.prefix) for key in listing.keys)
        try:
            indexes = accepted_objects(names, listing.sizes, attempts)
        except ValueError as exc:
            uri = f"{listing.root}{self.prefix}"
            raise StorageError(f"could not commit the objects below {uri}: {exc}", uri=uri) from exc
        accepted = listing.pick(indexes)
        self._may_exist = True
        try:
            self.meta = self._store.put(self._manifest, accepted.to_bytes(), mode=self._mode)
        except AlreadyExistsError:
            self._may_exist = False
            raise
        if self._copies:
            self.meta = self._copy(accepted, self.meta)
            indexes = []
        self._delete(listing, kept=set(indexes))

    def _copy(self, accepted: Listing, manifest: ObjectMeta) -> ObjectMeta:
        def copy(meta: ObjectMeta) -> ObjectMeta:
            return self._store.copy(meta, object_name(meta.key), mode="create")

        with ThreadPoolExecutor(_MAX_COPIES) as executor:
            copies = sorted(executor.map(copy, accepted), key=lambda meta: meta.key.encode())
        generation = manifest.generation or None
        data = Listing(copies).to_bytes()
        return self._store.put(self._manifest, data, if_generation_match=generation)

    def abort(self, error: BaseException) -> None:
        """Delete the objects of all attempts, unless the manifest may exist."""
        if not self._may_exist:
            try:
                self._delete(self._store.list_all(self.prefix), kept=set())
            except StorageError as exc:
                error.add_note(f"objects below {self.prefix} remain until `aioflux clean`: {exc}")

    def _delete(self, listing: Listing, kept: set[int]) -> None:
        deleted = [meta for index, meta in enumerate(listing) if index not in kept]
        for error in self._store.delete_many(deleted).errors.values():
            _log.warning("an object remains until `aioflux clean`: %s", error)

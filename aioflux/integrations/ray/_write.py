"""write_objects: a write of a Ray dataset, which a manifest commits exactly once.

    task attempt: blocks -> objects below the uri, with names of this attempt -> their metadata
    driver:       accepted attempts -> delete the objects of other attempts -> manifest

The objects of an attempt that fails, or whose result Ray discards, are in no manifest. If the
driver was killed before it has deleted them, `Store.clean` does.
"""

from __future__ import annotations

import logging
import uuid
from collections import Counter
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

from ray.data.block import BlockAccessor
from ray.data.datasource import Datasink

from aioflux import sync
from aioflux._values.dataset_keys import MANIFEST_KEY, WrittenKey
from aioflux._values.listing import Listing
from aioflux._values.uri import join_uri
from aioflux.errors import (
    AlreadyExistsError,
    PermissionDeniedError,
    PreconditionFailedError,
    StorageError,
)
from aioflux.integrations.ray._encode import ENCODERS, write_rows, write_shards
from aioflux.integrations.ray._task_store import TaskStore
from aioflux.options import check_count

if TYPE_CHECKING:
    import ray.data
    from ray.data._internal.execution.interfaces import TaskContext
    from ray.data.block import Block
    from ray.data.datasource import WriteResult
    from typing_extensions import Unpack

    from aioflux._values.meta import ObjectMeta
    from aioflux.options import StoreOptions
    from aioflux.store import WriteMode

_log = logging.getLogger("aioflux")

_REFUSALS = (AlreadyExistsError, PermissionDeniedError, PreconditionFailedError)
"""Errors after which an object is certainly not written."""


def write_objects(
    dataset: ray.data.Dataset,
    uri: str,
    *,
    format: str = "parquet",  # noqa: A002
    manifest: str = MANIFEST_KEY,
    mode: WriteMode = "create",
    max_object_bytes: int = 512 * 1024 * 1024,
    ray_options: Mapping[str, Any] | None = None,
    **options: Unpack[StoreOptions],
) -> ObjectMeta:
    """Execute a dataset, write each of its rows exactly once, and return the manifest's metadata.

    Every attempt of a task writes its own objects below `uri`, such as
    `data-<write id>-00000-1a2b3c4d-00000.parquet`. When all tasks have ended, the driver deletes
    the objects of attempts that were not accepted, and writes the manifest, which lists all others.
    Then the dataset exists for `read_objects` and for `from_manifest` of the PyTorch datasets. A
    copy of all objects with the manifest is a dataset, too. `aioflux clean` deletes the objects of
    a killed driver, and of a manifest that was deleted, renamed or replaced.

    Args:
        dataset: Rows to write.
        uri: Destination: a bucket or a prefix.
        format: "parquet"; "jsonl", in which bytes become base64 text, and NaN and infinity null;
            "tar", with a file for each column, whose name is the extension, and the name of the
            sample in the column `__key__`, different in successive rows; or "objects", with the
            columns `key` and `bytes`: the object `data-<write id>-00000-1a2b3c4d/<key>`.
        manifest: Key of the manifest below `uri`: `aioflux-manifest`, or a name that begins so.
        mode: "create" raises an error if the manifest exists; "overwrite" replaces it. The objects
            of the replaced dataset remain until `aioflux clean`.
        max_object_bytes: Size above which a task begins another object with the next block; 512 MiB
            by default. Without effect for "objects".
        ray_options: Further keywords of `Dataset.write_datasink`, such as `concurrency`.
        **options: Keywords of `aioflux.open_store`, which are sent to the tasks.

    Raises:
        AlreadyExistsError: `mode` is "create" and the manifest exists.
        StorageError: Objects were deleted during the write, or two rows of "objects" have the same
            key.
        TypeError: The options contain credentials, which are not sent to other processes.
        ValueError: An argument is invalid, or a row does not fit the format.
    """
    if format not in {*ENCODERS, "objects"}:
        raise ValueError(f"format must be objects, {', '.join(ENCODERS)}, not {format!r}")
    if not manifest.startswith(MANIFEST_KEY) or "/" in manifest:
        raise ValueError(
            f'manifest must be "{MANIFEST_KEY}", or begin so, without "/", not {manifest!r}'
        )
    if mode not in {"create", "overwrite"}:
        raise ValueError(f'mode must be "create" or "overwrite", not {mode!r}')
    check_count("max_object_bytes", max_object_bytes)
    with sync.open_store(uri, **options) as store:
        if mode == "create" and manifest in store.list_all(manifest).keys:
            message = f"{manifest} exists below {store.uri}; choose another uri or manifest"
            raise AlreadyExistsError(message, uri=join_uri(store.uri, manifest))
        tasks = TaskStore.of(store, options)
        sink = ObjectDatasink(store, tasks, format, max_object_bytes, manifest, mode)
        try:
            dataset.write_datasink(sink, **(ray_options or {}))
        except BaseException as exc:
            if not isinstance(exc, Exception):  # Ray calls `on_write_failed` for an Exception
                sink.on_write_failed(exc)
            raise
        assert sink.meta is not None
        return sink.meta


def accepted_objects(found: Listing, attempts: Iterable[Listing]) -> tuple[Listing, list[int]]:
    """Return what accepted attempts have written, sorted, and the indexes of all else in `found`.

    Args:
        found: Listing of the objects of all attempts.
        attempts: The objects of each accepted attempt.

    Raises:
        ValueError: An object was not found, or two objects have the same name in their attempts.
    """
    written = Listing()
    for listing in attempts:
        written.extend(listing)
    keys = list(written.keys)
    names = [WrittenKey.parse(key).name or key for key in keys]
    if len(set(names)) < len(names):
        raise ValueError(f"two rows have the key {Counter(names).most_common(1)[0][0]!r}")
    sizes = dict(zip(keys, written.sizes, strict=True))
    if missing := sizes.items() - zip(found.keys, found.sizes, strict=True):
        raise ValueError(
            f"{len(missing)} objects are missing or have another size, such as {min(missing)[0]}; "
            "were objects deleted during the write, or stored on a disk of another node?"
        )
    others = [index for index, key in enumerate(found.keys) if key not in sizes]
    return written.pick(sorted(range(len(keys)), key=lambda index: keys[index].encode())), others


class ObjectDatasink(Datasink[Listing]):
    """Sink whose task attempts write separate objects, and whose driver commits by a manifest."""

    def __init__(
        self, store: sync.Store, tasks: TaskStore, extension: str, max_bytes: int, *commit: Any
    ) -> None:
        self.meta: ObjectMeta | None = None
        self._tasks = tasks
        self._store = store
        self._extension = extension
        self._max_bytes = max_bytes
        self._manifest, self._mode = commit
        self._write_id = f"data-{uuid.uuid4().hex}"
        self._may_be_committed = False

    def __getstate__(self) -> dict[str, Any]:
        """Return the state of the copy in a task, without the store of the driver."""
        return self.__dict__ | {"_store": None}

    def write(self, blocks: Iterable[Block], ctx: TaskContext) -> Listing:
        """Write blocks, in the process of a task, and return the metadata of the objects."""
        attempt = f"{self._write_id}-{ctx.task_idx:05d}-{uuid.uuid4().hex[:8]}"
        store = self._tasks.open()
        tables = (BlockAccessor.for_block(block).to_arrow() for block in blocks)
        filled = (table for table in tables if table.num_rows)
        if self._extension == "objects":
            return Listing(write_rows(store, f"{attempt}/", filled))
        return Listing(write_shards(store, attempt, filled, self._extension, self._max_bytes))

    def on_write_complete(self, write_result: WriteResult[Listing]) -> None:
        """Delete the objects of attempts that were not accepted, and write the manifest."""
        found = self._store.list_all(self._write_id)
        try:
            accepted, others = accepted_objects(found, write_result.write_returns)
        except ValueError as exc:
            uri = join_uri(self._tasks.uri, self._write_id)
            raise StorageError(f"could not commit the objects {uri}*: {exc}", uri=uri) from exc
        self._delete(found.pick(others))
        self._may_be_committed = True
        try:
            data = accepted.to_bytes(is_relative=True)
            self.meta = self._store.put(self._manifest, data, mode=self._mode)
        except _REFUSALS:
            self._may_be_committed = False
            raise

    def on_write_failed(self, error: BaseException) -> None:
        """Delete the objects of all attempts, unless the manifest may exist."""
        if not self._may_be_committed:
            try:
                self._delete(self._store.list_all(self._write_id))
            except StorageError as exc:
                error.add_note(f"objects {self._write_id}* remain until `aioflux clean`: {exc}")

    def _delete(self, listing: Listing) -> None:
        for error in self._store.delete_many(listing).errors.values():
            _log.warning("an object of the write remains: %s", error)

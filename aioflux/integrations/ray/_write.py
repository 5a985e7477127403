"""write_objects: a write of a Ray dataset, which a manifest commits exactly once.

    task attempt: blocks -> objects below a prefix of its own, which listings omit
    driver:       accepted attempts -> list their objects -> manifest -> delete all other objects

The objects of an attempt that fails, or whose result Ray discards, are in no manifest. The driver
deletes them at the end; if it was killed, `Store.clean` does.
"""

from __future__ import annotations

import logging
import uuid
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any, NamedTuple

from ray.data.block import BlockAccessor
from ray.data.datasource import Datasink

from aioflux import sync
from aioflux._values.listing import Listing
from aioflux.errors import (
    AlreadyExistsError,
    PermissionDeniedError,
    PreconditionFailedError,
    StorageError,
)
from aioflux.integrations.ray._encode import ENCODERS, object_pairs, write_shards
from aioflux.integrations.ray._read import MANIFEST_KEY
from aioflux.integrations.ray._tables import object_name
from aioflux.integrations.ray._task_store import TaskStore
from aioflux.options import check_count
from aioflux.store import WRITTEN_PREFIX

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    import ray.data
    from ray.data._internal.execution.interfaces import TaskContext
    from ray.data.block import Block
    from ray.data.datasource import WriteResult
    from typing_extensions import Unpack

    from aioflux._values.meta import ObjectMeta
    from aioflux.options import StoreOptions
    from aioflux.store import WriteMode

__all__ = ["WriteAttempt", "accepted_objects", "write_objects"]

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
    copy: bool = False,
    max_object_bytes: int = 512 * 1024 * 1024,
    ray_options: Mapping[str, Any] | None = None,
    **options: Unpack[StoreOptions],
) -> ObjectMeta:
    """Execute a dataset, write each of its rows exactly once, and return the manifest's metadata.

    Every attempt of a task writes its own objects below `aioflux-written-objects/`, which listings
    omit. When all tasks have ended, the driver writes the manifest, which lists the objects of the
    accepted attempts. Then the whole dataset is visible to `read_objects` and to `from_manifest` of
    the PyTorch datasets. The driver deletes all other objects. `aioflux clean` deletes those of a
    killed driver, and of a manifest that was deleted, renamed or replaced.

    Args:
        dataset: Rows to write.
        uri: Destination: a bucket or a prefix.
        format: "parquet"; "jsonl", in which NaN and infinity become null, and bytes base64; "tar",
            with a file for each column, whose name is the extension, and the name of the sample in
            the column `__key__`, different in successive rows; or "objects", with the columns `key`
            and `bytes`.
        manifest: Key of the manifest below `uri`, without "/"; `aioflux-manifest` by default.
        mode: "create" raises an error if the manifest exists; "overwrite" replaces it.
        copy: After the commit, copy the objects on the service to listed keys, such as
            `00000-1a2b3c4d-0.parquet`, list the copies in the manifest, and delete the originals.
            If that fails, nothing is left. If they cannot be deleted, or the driver is killed
            meanwhile, the dataset is committed (a note of the error says so), and some copies
            remain, which `aioflux clean` does not delete.
        max_object_bytes: Size above which a task begins another object with the next block; 512 MiB
            by default. Without effect for "objects".
        ray_options: Further keywords of `Dataset.write_datasink`, such as `concurrency`.
        **options: Keywords of `aioflux.open_store`, which are sent to the tasks.

    Raises:
        AlreadyExistsError: `mode` is "create" and the manifest exists, or the key of a copy.
        StorageError: Objects were deleted during the write, or two rows of "objects" have the same
            key.
        TypeError: The options contain credentials, which are not sent to other processes.
        ValueError: An argument is invalid, or a row does not fit the format, or with `copy` has
            the key of the manifest.
    """
    if format not in {*ENCODERS, "objects"}:
        raise ValueError(f"format must be objects, {', '.join(ENCODERS)}, not {format!r}")
    if not manifest or "/" in manifest:
        raise ValueError(f'manifest must be a key without "/", not {manifest!r}')
    if mode not in {"create", "overwrite"} or (copy and mode == "overwrite"):
        raise ValueError(f'mode must be "create", or without copy= "overwrite", not {mode!r}')
    check_count("max_object_bytes", max_object_bytes)
    with sync.open_store(uri, **options) as store:
        if mode == "create" and manifest in store.list_all(manifest).keys:
            message = f"{manifest} exists below {store.uri}; choose another uri or manifest"
            raise AlreadyExistsError(message, uri=f"{store.uri}{manifest}")
        tasks = TaskStore.of(store, options)
        sink = ObjectDatasink(store, tasks, format, max_object_bytes, manifest, mode, copy)
        try:
            dataset.write_datasink(sink, **(ray_options or {}))
        except BaseException as exc:
            if not isinstance(exc, Exception):  # Ray calls `on_write_failed` for an Exception
                sink.on_write_failed(exc)
            raise
        assert sink.meta is not None
        return sink.meta


class WriteAttempt(NamedTuple):
    """Result of one attempt of a write task."""

    name: str
    """Unique name, with which the names of its objects begin."""
    num_objects: int
    num_bytes: int


def accepted_objects(
    names: Iterable[str], sizes: Iterable[int], attempts: Sequence[WriteAttempt]
) -> list[int]:
    """Return the indexes of the objects of the accepted attempts in a listing of all attempts.

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
                "objects deleted during the write or stored on a disk of another node, or do two "
                "rows have the same key?"
            )
    return indexes


class ObjectDatasink(Datasink[WriteAttempt]):
    """Sink whose task attempts write separate objects, and whose driver commits by a manifest."""

    def __init__(
        self, store: sync.Store, tasks: TaskStore, extension: str, max_bytes: int, *commit: Any
    ) -> None:
        self.meta: ObjectMeta | None = None
        self._tasks = tasks
        self._store = store
        self._extension = extension
        self._max_bytes = max_bytes
        self._manifest, self._mode, self._copies = commit
        self._prefix = f"{WRITTEN_PREFIX}{self._manifest}/{uuid.uuid4().hex}/"
        self._may_be_committed = False
        self._copied: list[ObjectMeta] = []

    def __getstate__(self) -> dict[str, Any]:
        """Return the state of the copy in a task, without the store of the driver."""
        return self.__dict__ | {"_store": None}

    def write(self, blocks: Iterable[Block], ctx: TaskContext) -> WriteAttempt:
        """Write blocks, in the process of a task."""
        number, unique = f"{ctx.task_idx:05d}", uuid.uuid4().hex
        attempt = f"{number}-{unique}"
        store = self._tasks.open(self._prefix)
        tables = (BlockAccessor.for_block(block).to_arrow() for block in blocks)
        filled = (table for table in tables if table.num_rows)
        if self._extension == "objects":
            reserved = self._manifest if self._copies else None
            pairs = object_pairs(f"{attempt}/", filled, reserved)
            sizes = [meta.size for meta in store.put_many(pairs)]
        else:
            prefix = f"{attempt}/{number}-{unique[:8]}"
            sizes = [*write_shards(store, prefix, filled, self._extension, self._max_bytes)]
        return WriteAttempt(attempt, len(sizes), sum(sizes))

    def on_write_complete(self, write_result: WriteResult[WriteAttempt]) -> None:
        """Write the manifest, copy the objects if requested, and delete those of other attempts."""
        listing = self._store.list_all(self._prefix)
        names = (key.removeprefix(self._prefix) for key in listing.keys)
        try:
            indexes = accepted_objects(names, listing.sizes, write_result.write_returns)
        except ValueError as exc:
            uri = f"{self._tasks.uri}{self._prefix}"
            raise StorageError(f"could not commit the objects below {uri}: {exc}", uri=uri) from exc
        accepted = listing.pick(indexes)
        self._may_be_committed = True
        try:
            manifest = self._store.put(self._manifest, accepted.to_bytes(), mode=self._mode)
        except _REFUSALS:
            self._may_be_committed = False
            raise
        if self._copies:
            manifest = self._replace_by_copies(accepted, manifest)
            indexes = []
        self.meta = manifest
        self._delete(listing, set(indexes))

    def _replace_by_copies(self, accepted: Listing, manifest: ObjectMeta) -> ObjectMeta:
        is_sent = False  # whether the manifest may list the copies
        try:
            with ThreadPoolExecutor(32) as executor:
                list(executor.map(self._copy, accepted))
            copies = Listing(sorted(self._copied, key=lambda meta: meta.key.encode()))
            old, is_sent = manifest.generation or None, True
            return self._store.put(self._manifest, copies.to_bytes(), if_generation_match=old)
        except BaseException as exc:
            if (is_sent and not isinstance(exc, _REFUSALS)) or not self._roll_back(manifest):
                uri = f"{self._tasks.uri}{self._manifest}"
                exc.add_note(f"the dataset {uri} remains committed, with copies of objects")
            raise

    def _roll_back(self, manifest: ObjectMeta) -> bool:
        """Delete the copies, then the manifest; return whether both are deleted."""
        try:
            is_done = self._delete(self._copied, set()) and self._delete([manifest], set())
        except StorageError as exc:
            _log.warning("%s", exc)
            return False
        self._may_be_committed = not is_done
        return is_done

    def _copy(self, meta: ObjectMeta) -> None:
        self._copied.append(self._store.copy(meta, object_name(meta.key), mode="create"))

    def on_write_failed(self, error: BaseException) -> None:
        """Delete the objects of all attempts, unless the manifest may exist."""
        if not self._may_be_committed:
            try:
                self._delete(self._store.list_all(self._prefix), set())
            except StorageError as exc:
                error.add_note(f"objects below {self._prefix} remain until `aioflux clean`: {exc}")

    def _delete(self, listing: Iterable[ObjectMeta], kept: set[int]) -> bool:
        deleted = [meta for index, meta in enumerate(listing) if index not in kept]
        errors = self._store.delete_many(deleted).errors
        for error in errors.values():
            _log.warning("an object of the write remains: %s", error)
        return not errors

"""StorageWriter: saves of torch.distributed.checkpoint to a bucket.

    every rank    items -> <save_id>/__<rank>_<n>.distcp, keys that no save had before
    coordinator   .metadata, written last, if it still is what it was when the save began

A save is visible when `.metadata` is, and that names every other object with its size, checksum and
generation: whatever happens before leaves the checkpoint that was there.
"""

from __future__ import annotations

import dataclasses
import logging
import pickle
import secrets
from contextlib import ExitStack, contextmanager
from datetime import UTC, datetime
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

from torch.distributed.checkpoint import storage as dcp_storage
from torch.distributed.checkpoint.metadata import StorageMeta
from torch.futures import Future

from aioflux import bridge
from aioflux._errors import (
    AiofluxError,
    AlreadyExistsError,
    CheckpointCorruptError,
    CheckpointError,
    NotFoundError,
    TransientError,
)
from aioflux._uri import parse_uri
from aioflux.checkpoint._commit import (
    COMMIT_KEY,
    Commit,
    data_key,
    encode_commit,
    find_save_id,
    new_save_id,
)
from aioflux.checkpoint._objects import publish
from aioflux.checkpoint._steps import COMMIT_KEYS, decode, is_home
from aioflux.checkpoint.dcp._plan_writes import Placement, plan_objects
from aioflux.checkpoint.dcp._upload import (
    Upload,
    Written,
    describe,
    remove,
    upload_items,
    upload_objects,
)
from aioflux.store import open_store

if TYPE_CHECKING:
    import os
    from collections.abc import Iterable, Iterator, Mapping, Sequence
    from typing import Unpack

    from torch.distributed.checkpoint.metadata import Metadata
    from torch.distributed.checkpoint.planner import SavePlan, SavePlanner
    from torch.distributed.checkpoint.storage import WriteResult

    from aioflux._meta import ObjectMeta
    from aioflux._policy import StoreOptions
    from aioflux.checkpoint.compression import ZStandard
    from aioflux.store import Store, WriteMode

__all__ = ["StorageWriter"]

_log = logging.getLogger("aioflux")

_VERSION = "1.0.0"
"""Version of DCP's metadata."""

_PICKLE_PROTOCOL = 4
"""What every Python reads that torch runs on."""

_SCHEMES = ("gs://", "file://", "memory://")


class _Seen(NamedTuple):
    """A commit object that was there when the save began."""

    meta: ObjectMeta
    commit: Commit | None


class _Unfinished(NamedTuple):
    """A save that was begun and not committed."""

    store: Store
    keys: Sequence[str]
    save_id: str


class StorageWriter(dcp_storage.StorageWriter):
    """Writes checkpoints of `torch.distributed.checkpoint` to object storage.

        dcp.save(state, storage_writer=StorageWriter("gs://bucket/run-7/step-100"))

    Every rank makes one. Stock `FileSystemReader` loads a copy of the objects. What `dcp.save`
    raises is a `CheckpointException`, which is no `Exception`; its `failures` hold the errors of
    the ranks, each a `CheckpointError` that names the rank and the object.
    """

    def __init__(
        self,
        uri: str,
        *,
        objects_per_rank: int = 1,
        compression: ZStandard | None = None,
        mode: WriteMode = "overwrite",
        step: int | None = None,
        metrics: Mapping[str, float] | None = None,
        **options: Unpack[StoreOptions],
    ) -> None:
        """Sends nothing yet.

        Args:
            uri: Prefix of the checkpoint, such as `gs://bucket/run-7/step-100`.
            objects_per_rank: Data objects that each rank spreads its tensors over at most. Each is
                uploaded in parallel parts anyway; more are for readers that read objects whole.
            compression: Compress tensors, in frames that are still read by ranges. Stock readers
                need the class in their registry of extensions.
            mode: "overwrite" replaces the checkpoint of this uri once the new one is whole,
                "create" fails where there is one.
            step: Training step, for the commit object.
            metrics: Numbers that retention may choose by, for the commit object.
            options: `transfer`, `retry`, `timeouts`, `credentials`, `endpoint_url` and
                `ssl_context`, as `aioflux.open_store`.

        Raises:
            ValueError: The uri cannot be opened, or a setting has no effect with it.
        """
        if objects_per_rank < 1:
            raise ValueError(f"objects_per_rank must be 1 or more, not {objects_per_rank}")
        if mode not in {"overwrite", "create"}:
            raise ValueError(f'mode must be "overwrite" or "create", not {mode!r}')
        self.objects_per_rank = objects_per_rank
        self.compression = compression
        self.mode = mode
        self.step = step
        self.metrics = {name: float(value) for name, value in (metrics or {}).items()}
        self._options = options
        self._store = self._open(uri)
        self._rank: int | None = None
        self._is_collective = True
        self._commits = False
        self._save_id = ""
        self._seen: tuple[_Seen, ...] = ()
        self._unfinished: _Unfinished | None = None

    def __repr__(self) -> str:
        return f"<StorageWriter {self.checkpoint_id}>"

    def __getstate__(self) -> dict[str, Any]:
        pickle.dumps(self._store)  # refuses where that would carry a token along
        options = {name: value for name, value in self._options.items() if name != "progress"}
        return {**self.__dict__, "_options": options, "_seen": (), "_unfinished": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        bridge.close_when_dropped(self._store)

    def _open(self, uri: str) -> Store:
        store = open_store(uri, **self._options)
        bridge.close_when_dropped(store)
        return store

    @property
    def checkpoint_id(self) -> str:
        """Uri of the checkpoint that is written."""
        return self._store.uri.rstrip("/")

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """Tell whether this is a uri that a checkpoint can be written to; a path never is."""
        if not isinstance(checkpoint_id, str) or not checkpoint_id.startswith(_SCHEMES):
            return False
        try:
            parse_uri(checkpoint_id)
        except ValueError:
            return False
        return True

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Begin another save, to another uri where one is given; all settings stay.

        Raises:
            ValueError: It is not a whole uri, or was taken apart by `pathlib.Path`.
        """
        if checkpoint_id is None or checkpoint_id == "":
            return
        if not self.validate_checkpoint_id(checkpoint_id):
            raise ValueError(
                f"checkpoint_id must be a whole uri in a string, such as {self.checkpoint_id!r}, "
                f"not {checkpoint_id!r}; a Path drops a slash of gs://"
            )
        if str(checkpoint_id).rstrip("/") != self.checkpoint_id:
            self._store = self._open(str(checkpoint_id))

    def storage_meta(self) -> StorageMeta:
        """Return what planners are told of the storage."""
        return StorageMeta(checkpoint_id=self.checkpoint_id)

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """Look, on the coordinator, at what the save replaces. See base class.

        Raises:
            AlreadyExistsError: `mode="create"`, and there is a checkpoint.
            CheckpointError: It cannot be read.
        """
        self._rank = kwargs.get("rank")
        self._is_collective = kwargs.get("use_collectives", True)
        self._commits = is_coordinator or not self._is_collective
        self._seen = ()
        if not self._commits:
            return
        unfinished, self._unfinished = self._unfinished, None
        with self._telling("begin to save"):
            self._seen = bridge.run(_begin(self._store, self._commit_keys(), unfinished))
        if self._seen and self.mode == "create":
            uri = self._seen[0].meta.uri
            raise AlreadyExistsError(
                f'could not create {self.checkpoint_id}: {uri} exists; mode="overwrite" replaces '
                "it once the new checkpoint is whole",
                uri=uri,
            )

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        """See base class."""
        return plan

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        """Agree on the name of the save. See base class.

        Plans come in the order of ranks; without collectives there is one, of this rank.
        """
        save_id = _fresh_save_id()
        ranks = range(len(plans)) if self._is_collective else [self._rank or 0]
        return [
            dataclasses.replace(plan, storage_data=Placement(save_id, rank))
            for rank, plan in zip(ranks, plans, strict=True)
        ]

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Upload the items of this rank. See base class.

        Raises:
            CheckpointError: An object could not be written; it names rank and object. Nothing that
                this rank uploaded stays.
        """
        placement = plan.storage_data
        if not isinstance(placement, Placement):  # planned for another writer, and cached
            placement = Placement(_fresh_save_id(), self._rank or 0)
        rank = placement.rank if self._rank is None else self._rank
        save_id = self._save_id = placement.use()
        if self._commits:
            self._unfinished = _Unfinished(self._store, self._commit_keys(), save_id)
        planned = plan_objects(plan.items, self.objects_per_rank)
        upload = Upload(self._store, planner, rank, save_id)
        with self._telling("save"), ExitStack() as stack:
            if self.compression is not None:
                codec = stack.enter_context(self.compression.open_codec())
                upload = dataclasses.replace(
                    upload, codec=codec, descriptor=self.compression.get_descriptor()
                )
            keys = {data_key(save_id, rank, at): items for at, items in enumerate(planned)}
            objects = {
                key: partial(upload_items, upload, key, items) for key, items in keys.items()
            }
            written = bridge.run(upload_objects(upload, objects))
        future: Future[list[WriteResult]] = Future()
        future.set_result(written)
        return future

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Make the checkpoint visible, and delete the one that it replaces. See base class.

        Raises:
            CheckpointError: It could not be made visible: another save was faster, for one.
        """
        written = [result for each in results for result in each]
        told: list[Written] = [result.storage_data for result in written]
        save_id = told[0].save_id if told else self._save_id
        metadata.version = _VERSION
        metadata.storage_meta = StorageMeta(checkpoint_id=self.checkpoint_id, save_id=save_id)
        metadata.storage_data = {result.index: result.storage_data.info for result in written}
        commit = Commit(
            save_id=save_id,
            uri=self.checkpoint_id,
            created=datetime.now(UTC).timestamp(),
            world_size=len(results),
            step=self.step,
            objects=tuple(each.stored for each in told if each.stored is not None),
            metrics=self.metrics,
        )
        with self._telling("commit"):
            data = encode_commit(pickle.dumps(metadata, protocol=_PICKLE_PROTOCOL), commit)
            bridge.run(_finish(self._store, self._commit_keys()[0], data, commit, self._seen))
        self._unfinished = None

    def _commit_keys(self) -> list[str]:
        """Return the key of the commit object, and those that a checkpoint here may have beside."""
        if self._is_collective:
            return list(COMMIT_KEYS)
        return [f"__{self._rank or 0}{COMMIT_KEY}"]

    @contextmanager
    def _telling(self, doing: str) -> Iterator[None]:
        """Turn every error into one that names the rank and pickles."""
        try:
            yield
        except CheckpointError:
            raise
        except Exception as exc:
            raise CheckpointError(
                f"rank {self._rank or 0} could not {doing} {self.checkpoint_id}: {describe(exc)}"
            ) from exc


def _fresh_save_id() -> str:
    return new_save_id(datetime.now(UTC), secrets.token_hex(4))


async def _begin(
    store: Store, keys: Sequence[str], unfinished: _Unfinished | None
) -> tuple[_Seen, ...]:
    """Return what a save replaces, after what the last one left behind was deleted."""
    if unfinished is not None:
        await _sweep(unfinished)
    return await _look(store, keys)


async def _look(store: Store, keys: Sequence[str]) -> tuple[_Seen, ...]:
    """Return the commit objects that there are."""
    seen = list[_Seen]()
    async for batch in store.fetch_batches(keys, return_exceptions=True):
        for each in batch:
            if each[0] is not None:
                seen.append(_Seen(each[0], _decode(*each)))
            elif not isinstance(each[1], NotFoundError):
                raise each[1]
    return tuple(seen)


def _decode(meta: ObjectMeta, data: bytes) -> Commit | None:
    try:
        return decode(meta, data)
    except CheckpointCorruptError as exc:
        _log.warning("the checkpoint that a save replaces is damaged: %s", exc)
        return None


async def _sweep(unfinished: _Unfinished) -> None:
    """Delete what a save uploaded that failed on some rank, unless it was committed after all."""
    store, save_id = unfinished.store, unfinished.save_id
    try:
        seen = await _look(store, unfinished.keys)
        if any(each.commit is not None and each.commit.save_id == save_id for each in seen):
            return
        await _delete(store, await store.list_all(f"{save_id}/"), "a save that failed")
    except AiofluxError as exc:
        _log.warning("what a failed save left below %s%s/ stays: %s", store.uri, save_id, exc)


async def _finish(
    store: Store, key: str, data: bytes, commit: Commit, seen: Sequence[_Seen]
) -> None:
    """Write the commit object, and delete what it replaced."""
    replaces = next((each.meta for each in seen if each.meta.key == key), None)
    try:
        await publish(store, key, data, replaces=replaces)
    except AiofluxError as exc:
        # Where no answer was heard it may be visible all the same, now or in a moment.
        if not isinstance(exc, TransientError) and (
            note := await remove(store, [each.key for each in commit.objects])
        ):
            exc.add_note(note)
        raise
    for each in seen:
        await _discard(store, each, is_replaced=each.meta.key == key)


async def _discard(store: Store, old: _Seen, *, is_replaced: bool) -> None:
    """Delete what a commit object names that is not in force any more; log what cannot be."""
    if old.commit is None:
        _log.info("what %s named stays: it is no commit of aioflux", old.meta.uri)
        return
    if not is_replaced and not await _delete(store, [old.meta], "another layout"):
        return
    is_pinned = is_home(store, "", old.commit)
    doomed = [
        dataclasses.replace(
            old.meta,
            key=each.key,
            uri=f"{store.uri}{each.key}",
            generation=each.generation if is_pinned else "",
        )
        for each in old.commit.objects
        # Whatever a commit says: an object of another save is none of it.
        if find_save_id(each.key) == old.commit.save_id
    ]
    await _delete(store, doomed, "the checkpoint that was replaced")


async def _delete(store: Store, metas: Iterable[ObjectMeta], what: str) -> bool:
    """Delete objects, and tell whether all are gone; what stays is logged."""
    try:
        errors = (await store.delete_many(metas)).errors
    except AiofluxError as exc:
        _log.warning("%s below %s could not be deleted: %s", what, store.uri, exc)
        return False
    for key, error in errors.items():
        _log.warning("%s%s of %s could not be deleted: %s", store.uri, key, what, error)
    return not errors

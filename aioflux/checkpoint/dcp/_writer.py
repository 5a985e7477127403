"""StorageWriter: saves of torch.distributed.checkpoint to a bucket.

    every rank    items -> <save_id>/__<rank>_<n>.distcp, keys that no save had before
    coordinator   .metadata, written last, if it still is what it was when the save began

A save is visible when `.metadata` is, and that names every other object with its size, checksum and
generation: whatever happens before leaves the checkpoint that was there.
"""

from __future__ import annotations

import dataclasses
import pickle
import secrets
import weakref
from contextlib import ExitStack, contextmanager
from datetime import UTC, datetime
from functools import partial
from typing import TYPE_CHECKING, Any, Literal

import msgspec
from torch.distributed.checkpoint import storage as dcp_storage
from torch.distributed.checkpoint.metadata import StorageMeta
from torch.futures import Future

from aioflux import _bridge
from aioflux.checkpoint._format.commit import (
    COMMIT_KEY,
    INDEX_KEY,
    Commit,
    data_key,
    encode_commit,
    encode_index,
    new_save_id,
)
from aioflux.checkpoint._format.safetensors import pack_metadata
from aioflux.checkpoint._store.objects import open_checkpoint
from aioflux.checkpoint.dcp._ids import is_checkpoint_uri
from aioflux.checkpoint.dcp._object_plan import RankPlacement, plan_objects
from aioflux.checkpoint.dcp._publish import Unfinished, begin, finish, sweep
from aioflux.checkpoint.dcp._safetensors_parts import UploadedPart, finish_objects
from aioflux.checkpoint.dcp._safetensors_plan import plan_ranks
from aioflux.checkpoint.dcp._safetensors_upload import collect_contents, index_of, plan_uploads
from aioflux.checkpoint.dcp._save_context import Turn, begin_turn, run, turn_of
from aioflux.checkpoint.dcp._upload import (
    RankUpload,
    describe,
    find_tied_items,
    tied_result,
    upload_items,
    upload_objects,
)
from aioflux.errors import AiofluxError, AlreadyExistsError, CheckpointError, TransientError
from aioflux.store import open_store

if TYPE_CHECKING:
    import os
    from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
    from typing import Unpack

    from torch.distributed.checkpoint.metadata import Metadata
    from torch.distributed.checkpoint.planner import SavePlan, SavePlanner, WriteItem
    from torch.distributed.checkpoint.storage import WriteResult

    from aioflux.checkpoint.compression import ZStandard
    from aioflux.checkpoint.dcp._safetensors_plan import RankLayout
    from aioflux.options import StoreOptions
    from aioflux.store import Store, WriteMode

__all__ = ["StorageWriter"]

_VERSION = "1.0.0"
"""Version of DCP's metadata."""

_PICKLE_PROTOCOL = 4
"""What every Python reads that torch runs on."""


class StorageWriter(dcp_storage.StorageWriter):
    """Writes checkpoints of `torch.distributed.checkpoint` to object storage.

        dcp.save(state, storage_writer=StorageWriter("gs://bucket/run-7/step-100"))

    Every rank makes one. Stock `FileSystemReader` loads a copy of the objects. What `dcp.save`
    raises is a `CheckpointException`, which is no `Exception`; its `failures` hold the errors of
    the ranks, each a `CheckpointError` that names the rank and the object. Ranks meet in the
    collectives of the process group alone: one that is gone is missed by the group, after the
    timeout that `init_process_group` was given. `Checkpointer` has heartbeats instead.

    Tied tensors of one rank, which show the same memory, are stored once, but in the layout of
    safetensors. Tensors that no load could read, such as sparse and quantized ones, are refused.
    """

    def __init__(
        self,
        uri: str,
        *,
        objects_per_rank: int = 1,
        compression: ZStandard | None = None,
        layout: Literal["dcp", "safetensors"] = "dcp",
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
            layout: "dcp" is what `FileSystemReader` loads. "safetensors" is what the safetensors
                library and Hugging Face's load, each tensor whole in one object, with an index;
                what that format cannot hold lies beside, as DCP stores it.
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
        if layout not in {"dcp", "safetensors"}:
            raise ValueError(f'layout must be "dcp" or "safetensors", not {layout!r}')
        if layout == "safetensors" and compression is not None:
            raise ValueError("readers of safetensors know no compression; leave it out")
        self.objects_per_rank = objects_per_rank
        self.layout: Literal["dcp", "safetensors"] = layout
        self.compression = compression
        self.mode = mode
        self.step = step
        self.metrics = {name: float(value) for name, value in (metrics or {}).items()}
        self._options = options
        self._store = self._open(uri)
        self._last = Turn(self._store)
        self._unfinished: list[Unfinished] = []

    def __repr__(self) -> str:
        return f"<StorageWriter {self.checkpoint_id}>"

    def __getstate__(self) -> dict[str, Any]:
        pickle.dumps(self._store)  # refuses where that would carry a token along
        options = {name: value for name, value in self._options.items() if name != "progress"}
        return {**self.__dict__, "_options": options, "_last": None, "_unfinished": []}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._last = Turn(self._store)
        _bridge.close_when_dropped(self._store)

    def _open(self, uri: str) -> Store:
        store = open_store(uri, **self._options)
        _bridge.close_when_dropped(store)
        return store

    @property
    def checkpoint_id(self) -> str:
        """Uri of the checkpoint that this thread writes, or that is written next."""
        turn = turn_of(self)
        is_at_work = turn is not None and turn.is_begun and not turn.is_over
        return (turn.store if turn is not None and is_at_work else self._store).uri.rstrip("/")

    @property
    def _turn(self) -> Turn:
        return turn_of(self) or self._last

    def _begin_turn(self) -> Turn:
        self._last = turn = Turn(self._store)
        begin_turn(self, turn)
        return turn

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """Tell whether this is a uri that a checkpoint can be written to; a path never is."""
        return is_checkpoint_uri(checkpoint_id)

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Begin another save, to another uri where one is given; all settings stay.

        Raises:
            ValueError: It is not a whole uri, or was taken apart by `pathlib.Path`.
        """
        if checkpoint_id is None or checkpoint_id == "":
            self._begin_turn()
            return
        if not self.validate_checkpoint_id(checkpoint_id):
            raise ValueError(
                f"checkpoint_id must be a whole uri in a string, such as {self.checkpoint_id!r}, "
                f"not {checkpoint_id!r}; a Path drops a slash of gs://"
            )
        if str(checkpoint_id).rstrip("/") != self._store.uri.rstrip("/"):
            self._store = self._open(str(checkpoint_id))
        self._begin_turn()

    def storage_meta(self) -> StorageMeta:
        """Return what planners are told of the storage."""
        return StorageMeta(checkpoint_id=self.checkpoint_id)

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """Look, on the coordinator, at what the save replaces. See base class.

        Raises:
            AlreadyExistsError: `mode="create"`, and there is a checkpoint.
            CheckpointError: It cannot be read.
        """
        turn = turn_of(self)
        if turn is None or turn.is_begun:
            turn = self._begin_turn()
        turn.is_begun = True
        turn.rank = kwargs.get("rank")
        turn.is_collective = kwargs.get("use_collectives", True)
        turn.commits = is_coordinator or not turn.is_collective
        if self.layout == "safetensors" and not turn.is_collective:
            raise CheckpointError(
                f"could not save {self.checkpoint_id}: safetensors hold whole tensors, which ranks "
                "cannot agree on with use_collectives=False"
            )
        if not turn.commits:
            return
        over = [each for each in self._unfinished if each.is_over]
        self._unfinished = [each for each in self._unfinished if each not in over]
        with self._telling("begin to save"):
            turn.seen = run(begin(turn.store, self._commit_keys(turn), over))
        if turn.seen and self.mode == "create":
            uri = turn.seen[0].meta.uri
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
        turn, save_id = self._turn, _fresh_save_id()
        ranks = range(len(plans)) if turn.is_collective else [turn.rank or 0]
        return [
            dataclasses.replace(plan, storage_data=RankPlacement(save_id, rank, layout))
            for rank, plan, layout in zip(ranks, plans, self._layouts(plans), strict=True)
        ]

    def _layouts(self, plans: list[SavePlan]) -> Sequence[RankLayout | None]:
        if self.layout == "dcp" or not any(plan.usable for plan in plans):
            return [None] * len(plans)  # ranks have cached plans, and what came with those
        if not all(plan.usable for plan in plans):
            raise CheckpointError(
                f"could not save {self.checkpoint_id}: the state changed on some ranks alone, and "
                "the planner gave the cached plans of the others; save with another planner"
            )
        return plan_ranks([plan.items for plan in plans], self.objects_per_rank)

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """RankUpload the items of this rank. See base class.

        Raises:
            CheckpointError: An object could not be written; it names rank and object. Nothing that
                this rank uploaded stays.
        """
        turn, placement = self._turn, plan.storage_data
        if not isinstance(placement, RankPlacement):  # planned for another writer, and cached
            placement = RankPlacement(_fresh_save_id(), turn.rank or 0)
        rank = placement.rank if turn.rank is None else turn.rank
        turn.save_id = placement.use()
        if turn.commits:
            self._unfinished = [*self._unfinished, self._unfinished_of(turn)]
        upload = RankUpload(turn.store, planner, rank, turn.save_id)
        with self._telling("save"), ExitStack() as stack:
            if self.compression is not None:
                codec = stack.enter_context(self.compression.open_codec())
                upload = dataclasses.replace(
                    upload, codec=codec, descriptor=self.compression.get_descriptor()
                )
            # safetensors has no two names for one tensor.
            ties = find_tied_items(planner, plan.items) if self.layout == "dcp" else {}
            items = [item for at, item in enumerate(plan.items) if at not in ties]
            uploads = self._uploads(upload, items, placement.layout)
            written = run(upload_objects(upload, uploads))
            results = {result.index: result for result in written}
            written += [
                tied_result(plan.items[at], results[plan.items[first].index])
                for at, first in ties.items()
            ]
        future: Future[list[WriteResult]] = Future()
        future.set_result(written)
        return future

    def _uploads(
        self, upload: RankUpload, items: Sequence[WriteItem], layout: RankLayout | None
    ) -> Mapping[str, Callable[[], Awaitable[list[WriteResult]]]]:
        """Return what writes each object of this rank, by key."""
        if self.layout == "safetensors":
            if layout is None:
                raise CheckpointError(
                    f"could not save {self.checkpoint_id}: the planner gave a plan that it cached "
                    "for another layout; save with another planner"
                )
            return plan_uploads(upload, items, layout, self.objects_per_rank)
        planned = plan_objects(items, self.objects_per_rank)
        keys = [data_key(upload.save_id, upload.rank, at) for at in range(len(planned))]
        return {
            key: partial(upload_items, upload, key, some)
            for key, some in zip(keys, planned, strict=True)
        }

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Make the checkpoint visible, and delete the one that it replaces. See base class.

        Raises:
            CheckpointError: It could not be made visible: another save was faster, for one.
        """
        written = [result for each in results for result in each]
        turn = self._turn
        save_id = written[0].storage_data.save_id if written else turn.save_id
        metadata.version = _VERSION
        metadata.storage_meta = StorageMeta(checkpoint_id=self.checkpoint_id, save_id=save_id)
        commit = Commit(
            save_id=save_id,
            uri=self.checkpoint_id,
            created=datetime.now(UTC).timestamp(),
            world_size=len(results),
            step=self.step,
            layout=self.layout,
            metrics=self.metrics,
        )
        with self._telling("commit"):
            run(self._finish(turn, metadata, written, commit))
        self._unfinished = [each for each in self._unfinished if each.save_id != save_id]
        turn.is_over, turn.seen = True, ()

    async def _finish(
        self, turn: Turn, metadata: Metadata, results: Sequence[WriteResult], commit: Commit
    ) -> None:
        write = self._finish_dcp if self.layout == "dcp" else self._finish_safetensors
        try:
            await write(turn, metadata, results, commit)
        except AiofluxError as exc:
            # Where no answer was heard it may be visible all the same, now or in a moment.
            if not isinstance(exc, TransientError):
                await sweep(self._unfinished_of(turn))
            raise

    async def _finish_dcp(
        self, turn: Turn, metadata: Metadata, results: Sequence[WriteResult], commit: Commit
    ) -> None:
        told = [result.storage_data for result in results]
        metadata.storage_data = {
            result.index: each.info for result, each in zip(results, told, strict=True)
        }
        stored = tuple(each.stored for each in told if each.stored is not None)
        commit = msgspec.structs.replace(commit, objects=stored)
        data = encode_commit(pickle.dumps(metadata, protocol=_PICKLE_PROTOCOL), commit)
        await finish(turn.store, self._commit_keys(turn)[0], data, commit, turn.seen)

    async def _finish_safetensors(
        self, turn: Turn, metadata: Metadata, results: Sequence[WriteResult], commit: Commit
    ) -> None:
        parts = [
            each.storage_data for each in results if isinstance(each.storage_data, UploadedPart)
        ]
        async with open_checkpoint(turn.store.uri, **self._options) as reader:
            shared = await finish_objects(turn.store, reader, parts, rank=turn.rank or 0)
        contents = collect_contents(metadata, results, shared)
        metadata.storage_data = contents.metadata.storage_data
        pickled = pickle.dumps(contents.metadata, protocol=_PICKLE_PROTOCOL)
        commit = msgspec.structs.replace(
            commit, objects=contents.objects, extra=pack_metadata(pickled)
        )
        await finish(
            turn.store,
            self._commit_keys(turn)[0],
            encode_index(index_of(contents), commit),
            commit,
            turn.seen,
            has_leftovers=bool(parts),
        )

    def _unfinished_of(self, turn: Turn) -> Unfinished:
        return Unfinished(turn.store, self._commit_keys(turn), turn.save_id, weakref.ref(turn))

    def _commit_keys(self, turn: Turn) -> list[str]:
        """Return the key of the commit object, and those that a checkpoint here may have beside."""
        if self.layout == "safetensors":
            return [INDEX_KEY, COMMIT_KEY]
        if turn.is_collective:
            return [COMMIT_KEY, INDEX_KEY]
        return [f"__{turn.rank or 0}{COMMIT_KEY}"]

    @contextmanager
    def _telling(self, doing: str) -> Iterator[None]:
        """Turn every error into one that names the rank and pickles."""
        try:
            yield
        except CheckpointError:
            raise
        except Exception as exc:
            rank = self._turn.rank or 0
            raise CheckpointError(
                f"rank {rank} could not {doing} {self.checkpoint_id}: {describe(exc)}"
            ) from exc


def _fresh_save_id() -> str:
    return new_save_id(datetime.now(UTC), secrets.token_hex(4))

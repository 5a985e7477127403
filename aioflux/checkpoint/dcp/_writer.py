"""StorageWriter: saves of torch.distributed.checkpoint to object storage.

    every rank    writes its items to <save_id>/__<rank>_<n>.distcp, keys that no other save uses
    coordinator   writes .metadata last, if no other save replaced it since the save began

`.metadata` is the commit object: it lists every data object with size, checksum and generation. If
a save fails before it writes `.metadata`, the previous checkpoint is unchanged. In the safetensors
layout the index is the commit object. With `use_collectives=False` each rank commits by itself, to
`__<rank>.metadata`.
"""

from __future__ import annotations

import dataclasses
import pickle
import secrets
import weakref
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from datetime import UTC, datetime
from functools import partial
from typing import TYPE_CHECKING, Any, Literal, Unpack

from torch.distributed.checkpoint import storage as dcp_storage
from torch.distributed.checkpoint.metadata import StorageMeta
from torch.futures import Future

from aioflux import _bridge
from aioflux.checkpoint._format.commit import (
    COMMIT_KEY,
    INDEX_KEY,
    Commit,
    data_key,
    new_save_id,
)
from aioflux.checkpoint._store.steps import UnknownOutcomeError, as_public, begin_save
from aioflux.checkpoint.dcp._object_plan import RankPlacement, plan_objects, plan_ranks
from aioflux.checkpoint.dcp._reader import is_checkpoint_uri, require_checkpoint_uri
from aioflux.checkpoint.dcp._safetensors import (
    UploadedPart,
    encode_safetensors,
    finish_objects,
    plan_uploads,
)
from aioflux.checkpoint.dcp._save_context import (
    SaveContext,
    UnfinishedSave,
    context_of,
    delete_failed,
    finish_save,
    run_without_context,
    start_save,
)
from aioflux.checkpoint.dcp._upload import (
    RankUpload,
    describe,
    encode_dcp,
    find_tied_items,
    tied_result,
    upload_items,
    upload_objects,
)
from aioflux.errors import AiofluxError, AlreadyExistsError, CheckpointError
from aioflux.options import Timeouts
from aioflux.store import open_store

if TYPE_CHECKING:
    import os

    from torch.distributed.checkpoint.metadata import Metadata
    from torch.distributed.checkpoint.planner import SavePlan, SavePlanner, WriteItem
    from torch.distributed.checkpoint.storage import WriteResult

    from aioflux.checkpoint._store.steps import CommitObject
    from aioflux.checkpoint.compression import ZStandard
    from aioflux.checkpoint.dcp._object_plan import RankLayout
    from aioflux.options import StoreOptions
    from aioflux.store import Store, WriteMode

_VERSION = "1.0.0"
"""Version of DCP's metadata."""


class StorageWriter(dcp_storage.StorageWriter):
    """Writer of checkpoints of `torch.distributed.checkpoint` to object storage.

        dcp.save(state, storage_writer=StorageWriter("gs://bucket/run-7/step-100"))

    Every rank creates a writer. Stock `FileSystemReader` can load the objects from a local copy. If
    ranks fail, `dcp.save` raises a `CheckpointException`, which is not an `Exception`; its
    `failures` are the errors of the ranks, each a `CheckpointError` that names the rank and the
    object. If a rank dies, the others wait for the timeout of `init_process_group`. `Checkpointer`
    detects a dead rank sooner, by heartbeats.

    Tied tensors of one rank, which share their memory, are stored once, except in the safetensors
    layout. Tensors that no load could read, such as sparse and quantized tensors, are rejected.
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
        """Create a writer; connections are opened later.

        Args:
            uri: Prefix of the checkpoint, such as `gs://bucket/run-7/step-100`.
            objects_per_rank: Maximum number of data objects that each rank writes. One object is
                uploaded in parallel parts, too; more objects help readers that read whole objects.
            compression: Compress tensors in frames, so that loads can still read ranges. Stock
                readers need this class in their registry of extensions.
            layout: "dcp" can be loaded by `FileSystemReader`. "safetensors" can be loaded by the
                safetensors library and by Hugging Face libraries: each tensor is whole in one
                object, and there is an index. Values that safetensors cannot store are written
                to further objects as in "dcp".
            mode: "overwrite" replaces an existing checkpoint once the new one is complete; "create"
                fails if a checkpoint exists.
            step: Training step, stored in the commit object.
            metrics: Metrics for retention, stored in the commit object.
            options: `transfer`, `retry`, `timeouts`, `credentials`, `endpoint_url` and
                `ssl_context`, as for `aioflux.open_store`.

        Raises:
            ValueError: The uri cannot be opened, or a setting is not valid or has no effect.
        """
        if objects_per_rank < 1:
            raise ValueError(f"objects_per_rank must be 1 or more, not {objects_per_rank}")
        if mode not in {"overwrite", "create"}:
            raise ValueError(f'mode must be "overwrite" or "create", not {mode!r}')
        if layout not in {"dcp", "safetensors"}:
            raise ValueError(f'layout must be "dcp" or "safetensors", not {layout!r}')
        if layout == "safetensors" and compression is not None:
            raise ValueError("readers of safetensors do not support compression; omit it")
        self.objects_per_rank = objects_per_rank
        self.layout: Literal["dcp", "safetensors"] = layout
        self.compression = compression
        self.mode = mode
        self.step = step
        self.metrics = {name: float(value) for name, value in (metrics or {}).items()}
        self._options = options
        self._store = self._open(uri)
        self._last = SaveContext(self._store)
        self._unfinished: list[UnfinishedSave] = []

    def __repr__(self) -> str:
        return f"<StorageWriter {self.checkpoint_id}>"

    def __getstate__(self) -> dict[str, Any]:
        pickle.dumps(self._store)  # raises if the store contains credentials
        options = {name: value for name, value in self._options.items() if name != "progress"}
        return {**self.__dict__, "_options": options, "_last": None, "_unfinished": []}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._last = SaveContext(self._store)
        _bridge.close_when_dropped(self._store)

    def _open(self, uri: str) -> Store:
        store = open_store(uri, **self._options)
        _bridge.close_when_dropped(store)
        return store

    @property
    def checkpoint_id(self) -> str:
        """Uri of the checkpoint that this thread is writing, or will write next."""
        context = context_of(self)
        is_saving = context is not None and context.is_set_up and not context.is_over
        return (context.store if context and is_saving else self._store).uri.rstrip("/")

    @property
    def _context(self) -> SaveContext:
        return context_of(self) or self._last

    def _start_save(self) -> SaveContext:
        self._last = context = SaveContext(self._store)
        start_save(self, context)
        return context

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """Return whether `checkpoint_id` has the form of a uri. A path does not."""
        return is_checkpoint_uri(checkpoint_id)

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Prepare another save, of another checkpoint if a uri is given, with the same settings.

        Raises:
            ValueError: `checkpoint_id` is not a string such as `gs://bucket/run-7/step-100`.
        """
        if checkpoint_id is None or checkpoint_id == "":
            self._start_save()
            return
        require_checkpoint_uri(checkpoint_id, example=self.checkpoint_id)
        if str(checkpoint_id).rstrip("/") != self._store.uri.rstrip("/"):
            self._store = self._open(str(checkpoint_id))
        self._start_save()

    def storage_meta(self) -> StorageMeta:
        """See base class."""
        return StorageMeta(checkpoint_id=self.checkpoint_id)

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """Read the commit object that the save replaces, on the coordinator. See base class.

        Raises:
            AlreadyExistsError: `mode` is "create", and a checkpoint exists.
            CheckpointError: The commit object cannot be read, or `use_collectives=False` was passed
                with the safetensors layout.
        """
        context = context_of(self)
        if context is None or context.is_set_up:
            context = self._start_save()
        context.is_set_up = True
        context.rank = kwargs.get("rank")
        context.is_collective = kwargs.get("use_collectives", True)
        context.is_committer = is_coordinator or not context.is_collective
        if self.layout == "safetensors" and not context.is_collective:
            raise CheckpointError(
                f"could not save {self.checkpoint_id}: safetensors contain whole tensors, which "
                "ranks cannot agree on with use_collectives=False"
            )
        if not context.is_committer:
            return
        ended = [save for save in self._unfinished if save.is_over]
        self._unfinished = [save for save in self._unfinished if save not in ended]
        with self._named_errors("start to save"):
            keys = self._commit_keys(context)
            context.replaces = run_without_context(_begin_save(context.store, keys, ended))
        if context.replaces and self.mode == "create":
            uri = context.replaces[0].meta.uri
            raise AlreadyExistsError(
                f'could not create {self.checkpoint_id}: {uri} exists; mode="overwrite" replaces '
                "it once the new checkpoint is complete",
                uri=uri,
            )

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        """See base class."""
        return plan

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        """Set the save id of all ranks, and the placements of their items. See base class.

        `plans` has the plan of each rank, in order; without collectives, the plan of this rank.
        """
        context, save_id = self._context, _fresh_save_id()
        ranks = range(len(plans)) if context.is_collective else [context.rank or 0]
        return [
            dataclasses.replace(plan, storage_data=RankPlacement(save_id, rank, layout))
            for rank, plan, layout in zip(ranks, plans, self._layouts(plans), strict=True)
        ]

    def _layouts(self, plans: list[SavePlan]) -> Sequence[RankLayout | None]:
        if self.layout == "dcp" or not any(plan.usable for plan in plans):
            return [None] * len(plans)  # unusable plans are replaced by cached plans
        if not all(plan.usable for plan in plans):
            raise CheckpointError(
                f"could not save {self.checkpoint_id}: the state changed on some ranks only, and "
                "the other ranks use cached plans; save with a planner that does not cache plans"
            )
        return plan_ranks([plan.items for plan in plans], self.objects_per_rank)

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Upload the items of this rank. See base class.

        Raises:
            CheckpointError: An object could not be written; the error names rank and object. The
                objects that this rank uploaded were deleted, unless a note says otherwise.
        """
        context, placement = self._context, plan.storage_data
        if not isinstance(placement, RankPlacement):  # a cached plan of another kind of writer
            placement = RankPlacement(_fresh_save_id(), context.rank or 0)
        rank = placement.rank if context.rank is None else context.rank
        context.save_id = placement.use()
        if context.is_committer:
            self._unfinished = [*self._unfinished, self._unfinished_of(context)]
        upload = RankUpload(context.store, planner, rank, context.save_id)
        with self._named_errors("save"), ExitStack() as stack:
            if self.compression is not None:
                codec = stack.enter_context(self.compression.open_codec())
                upload = dataclasses.replace(
                    upload, codec=codec, descriptor=self.compression.get_descriptor()
                )
            # A safetensors object cannot have two names for the same bytes.
            ties = find_tied_items(planner, plan.items) if self.layout == "dcp" else {}
            items = [item for index, item in enumerate(plan.items) if index not in ties]
            uploads = self._uploads(upload, items, placement.layout)
            cleanup = (self._options.get("timeouts") or Timeouts()).cleanup
            written = run_without_context(
                upload_objects(upload, uploads, cleanup_seconds=cleanup.total_seconds)
            )
            results = {result.index: result for result in written}
            written += [
                tied_result(plan.items[tied], results[plan.items[first].index])
                for tied, first in ties.items()
            ]
        future: Future[list[WriteResult]] = Future()
        future.set_result(written)
        return future

    def _uploads(
        self, upload: RankUpload, items: Sequence[WriteItem], layout: RankLayout | None
    ) -> Mapping[str, Callable[[], Awaitable[list[WriteResult]]]]:
        """Return, for the key of each object of this rank, a function that writes the object."""
        if self.layout == "safetensors":
            if layout is None:
                raise CheckpointError(
                    f"could not save {self.checkpoint_id}: the planner returned a plan that it "
                    "cached for another layout; save with another planner"
                )
            return plan_uploads(upload, items, layout, self.objects_per_rank)
        objects = plan_objects(items, self.objects_per_rank)
        keys = [data_key(upload.save_id, upload.rank, number) for number in range(len(objects))]
        return {
            key: partial(upload_items, upload, key, content)
            for key, content in zip(keys, objects, strict=True)
        }

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Commit the checkpoint, and delete the checkpoint that it replaces. See base class.

        Raises:
            CheckpointError: The commit failed, for example because another save committed first.
        """
        written = [result for of_rank in results for result in of_rank]
        context = self._context
        save_id = written[0].storage_data.save_id if written else context.save_id
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
        with self._named_errors("commit"):
            run_without_context(self._finish(context, metadata, written, commit))
        self._unfinished = [save for save in self._unfinished if save.save_id != save_id]
        context.is_over, context.replaces = True, ()

    async def _finish(
        self,
        context: SaveContext,
        metadata: Metadata,
        results: Sequence[WriteResult],
        commit: Commit,
    ) -> None:
        has_leftovers = False
        try:
            if self.layout == "dcp":
                data, commit = encode_dcp(metadata, results, commit)
            else:
                parts = [
                    result.storage_data
                    for result in results
                    if isinstance(result.storage_data, UploadedPart)
                ]
                has_leftovers = bool(parts)
                shared = await finish_objects(context.store, parts, rank=context.rank or 0)
                data, commit = encode_safetensors(metadata, results, shared, commit)
            key = self._commit_keys(context)[0]
            await finish_save(
                context.store, key, data, commit, context.replaces, has_leftovers=has_leftovers
            )
        except UnknownOutcomeError as exc:
            raise as_public(exc) from exc.__cause__
        except AiofluxError:
            await delete_failed(self._unfinished_of(context))
            raise

    def _unfinished_of(self, context: SaveContext) -> UnfinishedSave:
        return UnfinishedSave(
            context.store, self._commit_keys(context), context.save_id, weakref.ref(context)
        )

    def _commit_keys(self, context: SaveContext) -> list[str]:
        """Return the key of the commit object, then the keys that other layouts would use."""
        if self.layout == "safetensors":
            return [INDEX_KEY, COMMIT_KEY]
        if context.is_collective:
            return [COMMIT_KEY, INDEX_KEY]
        return [f"__{context.rank or 0}{COMMIT_KEY}"]

    @contextmanager
    def _named_errors(self, operation: str) -> Iterator[None]:
        """Turn errors of other classes into a CheckpointError, which names the rank and pickles."""
        try:
            yield
        except CheckpointError:
            raise
        except Exception as exc:
            rank = self._context.rank or 0
            raise CheckpointError(
                f"rank {rank} could not {operation} {self.checkpoint_id}: {describe(exc)}"
            ) from exc


def _fresh_save_id() -> str:
    return new_save_id(datetime.now(UTC), secrets.token_hex(4))


async def _begin_save(
    store: Store, keys: Sequence[str], failed: Sequence[UnfinishedSave]
) -> tuple[CommitObject, ...]:
    """Delete the objects of failed saves, and return the commit objects of the checkpoint."""
    for save in failed:
        await delete_failed(save)
    return tuple(await begin_save(store, "", keys))

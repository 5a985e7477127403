"""StorageReader: loads of torch.distributed.checkpoint from object storage.

coordinator   .metadata, broadcast to the ranks of the process group that the reader was given
every rank    its part of each tensor, by ranges, verified, into the memory of the tensor
"""

from __future__ import annotations

import dataclasses
import io
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch.distributed.checkpoint import storage as dcp_storage
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta
from torch.distributed.checkpoint.planner import LoadItemType
from torch.futures import Future

from aioflux import _bridge
from aioflux._values.checksums import crc32c
from aioflux.checkpoint._load.copies import TensorTarget, ValueTarget
from aioflux.checkpoint._load.decode import as_bytes, default_registry, load_value
from aioflux.checkpoint._load.fetch import fetch
from aioflux.checkpoint._load.stored_checkpoint import (
    CommitBytes,
    StoredCheckpoint,
    decode_checkpoint,
    read_commit_object,
)
from aioflux.checkpoint._save.nesting import CONTAINERS
from aioflux.checkpoint._save.ranks import Ranks
from aioflux.checkpoint._store.commits import uri_below
from aioflux.checkpoint._store.objects import open_checkpoint
from aioflux.checkpoint.dcp._checkpoint_id import is_checkpoint_uri, require_checkpoint_uri
from aioflux.errors import AiofluxError, CheckpointError, CheckpointNotFoundError

if TYPE_CHECKING:
    import os
    from collections.abc import Callable
    from typing import Unpack

    from torch.distributed import ProcessGroup
    from torch.distributed.checkpoint._extension import ExtensionRegistry
    from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner, ReadItem

    from aioflux._values.stats import StoreStats
    from aioflux.options import StoreOptions
    from aioflux.store import Store

__all__ = ["StorageReader"]

T = TypeVar("T")


class _Unreadable(Metadata):
    """A placeholder for metadata that could not be read: `set_up_storage_reader` raises the error.

    `dcp.load` makes an AssertionError of every error of `read_metadata`, and raises an error of
    `set_up_storage_reader` as it is.
    """

    def __init__(self, error: AiofluxError) -> None:
        super().__init__(state_dict_metadata={}, planner_data={}, storage_data={})
        self.error = error


class StorageReader(dcp_storage.StorageReader):
    """Reads checkpoints of `torch.distributed.checkpoint` from object storage.

        dcp.load(state, storage_reader=StorageReader("gs://bucket/run-7/step-100"))

    Every rank makes one. With `process_group` one rank reads the metadata for all; without it each
    rank reads it, and a load fails if the checkpoint was replaced between these reads.

    Only the bytes that a rank needs are read: of a tensor that is sharded in another way than it
    was saved, its rows. Blocks of 64 KiB or more are compared with the checksums of the commit, and
    objects are read in the generations that it names.

    Checkpoints of stock `FileSystemWriter` and `FsspecWriter` load by ranges, too. They hold no
    checksums: their objects are pinned to the generations found when the load begins, and a damaged
    byte in them goes unnoticed.

    A checkpoint never runs code: metadata is read by an interpreter of pickles that calls nothing,
    and values that are no tensors by `torch.load(weights_only=True)`. `dcp.load` raises a
    `CheckpointException`, which is no `Exception`; its `failures` hold the errors of the ranks.
    After an error the loaded state may hold a part of the checkpoint. Tensors of other float types
    than were saved are filled with rounded values; types that cannot hold the saved values, such as
    whole numbers for fractions, are a CheckpointError.
    """

    def __init__(
        self,
        uri: str,
        *,
        weights_only: bool = True,
        verify: bool = True,
        extension_registry: ExtensionRegistry | None = None,
        process_group: ProcessGroup | None = None,
        **options: Unpack[StoreOptions],
    ) -> None:
        """Open no connection yet.

        Args:
            uri: Prefix of the checkpoint, such as `gs://bucket/run-7/step-100`.
            weights_only: Refuse values whose pickles hold more than tensors, plain values and the
                classes given to `torch.serialization.add_safe_globals`. Otherwise the planner
                unpickles them, which runs any code in them.
            verify: Compare the bytes with the checksums of the commit. Without it, ranges are not
                widened to whole blocks.
            extension_registry: Transforms that items of stock DCP may have; by default torch's own
                and `aioflux.checkpoint.compression`.
            process_group: The group that is passed to `dcp.load`, or
                `torch.distributed.group.WORLD` for its default: its first rank reads the metadata
                for all. All its ranks must load. It is not pickled.
            options: `transfer`, `retry`, `timeouts`, `credentials`, `endpoint_url` and
                `ssl_context`, as `aioflux.open_store`.

        Raises:
            ValueError: The uri cannot be opened, or a setting has no effect with it.
        """
        super().__init__()
        self.weights_only = weights_only
        self.verify = verify
        self._registry = extension_registry or default_registry()
        self._group = process_group
        self._options = options
        self._store = self._open(uri)
        self._checkpoint: StoredCheckpoint | None = None
        self._commit_checksum: int | None = None
        self._metadata_error: AiofluxError | None = None

    def __repr__(self) -> str:
        return f"<StorageReader {self.checkpoint_id}>"

    def __getstate__(self) -> dict[str, Any]:
        options = {name: value for name, value in self._options.items() if name != "progress"}
        fresh = {"_group": None, "_checkpoint": None, "_metadata_error": None}
        return {**self.__dict__, "_options": options, **fresh}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        _bridge.close_when_dropped(self._store)

    def _open(self, uri: str) -> Store:
        store = open_checkpoint(uri, **self._options)
        _bridge.close_when_dropped(store)
        return store

    @property
    def checkpoint_id(self) -> str:
        """Uri of the checkpoint that is read."""
        return self._store.uri.rstrip("/")

    @property
    def containers(self) -> str:
        """Containers of the state, from the commit that was read last; empty without one."""
        commit = self._checkpoint.commit if self._checkpoint is not None else None
        return commit.extra.get(CONTAINERS, "") if commit is not None else ""

    @property
    def stats(self) -> StoreStats:
        """Requests, retries, bytes and latency of this reader so far, in this process."""
        return self._store.stats

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """Return whether this is a uri that a checkpoint can be read from; a path never is."""
        return is_checkpoint_uri(checkpoint_id)

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Prepare another load, from another uri if one is given; all settings stay.

        Raises:
            ValueError: It is not a whole uri, or was taken apart by `pathlib.Path`.
        """
        self._checkpoint = self._metadata_error = None
        if checkpoint_id is None or checkpoint_id == "":
            return
        require_checkpoint_uri(checkpoint_id, example=self.checkpoint_id)
        if str(checkpoint_id).rstrip("/") != self.checkpoint_id:
            self._store = self._open(str(checkpoint_id))

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """Read the metadata of the checkpoint, or that of `rank=` saved without collectives.

        Raises:
            CheckpointNotFoundError: There is no checkpoint.
            CheckpointCorruptError: It is damaged, or holds more than metadata; nothing was run.
            StorageError: It could not be read.
        """
        rank: int | None = kwargs.get("rank")
        # `dcp.load` calls once more with its rank if the first call raised anything.
        first_error, self._metadata_error = self._metadata_error, None
        if rank is None:
            first_error = None
        try:
            if first_error is not None and not isinstance(first_error, CheckpointNotFoundError):
                raise first_error
            self._checkpoint = self._read_checkpoint(rank)
        except AiofluxError as exc:
            if first_error is not None:
                return _Unreadable(exc)
            self._metadata_error = exc
            raise
        metadata = self._checkpoint.metadata
        if metadata.storage_meta is None:
            metadata.storage_meta = StorageMeta()
        return metadata

    def _read_checkpoint(self, rank: int | None) -> StoredCheckpoint:
        def read() -> CommitBytes:
            return _bridge.run(read_commit_object(self._store, rank))

        if rank is not None:  # saved without collectives: the metadata of this rank alone
            found, self._commit_checksum = read(), None
        else:
            ranks = Ranks(self._group)
            found = read() if ranks.world_size == 1 else _read_on_coordinator(ranks, read)
            self._commit_checksum = crc32c(found.data)
        return decode_checkpoint(self._store, found)

    def set_up_storage_reader(
        self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any
    ) -> None:
        """Check that this reader read the metadata. See base class.

        Raises:
            CheckpointError: It could not be read: the error of `read_metadata`.
        """
        if isinstance(metadata, _Unreadable):
            raise metadata.error
        if self._checkpoint is None or self._checkpoint.metadata is not metadata:
            # Of another reader, or changed since: its commit is not known.
            raise CheckpointError(
                f"{self!r} was given metadata that it did not read; call read_metadata() of the "
                "reader that loads"
            )

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        """Add the checksum of the commit object. See base class."""
        return dataclasses.replace(plan, storage_data=self._commit_checksum)

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        """Check that all ranks read the same commit object. See base class.

        Raises:
            CheckpointError: They did not.
        """
        if len({plan.storage_data for plan in plans} - {None}) > 1:
            raise CheckpointError(
                f"{self.checkpoint_id} was replaced while the ranks read its metadata; load again, "
                "with process_group= for one rank to read it for all"
            )
        return plans

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Read the items of a plan. See base class.

        Every tensor of the plan is resolved before the first byte is read.

        Raises:
            CheckpointCorruptError: The bytes are not those that were saved.
            CheckpointError: A value is not loaded because of `weights_only`.
            StorageError: It could not be read.
        """
        checkpoint = self._checkpoint
        if checkpoint is None:
            raise CheckpointError(f"{self!r} has no metadata; call read_metadata() first")
        targets: list[TensorTarget | ValueTarget] = []
        tensors: dict[int, tuple[ReadItem, torch.Tensor]] = {}
        for index, item in enumerate(plan.items):
            if item.type == LoadItemType.BYTE_IO:
                targets.append(self._value_target(checkpoint, item, planner))
                continue
            tensor = planner.resolve_tensor(item).detach()
            tensors[index] = item, tensor
            targets.append(_tensor_target(checkpoint, item, tensor))

        def done(index: int) -> None:
            if index in tensors:
                planner.commit_tensor(*tensors[index])

        with torch.no_grad():
            fetch(
                self._store,
                checkpoint,
                targets,
                registry=self._registry,
                done=done,
                is_verified=self.verify,
            )
        future: Future[None] = Future()
        future.set_result(None)
        return future

    def _value_target(
        self, checkpoint: StoredCheckpoint, item: ReadItem, planner: LoadPlanner
    ) -> ValueTarget:
        stored = checkpoint.locate(item.storage_index)
        name = item.storage_index.fqn

        def load(data: torch.Tensor) -> None:
            if self.weights_only:
                # The planner unpickles without `weights_only`: refuse the value before.
                load_value(as_bytes(data), name, uri_below(self._store, stored.key))
            planner.load_bytes(item, io.BytesIO(as_bytes(data)))

        return ValueTarget(name, stored, load)


def _read_on_coordinator(ranks: Ranks, read: Callable[[], T]) -> T:
    """Return the result of `read` on the coordinator, or raise its error on all ranks."""
    outcome: tuple[T | None, Exception | None] = None, None
    if ranks.is_coordinator:
        try:
            outcome = read(), None
        except AiofluxError as exc:
            outcome = None, exc
        except Exception as exc:  # may not pickle, and then the other ranks would wait forever
            outcome = None, CheckpointError(f"{type(exc).__name__}: {exc}")
    value, error = ranks.broadcast(outcome)
    if error is not None:
        raise error
    return value  # type: ignore[return-value]  # the result of `read`


def _tensor_target(
    checkpoint: StoredCheckpoint, item: ReadItem, tensor: torch.Tensor
) -> TensorTarget:
    index = item.storage_index
    if tuple(tensor.shape) != tuple(item.lengths):
        raise CheckpointError(
            f"{index.fqn!r} of {checkpoint.uri} is loaded into a tensor of {tuple(tensor.shape)}, "
            f"and {tuple(item.lengths)} of it were planned; load into a state of the saved shapes"
        )
    shape, offsets = checkpoint.shape_of(index), tuple(item.storage_offsets)
    if tensor.is_quantized or not _can_hold(tensor.dtype, shape.dtype):
        raise CheckpointError(
            f"{index.fqn!r} of {checkpoint.uri} is {shape.dtype}, and is loaded into a tensor of "
            f"{tensor.dtype}, which cannot hold all its values; load into {shape.dtype} and convert"
        )
    if len(offsets) != len(shape.sizes) or any(
        not 0 <= at <= at + length <= size
        for at, length, size in zip(offsets, item.lengths, shape.sizes, strict=False)
    ):
        raise checkpoint.corrupt_error(f"a plan asks for more of {index.fqn!r} than is stored")
    return TensorTarget(index.fqn, checkpoint.locate(index), shape, offsets, tensor)


def _can_hold(target: torch.dtype, stored: torch.dtype) -> bool:
    """Return whether a tensor may be loaded into another dtype: of its kind, or of a wider one.

    Between floats, precision may be lost, as models are loaded into other precisions than they
    were trained in; numbers may not wrap, nor lose their fraction or their imaginary part.
    """
    if not torch.can_cast(stored, target):
        return False
    is_integer = not (target.is_floating_point or target.is_complex or stored is torch.bool)
    if target == stored or not is_integer:
        return True
    inner, outer = torch.iinfo(stored), torch.iinfo(target)
    return outer.min <= inner.min and inner.max <= outer.max

"""StorageReader: loads of torch.distributed.checkpoint from object storage.

coordinator   reads .metadata, and broadcasts it to the ranks of the reader's process group
every rank    reads its part of each tensor in ranges, verified, into the tensor's memory
"""

from __future__ import annotations

import dataclasses
import io
from functools import partial
from typing import TYPE_CHECKING, Any, Unpack

import torch
from torch.distributed.checkpoint import storage as dcp_storage
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta
from torch.distributed.checkpoint.planner import LoadItemType
from torch.futures import Future

from aioflux import _bridge
from aioflux._values.checksums import crc32c
from aioflux._values.uri import parse_uri
from aioflux.checkpoint._format.nesting import CONTAINERS
from aioflux.checkpoint._load.fetch import fetch
from aioflux.checkpoint._load.stored_checkpoint import (
    CommitBytes,
    StoredCheckpoint,
    decode_checkpoint,
    read_commit_object,
)
from aioflux.checkpoint._load.targets import (
    TensorTarget,
    ValueTarget,
    as_bytes,
    default_registry,
    load_value,
)
from aioflux.checkpoint._save.ranks import Ranks
from aioflux.checkpoint._store.steps import Replacements, uri_below
from aioflux.errors import (
    AiofluxError,
    CheckpointCorruptError,
    CheckpointError,
    CheckpointNotFoundError,
)
from aioflux.store import open_store

if TYPE_CHECKING:
    import os

    from torch.distributed import ProcessGroup
    from torch.distributed.checkpoint._extension import ExtensionRegistry
    from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner, ReadItem

    from aioflux._values.stats import StoreStats
    from aioflux.options import StoreOptions
    from aioflux.store import Store


def is_checkpoint_uri(checkpoint_id: str | os.PathLike[str]) -> bool:
    """Return whether `checkpoint_id` has the form of a uri. A path does not."""
    if not isinstance(checkpoint_id, str):
        return False
    try:
        parse_uri(checkpoint_id)
    except ValueError:
        return False
    return True


def require_checkpoint_uri(checkpoint_id: str | os.PathLike[str], *, example: str) -> None:
    """Raise ValueError unless `checkpoint_id` has the form of a uri."""
    if not is_checkpoint_uri(checkpoint_id):
        raise ValueError(
            f"checkpoint_id must be a string with a uri, such as {example!r}, not "
            f"{checkpoint_id!r}; a Path drops a slash of gs://"
        )


class _Unreadable(Metadata):
    """Metadata that could not be read; `set_up_storage_reader` raises the error.

    If `read_metadata` raises an error, `dcp.load` raises an AssertionError instead. An error of
    `set_up_storage_reader` is not replaced.
    """

    def __init__(self, error: AiofluxError) -> None:
        super().__init__(state_dict_metadata={}, planner_data={}, storage_data={})
        self.error = error


class StorageReader(dcp_storage.StorageReader):
    """Reader of checkpoints of `torch.distributed.checkpoint` in object storage.

        dcp.load(state, storage_reader=StorageReader("gs://bucket/run-7/step-100"))

    Every rank creates a reader. With `process_group`, one rank reads the metadata for all ranks.
    Without it, each rank reads the metadata, and a load fails if the checkpoint was replaced
    between these reads.

    A rank reads only the bytes that it needs, even if a tensor is sharded differently than at the
    save. The bytes are compared with the checksums of the commit, which has one for each block (64
    KiB, or more in large objects), and objects are pinned to the generations in the commit.

    Checkpoints of stock `FileSystemWriter` and `FsspecWriter` are read by ranges, too. They have no
    checksums, so damaged bytes are not detected. Their objects are pinned to the generations that
    they have when the load begins.

    A checkpoint cannot run code: an interpreter of pickles that calls nothing reads the metadata,
    and `torch.load(weights_only=True)` reads the values that are not tensors. If ranks fail,
    `dcp.load` raises a `CheckpointException`, which is not an `Exception`; its `failures` are the
    errors of the ranks. After an error the state may be loaded in part. A tensor may have another
    float type than the saved tensor; values are then rounded. A type that cannot represent the
    saved values, such as integers for fractions, raises CheckpointError.
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
        """Create a reader; connections are opened later.

        Args:
            uri: Prefix of the checkpoint, such as `gs://bucket/run-7/step-100`.
            weights_only: Reject pickles that contain anything but tensors, plain values and the
                classes passed to `torch.serialization.add_safe_globals`. False lets the planner
                unpickle everything, which runs any code in the pickles.
            verify: Compare the bytes with the checksums of the commit. For this, ranges are widened
                to whole blocks; with False they are not.
            extension_registry: Extensions that undo the transforms of items of stock DCP; by
                default torch's own and `aioflux.checkpoint.compression`.
            process_group: Pass the group that `dcp.load` receives; if it receives none, pass
                `torch.distributed.group.WORLD`. Its first rank reads the metadata for all, and all
                ranks of the group must load. By default each rank reads the metadata. The group is
                not pickled.
            options: `transfer`, `retry`, `timeouts`, `credentials`, `endpoint_url` and
                `ssl_context`, as for `aioflux.open_store`.

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
        self._prefix = ""
        self._known: CommitBytes | None = None
        self._checkpoint: StoredCheckpoint | None = None
        self._commit_bytes: CommitBytes | None = None
        self._is_alone = False
        self._metadata_error: AiofluxError | None = None

    def __repr__(self) -> str:
        return f"<StorageReader {self.checkpoint_id}>"

    def __getstate__(self) -> dict[str, Any]:
        options = {name: value for name, value in self._options.items() if name != "progress"}
        fresh = dict.fromkeys(("_group", "_checkpoint", "_commit_bytes", "_metadata_error"))
        return {**self.__dict__, "_options": options, **fresh}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        _bridge.close_when_dropped(self._store)

    def _open(self, uri: str) -> Store:
        store = open_store(uri, **self._options)
        _bridge.close_when_dropped(store)
        return store

    @property
    def checkpoint_id(self) -> str:
        """Uri of the checkpoint that is read."""
        return uri_below(self._store, self._prefix).rstrip("/")

    @property
    def containers(self) -> str:
        """Result of `describe_containers` for the saved state; empty without a commit.

        It is in the last commit that was read, and describes the containers that DCP's paths cannot
        restore, as JSON.
        """
        commit = self._checkpoint.commit if self._checkpoint is not None else None
        return commit.extra.get(CONTAINERS, "") if commit is not None else ""

    @property
    def stats(self) -> StoreStats:
        """Requests, retries, bytes and latency of this reader so far, in this process."""
        return self._store.stats

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """Return whether `checkpoint_id` has the form of a uri. A path does not."""
        return is_checkpoint_uri(checkpoint_id)

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Prepare another load, of another checkpoint if a uri is given, with the same settings.

        Raises:
            ValueError: `checkpoint_id` is not a string such as `gs://bucket/run-7/step-100`.
        """
        self._checkpoint = self._metadata_error = None
        if checkpoint_id is None or checkpoint_id == "":
            return
        require_checkpoint_uri(checkpoint_id, example=self.checkpoint_id)
        if str(checkpoint_id).rstrip("/") != self.checkpoint_id:
            self._store = self._open(str(checkpoint_id))

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """Read the metadata of the checkpoint.

        With the keyword `rank`, read the metadata that this rank saved without collectives.

        Raises:
            CheckpointNotFoundError: There is no checkpoint.
            CheckpointCorruptError: The metadata is damaged, or contains anything but metadata. No
                code in it was run.
            StorageError: The metadata could not be read.
        """
        rank: int | None = kwargs.get("rank")
        # If the first call raises an error, `dcp.load` calls a second time with its rank.
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
            known = self._known if rank is None else None
            return known or _bridge.run(read_commit_object(self._store, rank, prefix=self._prefix))

        if rank is not None:
            self._commit_bytes = None
            return decode_checkpoint(self._store, read(), prefix=self._prefix)
        self._commit_bytes = Ranks(self._group).on_coordinator(read)
        return decode_checkpoint(self._store, self._commit_bytes, prefix=self._prefix)

    def set_up_storage_reader(
        self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any
    ) -> None:
        """Check that this reader read the metadata. See base class.

        Raises:
            CheckpointError: `read_metadata` failed, or the metadata is from another reader.
        """
        self._is_alone = False  # `prepare_global_plan` is called on the coordinator only
        self._known = None  # a second read of the metadata is for a checkpoint that was replaced
        if isinstance(metadata, _Unreadable):
            raise metadata.error
        if self._checkpoint is None or self._checkpoint.metadata is not metadata:
            # The metadata is from another reader, or was changed: its commit is unknown.
            raise CheckpointError(
                f"{self!r} did not read this metadata; call its read_metadata() before the load"
            )

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        """Add the checksum of the commit object. See base class."""
        checksum = crc32c(self._commit_bytes.data) if self._commit_bytes is not None else None
        return dataclasses.replace(plan, storage_data=checksum)

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        """Check that all ranks read the same commit object. See base class.

        Raises:
            CheckpointError: The checkpoint was replaced between the reads.
        """
        if len({plan.storage_data for plan in plans} - {None}) > 1:
            raise CheckpointError(
                f"{self.checkpoint_id} was replaced while the ranks read its metadata; load again, "
                "with process_group= for one rank to read it for all"
            )
        self._is_alone = len(plans) == 1
        return plans

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Read the items of a plan. See base class.

        The planner resolves every tensor of the plan before the first byte is read. If another save
        of the same structure replaces the checkpoint meanwhile, a load of one rank, or with
        `process_group`, begins again with the new one.

        Raises:
            CheckpointCorruptError: The stored bytes are damaged.
            CheckpointError: `weights_only` rejects a value, or a tensor has other sizes or an
                unsuitable dtype.
            StorageError: The stored bytes could not be read.
        """
        checkpoint = self._checkpoint
        if checkpoint is None:
            raise CheckpointError(f"{self!r} has no metadata; call read_metadata() first")
        ranks, replacements = Ranks(self._group), Replacements(self._store, self._prefix)
        while True:
            failure: Exception | None = None
            try:
                self._read_items(checkpoint, plan, planner)
            except Exception as exc:  # raised after the collectives, which the other ranks wait for
                failure = exc
            commit_bytes = self._commit_bytes if self._is_alone or ranks.world_size > 1 else None
            is_corrupt = isinstance(failure, CheckpointCorruptError)
            if commit_bytes is None or not ranks.broadcast(any(ranks.gather(is_corrupt))):
                break
            if not ranks.on_coordinator(partial(_has_newer, replacements, commit_bytes.data)):
                break
            self._checkpoint = newer = self._read_checkpoint(None)
            if newer.metadata.state_dict_metadata != checkpoint.metadata.state_dict_metadata:
                raise CheckpointCorruptError(
                    f"{self.checkpoint_id} was replaced by a checkpoint of another structure while "
                    "it was loaded; load again"
                )
            checkpoint = newer
        if failure is not None:
            raise failure
        future: Future[None] = Future()
        future.set_result(None)
        return future

    def _read_items(
        self, checkpoint: StoredCheckpoint, plan: LoadPlan, planner: LoadPlanner
    ) -> None:
        targets: list[TensorTarget | ValueTarget] = []
        tensors: dict[int, tuple[ReadItem, torch.Tensor]] = {}
        for index, item in enumerate(plan.items):
            if item.type == LoadItemType.BYTE_IO:
                targets.append(self._value_target(checkpoint, item, planner))
                continue
            tensor = planner.resolve_tensor(item).detach()
            tensors[index] = item, tensor
            targets.append(_tensor_target(checkpoint, item, tensor))

        def on_loaded(index: int) -> None:
            if index in tensors:
                planner.commit_tensor(*tensors[index])

        with torch.no_grad():
            fetch(
                self._store,
                checkpoint,
                targets,
                registry=self._registry,
                on_loaded=on_loaded,
                is_verified=self.verify,
            )

    def _value_target(
        self, checkpoint: StoredCheckpoint, item: ReadItem, planner: LoadPlanner
    ) -> ValueTarget:
        stored = checkpoint.locate(item.storage_index)
        name = item.storage_index.fqn

        def load(data: torch.Tensor) -> None:
            if self.weights_only:
                # The planner unpickles without `weights_only`, so reject the value before.
                load_value(as_bytes(data), name, uri_below(self._store, self._prefix + stored.key))
            planner.load_bytes(item, io.BytesIO(as_bytes(data)))

        return ValueTarget(name, stored, load)


def _has_newer(replacements: Replacements, data: bytes) -> bool:
    return _bridge.run(replacements.has_newer(data))


def _tensor_target(
    checkpoint: StoredCheckpoint, item: ReadItem, tensor: torch.Tensor
) -> TensorTarget:
    index = item.storage_index
    if tuple(tensor.shape) != tuple(item.lengths):
        raise CheckpointError(
            f"{index.fqn!r} of {checkpoint.uri} is loaded into a tensor of {tuple(tensor.shape)}, "
            f"and a part of {tuple(item.lengths)} is planned; load into a state of the saved shapes"
        )
    shape, offsets = checkpoint.shape_of(index), tuple(item.storage_offsets)
    if tensor.is_quantized or not _can_hold(tensor.dtype, shape.dtype):
        raise CheckpointError(
            f"{index.fqn!r} of {checkpoint.uri} is {shape.dtype}, and is loaded into a tensor of "
            f"{tensor.dtype}, which cannot hold all its values; load into {shape.dtype} and convert"
        )
    if any(size > 1 and not step for size, step in zip(tensor.shape, tensor.stride(), strict=True)):
        raise CheckpointError(
            f"{index.fqn!r} of {checkpoint.uri} is loaded into an expanded tensor of "
            f"{tuple(tensor.shape)}, whose elements share memory; load into its .contiguous()"
        )
    if len(offsets) != len(shape.sizes) or any(
        not 0 <= offset <= offset + length <= size
        for offset, length, size in zip(offsets, item.lengths, shape.sizes, strict=False)
    ):
        raise checkpoint.corrupt_error(f"a plan asks for more of {index.fqn!r} than is stored")
    return TensorTarget(index.fqn, checkpoint.locate(index), shape, offsets, tensor)


def _can_hold(target: torch.dtype, stored: torch.dtype) -> bool:
    """Return whether a stored tensor may be loaded into a tensor of another dtype.

    Floats may lose precision, since models are loaded in other precisions than they were trained
    in. Integers must not wrap. Fractions and imaginary parts must not be dropped.
    """
    if not torch.can_cast(stored, target):
        return False
    is_integer = not (target.is_floating_point or target.is_complex or stored is torch.bool)
    if target == stored or not is_integer:
        return True
    source, wider = torch.iinfo(stored), torch.iinfo(target)
    return wider.min <= source.min and source.max <= wider.max

"""Distributed checkpoint writer and reader with the API of gcs-torch-dataflux."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, cast

from aioflux.checkpoint.dcp import StorageReader, StorageWriter
from aioflux.compat.dataflux._account import Account
from aioflux.compat.dataflux.lightning._uris import gcs_uri

if TYPE_CHECKING:
    import os

    from torch.distributed.checkpoint._extension import ExtensionRegistry

    Path = str | os.PathLike[str]

__all__ = ["GCSDistributedReader", "GCSDistributedWriter"]

_NO_EFFECT = frozenset(
    {"sync_files", "per_thread_copy_ahead", "cache_staged_state_dict", "single_file_per_rank"}
)
_MAX_OBJECTS = 1000
"""Largest number of objects of one rank, with one object for each tensor."""


class GCSDistributedWriter(StorageWriter):
    """Writer of checkpoints of `torch.distributed.checkpoint` to a bucket.

        dcp.save(state, storage_writer=GCSDistributedWriter("gs://bucket/step-1", "project"))

    Differences from the old class, which require no change in programs:

    * The class works with torch 2.7 and later.
    * A save that fails on one rank fails on all ranks, and does not change the existing checkpoint.
    * Each save writes objects with new keys. `.metadata`, which torch's own readers can load,
      contains the keys and the checksums.
    """

    def __init__(
        self,
        path: Path,
        project_name: str,
        storage_client: Any = None,
        debug: bool = False,
        **kwargs: Any,
    ) -> None:
        """Set the options; sends no request.

        Args:
            path: `gs://bucket/prefix` of the checkpoint, as a string or a path object.
            project_name: Without effect: names of buckets are unique.
            storage_client: As for `DatafluxLightningCheckpoint`.
            debug: Without effect: nothing is printed.
            kwargs: Options of torch's FileSystemWriter. `thread_count` is the maximum number of
                objects that each rank writes. With `single_file_per_rank=False` a rank writes one
                object for each tensor, up to 1,000. With `overwrite=False` an existing checkpoint
                raises an error. `sync_files`, `per_thread_copy_ahead` and
                `cache_staged_state_dict` have no effect.

        Raises:
            TypeError: An option is unknown.
            ValueError: The path is not in a bucket, or `_extensions` are given.
        """
        self.project_name = project_name
        self.debug = debug
        if kwargs.pop("_extensions", None):
            raise ValueError(
                "GCSDistributedWriter does not support _extensions; to compress, use "
                "aioflux.checkpoint.dcp.StorageWriter with "
                "compression=aioflux.checkpoint.compression.ZStandard()"
            )
        mode = "overwrite" if kwargs.pop("overwrite", True) else "create"
        num_objects = kwargs.pop("thread_count", 1)
        if not kwargs.get("single_file_per_rank", True):
            num_objects = _MAX_OBJECTS
        unknown = sorted(set(kwargs) - _NO_EFFECT)
        if unknown:
            raise TypeError(f"GCSDistributedWriter has no option {unknown[0]!r}")
        super().__init__(
            gcs_uri(path),
            objects_per_rank=num_objects,
            mode=cast("Any", mode),
            **Account(storage_client).options,
        )

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: Path) -> bool:
        """Return whether a checkpoint can be written to a uri or path."""
        return _is_in_bucket(checkpoint_id)

    def reset(self, checkpoint_id: Path | None = None) -> None:
        """Start another save, to `checkpoint_id` if given."""
        super().reset(gcs_uri(checkpoint_id) if checkpoint_id else None)


class GCSDistributedReader(StorageReader):
    """Reader of checkpoints of `torch.distributed.checkpoint` from a bucket.

        dcp.load(state, storage_reader=GCSDistributedReader("gs://bucket/step-1", "project"))

    Checkpoints of the old writer can be read, too. Differences from the old class:

    * Each rank reads only the ranges that it needs, and not whole objects.
    * Checksums are verified if the checkpoint has checksums.
    * Values that are not tensors are read with `weights_only=True` by default. For a checkpoint
      with values of other classes, pass `weights_only=False`.
    """

    def __init__(
        self,
        path: Path,
        project_name: str,
        storage_client: Any = None,
        debug: bool = False,
        *,
        weights_only: bool = True,
        _extension_registry: ExtensionRegistry | None = None,
    ) -> None:
        """Set the options; sends no request.

        Args:
            path: `gs://bucket/prefix` of the checkpoint, as a string or a path object.
            project_name: Without effect: names of buckets are unique.
            storage_client: As for `DatafluxLightningCheckpoint`.
            debug: Without effect: nothing is printed.
            weights_only: As in `aioflux.checkpoint.dcp.StorageReader`.
            _extension_registry: As in torch's FileSystemReader.

        Raises:
            ValueError: The path is not in a bucket.
        """
        self.project_name = project_name
        self.debug = debug
        super().__init__(
            gcs_uri(path),
            weights_only=weights_only,
            extension_registry=_extension_registry,
            **Account(storage_client).options,
        )

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: Path) -> bool:
        """Return whether a checkpoint can be read from a uri or path."""
        return _is_in_bucket(checkpoint_id)

    def reset(self, checkpoint_id: Path | None = None) -> None:
        """Start another load, from `checkpoint_id` if given."""
        super().reset(gcs_uri(checkpoint_id) if checkpoint_id else None)


def _is_in_bucket(checkpoint_id: Path) -> bool:
    try:
        gcs_uri(checkpoint_id)
    except (TypeError, ValueError):
        return False
    return True

"""The distributed writer and reader of gcs-torch-dataflux, over aioflux."""

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
"""Objects of one rank, at most, if each tensor is to have its own."""


class GCSDistributedWriter(StorageWriter):
    """Writes checkpoints of `torch.distributed.checkpoint` to a bucket.

        dcp.save(state, storage_writer=GCSDistributedWriter("gs://bucket/step-1", "project"))

    Differences from the old class, which need no change in code that uses it: it works with torch
    2.7 and later; a save that fails on one rank fails on all of them, and leaves the existing
    checkpoint; objects have keys of their own for each save, and `.metadata`, which
    stock readers load, names them with their checksums.
    """

    def __init__(
        self,
        path: Path,
        project_name: str,
        storage_client: Any = None,
        debug: bool = False,
        **kwargs: Any,
    ) -> None:
        """Set the options; sends nothing yet.

        Args:
            path: `gs://bucket/prefix` of the checkpoint, as text or as a path.
            project_name: Kept, without effect: names of buckets are unique.
            storage_client: As for `DatafluxLightningCheckpoint`.
            debug: Kept, without effect: nothing is printed.
            kwargs: Options of torch's FileSystemWriter: `thread_count` objects are written by each
                rank, and with `single_file_per_rank=False` one for each tensor, up to 1,000.
                With `overwrite=False` an existing checkpoint is an error. `sync_files`,
                `per_thread_copy_ahead` and `cache_staged_state_dict` have no effect.

        Raises:
            TypeError: There is no such option.
            ValueError: The path is in no bucket, or an extension is given.
        """
        self.project_name = project_name
        self.debug = debug
        if kwargs.pop("_extensions", None):
            raise ValueError(
                "_extensions are of torch's own writer; use aioflux.checkpoint.dcp.StorageWriter "
                "with compression=aioflux.checkpoint.compression.ZStandard()"
            )
        mode = "overwrite" if kwargs.pop("overwrite", True) else "create"
        num_objects = kwargs.pop("thread_count", 1)
        if not kwargs.get("single_file_per_rank", True):
            num_objects = _MAX_OBJECTS
        unknown = sorted(set(kwargs) - _NO_EFFECT)
        if unknown:
            raise TypeError(f"GCSDistributedWriter takes no {unknown[0]!r}")
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
        """Start another save, to another uri or path if one is given."""
        super().reset(gcs_uri(checkpoint_id) if checkpoint_id else None)


class GCSDistributedReader(StorageReader):
    """Reads checkpoints of `torch.distributed.checkpoint` from a bucket.

        dcp.load(state, storage_reader=GCSDistributedReader("gs://bucket/step-1", "project"))

    It reads checkpoints of the old writer, too. Differences from the old class, which need no
    change in code that uses it: a rank reads the ranges that it needs, and not whole objects;
    checksums are verified if there are any; other values than tensors are read with
    `weights_only=True`, unless `weights_only` is given as False.
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
        """Set the options; sends nothing yet.

        Args:
            path: `gs://bucket/prefix` of the checkpoint, as text or as a path.
            project_name: Kept, without effect: names of buckets are unique.
            storage_client: As for `DatafluxLightningCheckpoint`.
            debug: Kept, without effect: nothing is printed.
            weights_only: As in `aioflux.checkpoint.dcp.StorageReader`.
            _extension_registry: As in torch's FileSystemReader.

        Raises:
            ValueError: The path is in no bucket.
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
        """Start another load, from another uri or path if one is given."""
        super().reset(gcs_uri(checkpoint_id) if checkpoint_id else None)


def _is_in_bucket(checkpoint_id: Path) -> bool:
    try:
        gcs_uri(checkpoint_id)
    except (TypeError, ValueError):
        return False
    return True

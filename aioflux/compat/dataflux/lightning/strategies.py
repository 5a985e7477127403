"""DatafluxFSDPStrategy: the strategy in the `demo` of gcs-torch-dataflux, over aioflux."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from aioflux.compat.dataflux.lightning._uris import uri_of
from aioflux.compat.dataflux.lightning.dataflux_lightning_checkpoint import (
    DatafluxLightningAsyncCheckpoint,
    DatafluxLightningCheckpoint,
)
from aioflux.integrations.lightning import FSDPStrategy

if TYPE_CHECKING:
    import os

    Path = str | os.PathLike[str]

__all__ = ["DatafluxFSDPStrategy"]


class DatafluxFSDPStrategy(FSDPStrategy):
    """Lightning's FSDPStrategy, with shards of checkpoints in a bucket.

    Differences from the old class, which need no change in code that uses it:

    * The given client is used. The old class used another for the shards.
    * A checkpoint is visible when all of it is stored, meta.pt included.
    * With `use_async`, a save that failed is raised by the next one and when the trainer ends, and
      the strategy can be made before the process group, which the old class needed.
    * Nothing is printed.
    """

    def __init__(
        self, project_name: str, storage_client: Any = None, use_async: bool = False, **kwargs: Any
    ) -> None:
        """Choose an account; sends nothing yet.

        Args:
            project_name: Kept, without effect: names of buckets are unique.
            storage_client: As for `DatafluxLightningCheckpoint`.
            use_async: Return from a save when the shards are copied in host memory.
            kwargs: Options of Lightning's FSDPStrategy; `state_dict_type` is "sharded" by default.
        """
        super().__init__(**{"state_dict_type": "sharded", **kwargs})
        kind = DatafluxLightningAsyncCheckpoint if use_async else DatafluxLightningCheckpoint
        self.checkpoint_io = kind(project_name, storage_client)
        self.storage_client = storage_client
        self.use_async = use_async

    def save_checkpoint(
        self, checkpoint: dict[str, Any], filepath: Path, storage_options: Any = None
    ) -> None:
        """Save a checkpoint; called by every rank. See base class."""
        super().save_checkpoint(checkpoint, uri_of(filepath), storage_options)

    def load_checkpoint(
        self, checkpoint_path: Path, weights_only: bool | None = None
    ) -> dict[str, Any]:
        """Load a checkpoint; called by every rank. See base class."""
        return super().load_checkpoint(uri_of(checkpoint_path), weights_only)

"""DatafluxFSDPStrategy: an FSDP strategy with the API of gcs-torch-dataflux's `demo`."""

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
    """Lightning's FSDPStrategy with sharded checkpoints in a bucket.

    Differences from the old class, which require no change in programs:

    * `storage_client` is used for all objects. The old class used another client for the shards.
    * A checkpoint becomes visible after all its objects are stored, meta.pt included.
    * With `use_async`, a failed save raises in the next save and at the end of training.
    * With `use_async`, the strategy can be created before the process group.
    * Nothing is printed.
    """

    def __init__(
        self, project_name: str, storage_client: Any = None, use_async: bool = False, **kwargs: Any
    ) -> None:
        """Create the strategy and its checkpoint plugin; sends no request.

        Args:
            project_name: Without effect: names of buckets are unique.
            storage_client: As for `DatafluxLightningCheckpoint`.
            use_async: Whether saves return after a copy to host memory.
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
        """Save a checkpoint; every rank must call it. See base class."""
        super().save_checkpoint(checkpoint, uri_of(filepath), storage_options)

    def load_checkpoint(
        self, checkpoint_path: Path, weights_only: bool | None = None
    ) -> dict[str, Any]:
        """Load a checkpoint; every rank must call it. See base class."""
        return super().load_checkpoint(uri_of(checkpoint_path), weights_only)

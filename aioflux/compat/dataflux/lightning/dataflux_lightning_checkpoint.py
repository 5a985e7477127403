"""Checkpoint plugins for Lightning with the API of gcs-torch-dataflux."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from aioflux.compat.dataflux._account import Account
from aioflux.compat.dataflux.lightning._uris import uri_of
from aioflux.integrations.lightning import AiofluxCheckpointIO

if TYPE_CHECKING:
    import os

    Path = str | os.PathLike[str]

__all__ = ["DatafluxLightningAsyncCheckpoint", "DatafluxLightningCheckpoint"]


class DatafluxLightningCheckpoint(AiofluxCheckpointIO):
    """Checkpoints in a bucket: `Trainer(plugins=[DatafluxLightningCheckpoint(project_name)])`.

    Differences from the old class, which require no change in programs:

    * The plugin works with current versions of Lightning, which pass `weights_only` to
      `load_checkpoint`.
    * A failed save does not change the existing checkpoint. Reads are verified.
    * Memory is bounded: parts are sent while the program writes, and ranges are read in parallel.
      The old class had a whole checkpoint in memory to save it, and two copies to load it.
    * Paths on the local disk are accepted: Lightning saves there if no `dirpath` is set. The old
      class rejected such paths.
    * Removing a missing checkpoint raises no error.
    """

    storage_client: Any
    """The client that was passed; None after unpickling."""
    _is_background = False

    def __init__(
        self, project_name: str, storage_client: Any = None, disable_multipart: bool = False
    ) -> None:
        """Set the account; sends no request.

        Args:
            project_name: Without effect: names of buckets are unique.
            storage_client: A `google.cloud.storage.Client` whose endpoint and credentials are used.
                By default Application Default Credentials, or no credentials if the environment
                variable STORAGE_EMULATOR_HOST names an emulator.
            disable_multipart: Without effect: large checkpoints are always sent in parallel parts.
        """
        self._set_up(project_name, Account(storage_client), disable_multipart)
        self.storage_client = storage_client

    def _set_up(self, project_name: str, account: Account, disable_multipart: bool) -> None:
        AiofluxCheckpointIO.__init__(self, background=self._is_background, **account.options)
        self.project_name = project_name
        self.storage_client = None
        self.disable_multipart = disable_multipart
        self._account = account

    def __getstate__(self) -> dict[str, Any]:
        # Clients cannot be pickled. `_account` has a copy of endpoint and credentials.
        return {
            "project_name": self.project_name,
            "account": self._account,
            "disable_multipart": self.disable_multipart,
        }

    def __setstate__(self, state: dict[str, Any]) -> None:
        self._set_up(**state)

    def save_checkpoint(
        self, checkpoint: dict[str, Any], path: Path, storage_options: Any = None
    ) -> None:
        """Store a checkpoint in a bucket or on the local disk; see base class."""
        super().save_checkpoint(checkpoint, uri_of(path), storage_options)

    def load_checkpoint(
        self, path: Path, map_location: Any = None, weights_only: bool | None = None
    ) -> dict[str, Any]:
        """Load a checkpoint from a bucket or from the local disk; see base class."""
        return super().load_checkpoint(uri_of(path), map_location, weights_only)

    def remove_checkpoint(self, path: Path) -> None:
        """Remove a checkpoint from a bucket or from the local disk; see base class."""
        super().remove_checkpoint(uri_of(path))


class DatafluxLightningAsyncCheckpoint(DatafluxLightningCheckpoint):
    """A `DatafluxLightningCheckpoint` whose saves return after a copy to host memory.

    Further differences from the old class: A save waits until the previous save is stored; the old
    class ran any number of saves at the same time. An older checkpoint is removed only after the
    newer one is stored. A failed save raises in the next save and at the end of training.
    """

    _is_background = True

"""The checkpoint plugins of gcs-torch-dataflux for Lightning, over aioflux."""

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

    Differences from the old class, which need no change in code that uses it:

    * It works with current versions of Lightning, which pass `weights_only` to `load_checkpoint`.
    * A save that fails leaves the existing checkpoint; reads are verified.
    * Parts are sent while more is written, and ranges are read in parallel: memory is bounded; the
      old class held all of a checkpoint, twice to load one.
    * Paths of the local disk are accepted, too: Lightning saves there if no `dirpath` is given, and
      the old class rejected it.
    * Removing a missing checkpoint is no error.
    """

    storage_client: Any
    """The given client; None in a copy that was pickled."""
    _is_background = False

    def __init__(
        self, project_name: str, storage_client: Any = None, disable_multipart: bool = False
    ) -> None:
        """Choose an account; sends nothing yet.

        Args:
            project_name: Kept, without effect: names of buckets are unique.
            storage_client: A `google.cloud.storage.Client` whose endpoint and credentials are used;
                by default Application Default Credentials, or none if the environment variable
                STORAGE_EMULATOR_HOST names an emulator.
            disable_multipart: Kept, without effect: large checkpoints are sent in parallel parts.
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
        # Google's clients do not pickle. The account has copied endpoint and credentials.
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
        """Store a checkpoint; see base class.

        Raises:
            StorageError: It could not be stored.
            ValueError: The path is in no bucket and not of the local disk.
        """
        super().save_checkpoint(checkpoint, uri_of(path), storage_options)

    def load_checkpoint(
        self, path: Path, map_location: Any = None, weights_only: bool | None = None
    ) -> dict[str, Any]:
        """Load a checkpoint; see base class.

        Raises:
            NotFoundError: There is no such checkpoint.
            ValueError: The path is in no bucket and not of the local disk.
        """
        return super().load_checkpoint(uri_of(path), map_location, weights_only)

    def remove_checkpoint(self, path: Path) -> None:
        """Remove a checkpoint; see base class.

        Raises:
            ValueError: The path is in no bucket and not of the local disk.
        """
        super().remove_checkpoint(uri_of(path))


class DatafluxLightningAsyncCheckpoint(DatafluxLightningCheckpoint):
    """The same, and a save returns when the checkpoint is copied in host memory.

    Further differences from the old class: a save waits until the one before is stored, while the
    old class ran any number at a time; an older checkpoint is removed when the newer one is stored,
    and not before; a failure is raised by the next save and when the trainer ends.
    """

    _is_background = True

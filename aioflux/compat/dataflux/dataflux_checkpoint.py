"""DatafluxCheckpoint: the checkpoint class of gcs-torch-dataflux, implemented with aioflux."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from aioflux.checkpoint import open_reader, open_writer
from aioflux.compat.dataflux._account import Account

if TYPE_CHECKING:
    from aioflux.checkpoint import CheckpointReader, CheckpointWriter

__all__ = ["DatafluxCheckpoint"]


class DatafluxCheckpoint:
    """Files in a bucket for `torch.save` and `torch.load`.

    Differences from the old class, which require no change in code that uses `with` blocks:

    * After an exception in the `with` block, or without `close`, nothing is stored. The old class
      replaced the existing checkpoint by the bytes written until then.
    * A second `close` has no effect.
    * Memory is bounded: parts are sent while the program writes, and ranges are read in parallel.
      The old class had a whole checkpoint in memory to save it, and two copies to load it. For
      this reason the writer has no `seek` and no `getvalue`.
    * Reads are verified by their crc32c.
    """

    def __init__(self, project_name: str, bucket_name: str, storage_client: Any = None) -> None:
        """Set the bucket and the account; sends no request.

        Args:
            project_name: Without effect: names of buckets are unique.
            bucket_name: Name of the bucket.
            storage_client: As for `DataFluxMapStyleDataset`.
        """
        self.project_name = project_name
        self.bucket_name = bucket_name
        self.storage_client = storage_client
        self._account = Account(storage_client)

    def reader(self, object_name: str) -> CheckpointReader:
        """Open an object for `torch.load`.

        Raises:
            NotFoundError: The object does not exist.
        """
        return open_reader(self._uri(object_name), **self._account.options)

    def writer(self, object_name: str) -> CheckpointWriter:
        """Open an object for `torch.save`; it is stored when the `with` block succeeds."""
        return open_writer(self._uri(object_name), **self._account.options)

    def __getstate__(self) -> dict[str, Any]:
        # Clients cannot be pickled. `_account` has a copy of endpoint and credentials.
        return {**self.__dict__, "storage_client": None}

    def _uri(self, object_name: str) -> str:
        return f"gs://{self.bucket_name}/{object_name}"

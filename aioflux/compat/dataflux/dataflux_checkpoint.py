"""DatafluxCheckpoint: the checkpoint files of gcs-torch-dataflux over aioflux."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from aioflux.checkpoint import open_reader, open_writer
from aioflux.compat.dataflux._account import Account

if TYPE_CHECKING:
    from aioflux.checkpoint import CheckpointReader, CheckpointWriter

__all__ = ["DatafluxCheckpoint"]


class DatafluxCheckpoint:
    """Files in a bucket for `torch.save` and `torch.load`.

    Differences from the old class, which need no change in code that uses it as a context manager:

    * An exception in the `with` block, or a writer that is never closed, stores nothing. The old
      class replaced the existing checkpoint by the bytes written until then.
    * Closing twice stores once.
    * Parts are sent while more is written, and ranges are read in parallel: memory is bounded; the
      old class held all of a checkpoint, twice to load one. The writer therefore has no `seek` and
      no `getvalue`.
    * Reads are verified by their crc32c.
    """

    def __init__(self, project_name: str, bucket_name: str, storage_client: Any = None) -> None:
        """Name the bucket; sends nothing yet.

        Args:
            project_name: Kept, without effect: names of buckets are unique.
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
            NotFoundError: There is no such object.
        """
        return open_reader(self._uri(object_name), **self._account.options)

    def writer(self, object_name: str) -> CheckpointWriter:
        """Open an object for `torch.save`; it appears, whole, when the `with` block ends well."""
        return open_writer(self._uri(object_name), **self._account.options)

    def __getstate__(self) -> dict[str, Any]:
        # Google's clients do not pickle. The account has copied endpoint and credentials.
        return {**self.__dict__, "storage_client": None}

    def _uri(self, object_name: str) -> str:
        return f"gs://{self.bucket_name}/{object_name}"

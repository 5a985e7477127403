"""The data objects of a checkpoint, read in the generations that the commit names."""

from __future__ import annotations

from typing import TYPE_CHECKING

from aioflux._concurrency.fan_out import gather_bounded
from aioflux.checkpoint._store.commits import MAX_IN_FLIGHT, uri_below
from aioflux.checkpoint._store.objects import meta_of, read_range
from aioflux.errors import CheckpointCorruptError, NotFoundError, PreconditionFailedError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from aioflux._values.meta import ObjectMeta
    from aioflux.checkpoint._load.stored_checkpoint import StoredCheckpoint
    from aioflux.options import TransferOptions
    from aioflux.store import Store

__all__ = ["DataObjects"]


class DataObjects:
    """The data objects that a load reads.

    Args:
        store: The checkpoint, opened by `open_checkpoint`.
        checkpoint: Its commit and metadata.
        is_verified: Compare blocks with the checksums of the commit, if there is one.
    """

    def __init__(self, store: Store, checkpoint: StoredCheckpoint, *, is_verified: bool) -> None:
        self.checkpoint = checkpoint
        self._store = store
        self._is_verified = is_verified
        self._metas: dict[str, ObjectMeta] = {}

    @property
    def transfer(self) -> TransferOptions:
        """Limits of the store."""
        return self._store.transfer

    async def find(self, keys: Sequence[str]) -> None:
        """Look up objects before they are read; those of stock DCP cost a request each.

        Raises:
            CheckpointCorruptError: One is missing.
        """
        metas = await gather_bounded(self._find_meta, keys, max_in_flight=MAX_IN_FLIGHT)
        self._metas = dict(zip(keys, metas, strict=True))

    async def _find_meta(self, key: str) -> ObjectMeta:
        stored = self.checkpoint.objects.get(key)
        if stored is not None:
            return meta_of(self._store, stored, is_pinned=self.checkpoint.is_pinned)
        try:
            return await self._store.head(key)
        except NotFoundError as exc:
            raise _missing(uri_below(self._store, key)) from exc

    def uri_of(self, key: str) -> str:
        """Return the whole uri of an object."""
        return self._metas[key].uri

    def size_of(self, key: str) -> int:
        """Return the size of an object in bytes."""
        return self._metas[key].size

    def block_size_of(self, key: str) -> int:
        """Return the bytes in each block of an object that is verified alone; 1 without blocks."""
        stored = self.checkpoint.objects.get(key)
        return stored.block_size if stored is not None and self._is_verified else 1

    async def read(self, key: str, start: int, into: memoryview) -> None:
        """Read bytes of an object, verified as far as the commit allows.

        Raises:
            CheckpointCorruptError: The bytes are not those that were saved.
        """
        meta, stored = self._metas[key], self.checkpoint.objects.get(key)
        if stored is not None and self._is_verified:
            pinned = self.checkpoint.is_pinned
            await read_range(self._store, stored, start=start, into=into, is_pinned=pinned)
            return
        try:
            pin = meta if meta.generation else key
            num_read = await self._store.get_into(pin, into, start=start)
        except (NotFoundError, PreconditionFailedError) as exc:
            raise _missing(meta.uri) from exc
        if num_read < into.nbytes:
            raise CheckpointCorruptError(
                f"{meta.uri} is truncated: it ends at byte {start + num_read}; load an earlier "
                "checkpoint"
            )


def _missing(uri: str) -> CheckpointCorruptError:
    return CheckpointCorruptError(
        f"{uri} is missing, or was replaced since the load began; load an earlier checkpoint"
    )

"""Transactions: writes that become visible one after the other at the end, or none of them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from fsspec.transaction import Transaction as _Transaction  # type: ignore[import-untyped]

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["DeferredWrite", "Transaction"]


class Transaction(_Transaction):  # type: ignore[misc]  # fsspec has no types
    """fsspec's transaction, which always ends when it is completed.

    Some versions of fsspec leave a filesystem in a transaction whose commit failed, so that nothing
    later is ever stored. A nested one is rejected: fsspec forgets the writes of the outer one.
    """

    def start(self) -> None:
        """Start the transaction.

        Raises:
            RuntimeError: The filesystem is in one, on this thread or on another.
        """
        if self.fs._intrans:  # noqa: SLF001  # as fsspec's own does
            raise RuntimeError(
                "a transaction is under way, and a filesystem has one at a time; end it first, or "
                "make another filesystem with skip_instance_cache=True"
            )
        super().start()

    def complete(self, commit: bool = True) -> None:
        """Commit all writes, or discard them; after one that fails, discard the others."""
        pending: list[Any] = list(self.files)
        self.files.clear()
        try:
            while pending:
                write = pending.pop(0)
                if commit:
                    write.commit()
                else:
                    write.discard()
        finally:
            for write in pending:
                write.discard()
            self.fs._intrans = False  # noqa: SLF001
            self.fs._transaction = None  # noqa: SLF001


class DeferredWrite:
    """A write that runs when its transaction commits."""

    def __init__(self, write: Callable[[], object]) -> None:
        self._write: Callable[[], object] | None = write

    def commit(self) -> None:
        """Run the write, once."""
        write, self._write = self._write, None
        if write is not None:
            write()

    def discard(self) -> None:
        """Drop the write."""
        self._write = None

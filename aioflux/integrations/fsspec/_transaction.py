"""Transaction: writes that become visible one behind the other at its end, or none of them."""

from __future__ import annotations

from typing import Any

from fsspec.transaction import Transaction as _Transaction  # type: ignore[import-untyped]

__all__ = ["Transaction"]


class Transaction(_Transaction):  # type: ignore[misc]  # fsspec has no types
    """fsspec's, and it is over when it ends, whatever happens.

    Some versions of fsspec leave a filesystem in a transaction whose commit failed, so that nothing
    later is ever stored. One within another is refused: fsspec forgets the writes of the outer one.
    """

    def start(self) -> None:
        """Begin.

        Raises:
            RuntimeError: One is under way, on this thread or on another.
        """
        if self.fs._intrans:  # noqa: SLF001  # as fsspec's own does
            raise RuntimeError(
                "a transaction is under way, and a filesystem has one at a time; end it first, or "
                "make another filesystem with skip_instance_cache=True"
            )
        super().start()

    def complete(self, commit: bool = True) -> None:
        """Commit all writes, or discard them; after one that fails, discard the others."""
        waiting: list[Any] = list(self.files)
        self.files.clear()
        try:
            while waiting:
                each = waiting.pop(0)
                if commit:
                    each.commit()
                else:
                    each.discard()
        finally:
            for each in waiting:
                each.discard()
            self.fs._intrans = False  # noqa: SLF001
            self.fs._transaction = None  # noqa: SLF001

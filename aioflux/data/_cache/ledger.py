"""Ledger of a cache: the total size of its entries, kept by all processes together."""

from __future__ import annotations

import os
import struct
from array import array
from pathlib import Path

from aioflux.data._cache.entries import new_name

__all__ = ["Ledger"]

_CHANGE = struct.Struct("<q")
_MEASURED = -(1 << 62)
"""First value of a ledger whose second value is a measured total. Without it, the directory may
have entries that were never counted."""


class Ledger:
    """The total size of the entries, as the sum of all changes: 8 bytes each, appended.

    Appending is atomic, so that no change is lost; an eviction restarts it with a measured total.
    It may be a little wrong, by writes in progress at that time or when a process died; the next
    eviction corrects that.
    """

    def __init__(self, path: str, incoming: str) -> None:
        self._path = path
        self._incoming = incoming
        self._file: int | None = None
        self._num_opened = 0
        self._close()

    def _close(self) -> None:
        # Cleared first: a child forked at this point must not close another file.
        file, self._file = self._file, None
        if file is not None:
            os.close(file)
        self._offset = 0
        self._total = 0
        self.is_measured = False

    def __del__(self) -> None:
        self._close()

    def _opened(self) -> int:
        """Return the open ledger; opened again if another process restarted it."""
        if self._file is not None and not os.fstat(self._file).st_nlink:
            self._close()
        if self._file is None:
            flags = os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC
            self._file = os.open(self._path, flags, 0o600)
            self._num_opened += 1
        return self._file

    def add_and_sum(self, num_bytes: int) -> int:
        """Append a change, and return the total."""
        while True:
            self.add(num_bytes)
            number, total = self._num_opened, self.total()
            if number == self._num_opened:
                return total
            # It was restarted in between, perhaps without this change.

    def add(self, num_bytes: int) -> None:
        """Append a change."""
        written = os.write(self._opened(), _CHANGE.pack(num_bytes))
        if written != _CHANGE.size:  # the rest would be misread
            os.unlink(self._path)

    def total(self) -> int:
        """Return the sum of all changes."""
        file = self._opened()
        while data := os.pread(file, 1 << 16, self._offset):
            changes = array("q", data[: len(data) - len(data) % _CHANGE.size])
            if not changes:
                break
            if not self._offset and changes[0] == _MEASURED:
                self.is_measured = True
                changes[0] = 0
            self._total += sum(changes)
            self._offset += len(changes) * _CHANGE.size
        return self._total

    def restart(self, total: int) -> None:
        """Replace the ledger by a measured total."""
        fresh = os.path.join(self._incoming, new_name())
        Path(fresh).write_bytes(_CHANGE.pack(_MEASURED) + _CHANGE.pack(total))
        os.replace(fresh, self._path)
        self._close()

"""Ledger: the total size of the entries of a cache, in a file that all processes append to."""

from __future__ import annotations

import os
import struct
from array import array
from pathlib import Path

from aioflux.data._cache.entries import new_name

_CHANGE = struct.Struct("<q")
_MEASURED = -(1 << 62)
"""First value of a ledger that was restarted; the second value is the measured total. Without this
value the ledger may not count all entries."""


class Ledger:
    """The total size of the entries, as the sum of appended changes of 8 bytes each.

    Appending is atomic, so that no change is lost. An eviction restarts the ledger with a measured
    total. The total is inexact after writes during an eviction and after the death of a process;
    the next eviction corrects it.
    """

    def __init__(self, path: str, temporary_directory: str) -> None:
        self._path = path
        self._temporary_directory = temporary_directory
        self._file: int | None = None
        self._num_opened = 0
        self._close()

    def _close(self) -> None:
        # Clear `_file` before the close: a child that is forked after the close must not close the
        # descriptor again, because another file may reuse the number.
        file, self._file = self._file, None
        if file is not None:
            os.close(file)
        self._offset = 0
        self._total = 0
        self.is_measured = False

    def __del__(self) -> None:
        self._close()

    def _opened(self) -> int:
        """Return the file descriptor; reopen the ledger if another process has restarted it."""
        if self._file is not None and not os.fstat(self._file).st_nlink:
            self._close()
        if self._file is None:
            flags = os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC
            self._file = os.open(self._path, flags, 0o600)
            self._num_opened += 1
        return self._file

    def add_and_sum(self, num_bytes: int) -> int:
        """Append a change, and return the total that includes it."""
        while True:
            self.add(num_bytes)
            num_opened, total = self._num_opened, self.total()
            if num_opened == self._num_opened:
                return total
            # The ledger was restarted in between, perhaps without this change: add it again.

    def add(self, num_bytes: int) -> None:
        """Append a change."""
        written = os.write(self._opened(), _CHANGE.pack(num_bytes))
        if written != _CHANGE.size:  # after a part of a change, all later changes would be misread
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
        """Replace the ledger by a new one that contains only a measured total."""
        temporary = os.path.join(self._temporary_directory, new_name())
        Path(temporary).write_bytes(_CHANGE.pack(_MEASURED) + _CHANGE.pack(total))
        os.replace(temporary, self._path)
        self._close()

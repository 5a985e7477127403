"""Ledger of a cache: what its entries take together, as all processes tell it."""

from __future__ import annotations

import os
import struct
from array import array
from pathlib import Path

from aioflux.data._cache.entries import new_name

__all__ = ["Ledger"]

_CHANGE = struct.Struct("<q")
_MEASURED = -(1 << 62)
"""Stands first in a ledger that begins with a sum that was measured, and not with a directory of
which nobody knows what it holds."""


class Ledger:
    """What the entries take together, as all processes tell it: 8 bytes a change, appended.

    To append is atomic, so that no change is lost; an eviction begins it anew with what it has
    measured. It may say a little too much or too little, by what was under way just then or when a
    process died; the next eviction puts that right.
    """

    def __init__(self, path: str, incoming: str) -> None:
        self._path = path
        self._incoming = incoming
        self._file: int | None = None
        self._num_opened = 0
        self._forget()

    def _forget(self) -> None:
        # Let go of it first: a child that is forked just here must not close another's.
        file, self._file = self._file, None
        if file is not None:
            os.close(file)
        self._at = 0
        self._total = 0
        self.is_measured = False

    def __del__(self) -> None:
        self._forget()

    def _opened(self) -> int:
        """Return the ledger that stands at its place now."""
        if self._file is not None and not os.fstat(self._file).st_nlink:
            self._forget()
        if self._file is None:
            flags = os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC
            self._file = os.open(self._path, flags, 0o600)
            self._num_opened += 1
        return self._file

    def take(self, num_bytes: int) -> int:
        """Tell a change, and return the sum of what was told so far."""
        while True:
            self.add(num_bytes)
            number, total = self._num_opened, self.total()
            if number == self._num_opened:
                return total
            # It was begun anew in between, perhaps without this change.

    def add(self, num_bytes: int) -> None:
        """Tell a change."""
        written = os.write(self._opened(), _CHANGE.pack(num_bytes))
        if written != _CHANGE.size:  # nothing behind it would be read as what it is
            os.unlink(self._path)

    def total(self) -> int:
        """Return the sum of what was told so far."""
        file = self._opened()
        while told := os.pread(file, 1 << 16, self._at):
            changes = array("q", told[: len(told) - len(told) % _CHANGE.size])
            if not changes:
                break
            if not self._at and changes[0] == _MEASURED:
                self.is_measured = True
                changes[0] = 0
            self._total += sum(changes)
            self._at += len(changes) * _CHANGE.size
        return self._total

    def restart(self, total: int) -> None:
        """Begin anew with a sum that was measured."""
        fresh = os.path.join(self._incoming, new_name())
        Path(fresh).write_bytes(_CHANGE.pack(_MEASURED) + _CHANGE.pack(total))
        os.replace(fresh, self._path)
        self._forget()

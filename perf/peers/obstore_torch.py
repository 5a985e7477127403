"""torch.save and torch.load with files of obstore, with defaults.

`torch.load` requires bytes, and `obstore.open_reader` returns another type.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import obstore
import torch

from perf.peers import _state_file
from perf.peers.obstore import open_store

if TYPE_CHECKING:
    from obstore.store import ObjectStore

    from perf.work import Work


class _File:
    """A file of `obstore.open_reader` whose `read` returns bytes."""

    def __init__(self, store: ObjectStore, key: str) -> None:
        self._reader = obstore.open_reader(store, key)
        self.seek, self.tell = self._reader.seek, self._reader.tell

    def read(self, size: int = -1, /) -> bytes:
        """Return the next bytes."""
        return self._reader.read(None if size < 0 else size).to_bytes()

    def readline(self) -> bytes:
        """Return the next line."""
        return self._reader.readline().to_bytes()


async def save_state(work: Work) -> int:
    store = open_store(work)

    def write(key: str, state: dict[str, torch.Tensor]) -> None:
        with obstore.open_writer(store, key) as file:
            torch.save(state, file)

    return await _state_file.save(write, work)


async def load_state(work: Work) -> int:
    store = open_store(work)

    def read(key: str) -> Any:
        return torch.load(_File(store, key), weights_only=True)  # type: ignore[arg-type]

    return await _state_file.load(read, work)

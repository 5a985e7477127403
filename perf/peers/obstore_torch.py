"""torch.save and torch.load with files of obstore, with defaults.

`torch.load` requires bytes, and `obstore.open_reader` returns another type.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import obstore
import torch

from perf._meter import steady
from perf.peers.obstore import open_store
from perf.states import num_bytes_of, state_of, touch
from perf.work import state_key

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
    """Save a state and return the bytes of its tensors."""
    store = open_store(work)

    async def save(work: Work) -> int:
        state = state_of(work.dtype, work.size_bytes)
        with obstore.open_writer(store, f"put/{state_key(work.dtype, work.size_bytes)}") as file:
            torch.save(state, file)
        return num_bytes_of(state)

    return await steady(save, work)


async def load_state(work: Work) -> int:
    """Load a state, read from each of its memory pages, and return the bytes of its tensors."""
    store = open_store(work)

    async def load(work: Work) -> int:
        file = _File(store, state_key(work.dtype, work.size_bytes))
        return touch(torch.load(file, weights_only=True))  # type: ignore[arg-type]

    return await steady(load, work)

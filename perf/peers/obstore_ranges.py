"""obstore: one large object in concurrent ranges, each copied into one buffer."""

from __future__ import annotations

from typing import TYPE_CHECKING

from perf.peers._parts import fill, put_into
from perf.peers.obstore import open_store
from perf.work import state_key

if TYPE_CHECKING:
    from perf.work import Work


async def get_one(work: Work) -> int:
    """Read one object after the other, each into memory of its own; return the bytes received."""
    store = open_store(work)

    async def read(key: str, start: int, end: int, view: memoryview) -> int:
        return put_into(view, await store.get_range_async(key, start=start, end=end))

    return await fill(read, work, again=False)


async def load_state(work: Work) -> int:
    """Read the first `size_bytes` bytes of the object of a state, without torch.load."""
    store = open_store(work)

    async def read(_: str, start: int, end: int, view: memoryview) -> int:
        key = state_key(work.dtype, work.size_bytes)
        return put_into(view, await store.get_range_async(key, start=start, end=end))

    return await fill(read, work, again=False)

"""obstore: one large object in concurrent ranges, each copied into one buffer."""

from __future__ import annotations

from typing import TYPE_CHECKING

from perf.peers.obstore import read_ranges

if TYPE_CHECKING:
    from perf.work import Work


async def get_one(work: Work) -> int:
    return await read_ranges(work, again=False)


async def load_state(work: Work) -> int:
    """Read the first `size_bytes` bytes of the object of a state, without torch.load."""
    return await read_ranges(work, again=False, is_state=True)

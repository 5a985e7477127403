"""Which item of a save goes to which object, and what the ranks agree on. Pure."""

from __future__ import annotations

import heapq
import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

from torch.distributed.checkpoint.planner import WriteItemType

from aioflux._values.checksums import crc32c

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch.distributed.checkpoint.planner import WriteItem

    from aioflux.checkpoint._save.safetensors import RankLayout

__all__ = ["Placement", "item_bytes", "plan_objects"]


@dataclass
class Placement:
    """Where one rank writes: what a plan carries from the coordinator to the ranks.

    A planner that caches its plans hands out the same one for every save, this along with it. So it
    counts its uses, and names another save for each: all ranks count alike.
    """

    save_id: str
    """The first save that it was made for."""
    rank: int
    """Rank that the plan is for."""
    layout: RankLayout | None = None
    """Where its tensors go, in the layout of safetensors."""
    num_uses: int = 0
    """Saves that it served in this process."""

    def use(self) -> str:
        """Return the name of the save that begins now."""
        number, self.num_uses = self.num_uses, self.num_uses + 1
        if not number:
            return self.save_id
        time, _, token = self.save_id.rpartition("-")
        return f"{time}-{crc32c(f'{token}/{number}'.encode()):08x}"


def item_bytes(item: WriteItem) -> int:
    """Return how many bytes of tensors an item holds; 0 for another value."""
    data = item.tensor_data
    if data is None:
        return 0
    return math.prod(data.chunk.sizes) * data.properties.dtype.itemsize


def plan_objects(items: Sequence[WriteItem], num_objects: int) -> list[list[WriteItem]]:
    """Spread items over so many objects at most, none empty, the largest about as small as can be.

    Values that are no tensors come first in an object, and tensors in the order of the plan, which
    is that of the state: what is loaded together lies together.
    """
    order = {id(item): number for number, item in enumerate(items)}
    heap = [(0, number) for number in range(num_objects)]
    objects: list[list[WriteItem]] = [[] for _ in range(num_objects)]
    for item in sorted(items, key=item_bytes, reverse=True):
        num_bytes, number = heapq.heappop(heap)
        objects[number].append(item)
        # One byte more, so that values of no size are spread too.
        heapq.heappush(heap, (num_bytes + item_bytes(item) + 1, number))
    for each in objects:
        each.sort(key=lambda item: (item.type != WriteItemType.BYTE_IO, order[id(item)]))
    return [each for each in objects if each]

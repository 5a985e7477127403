"""The plan of data objects: which item goes to which object, and what each rank receives. Pure."""

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

    from aioflux.checkpoint.dcp._safetensors_plan import RankLayout

__all__ = ["RankPlacement", "item_bytes", "plan_objects"]


@dataclass
class RankPlacement:
    """The storage data of a rank's plan, from the coordinator to the rank.

    A planner that caches its plans returns the same one, with this in it, for every save. So each
    use derives a new save id from the number of uses, which is the same on all ranks.
    """

    save_id: str
    """Save id of the first save."""
    rank: int
    layout: RankLayout | None = None
    """In the layout of safetensors only."""
    num_uses: int = 0
    """Saves that used it in this process."""

    def use(self) -> str:
        """Return the save id of the save that starts now."""
        number, self.num_uses = self.num_uses, self.num_uses + 1
        if not number:
            return self.save_id
        time, _, token = self.save_id.rpartition("-")
        return f"{time}-{crc32c(f'{token}/{number}'.encode()):08x}"


def item_bytes(item: WriteItem) -> int:
    """Return the bytes of an item that is a tensor; 0 for another value."""
    data = item.tensor_data
    if data is None:
        return 0
    return math.prod(data.chunk.sizes) * data.properties.dtype.itemsize


def plan_objects(items: Sequence[WriteItem], num_objects: int) -> list[list[WriteItem]]:
    """Spread items over at most `num_objects` objects of about the same size, none empty.

    Values that are no tensors come first in an object. Tensors keep the order of the plan, which
    is that of the state: items that are loaded together are stored together.
    """
    order = {id(item): number for number, item in enumerate(items)}
    heap = [(0, number) for number in range(num_objects)]
    objects: list[list[WriteItem]] = [[] for _ in range(num_objects)]
    for item in sorted(items, key=item_bytes, reverse=True):
        num_bytes, number = heapq.heappop(heap)
        objects[number].append(item)
        # One byte more, so that values without a size are spread, too.
        heapq.heappush(heap, (num_bytes + item_bytes(item) + 1, number))
    for each in objects:
        each.sort(key=lambda item: (item.type != WriteItemType.BYTE_IO, order[id(item)]))
    return [each for each in objects if each]

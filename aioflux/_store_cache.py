"""A cache of open stores by uri."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

S = TypeVar("S")


class StoreCache(dict[str, S]):
    """Stores by uri, each opened when its uri is first looked up. Threads may share a cache.

    Args:
        open_store: Opens the store of a uri. Stores that the cache drops are not closed by the
            cache: pass them through `_bridge.close_when_dropped`.
        max_stores: Most cached stores, or None for no limit. A full cache drops all of its stores
            before it opens another one.
    """

    def __init__(self, open_store: Callable[[str], S], *, max_stores: int | None = None) -> None:
        super().__init__()
        self._open_store = open_store
        self._max_stores = max_stores

    def __missing__(self, uri: str) -> S:
        if self._max_stores is not None and len(self) >= self._max_stores:
            self.clear()  # stores in use stay open, because their users refer to them
        return self.setdefault(uri, self._open_store(uri))

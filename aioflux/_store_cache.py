"""Open stores by uri, each opened on first use."""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["StoreCache"]

S = TypeVar("S")


class StoreCache(dict[str, S]):
    """Stores that one object reads and writes, by their uri; threads may share it.

    Args:
        open_store: Opens a store at a uri, and decides how it is closed when the cache drops it:
            see `_bridge.close_when_dropped`.
        max_stores: Stores that are cached at most; one more drops all of them.
    """

    def __init__(self, open_store: Callable[[str], S], *, max_stores: int | None = None) -> None:
        super().__init__()
        self._open_store = open_store
        self._max_stores = max_stores

    def __missing__(self, uri: str) -> S:
        if self._max_stores is not None and len(self) >= self._max_stores:
            self.clear()  # those in use are referred to by their users
        return self.setdefault(uri, self._open_store(uri))

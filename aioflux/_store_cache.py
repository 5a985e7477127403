"""Open stores by uri, each opened on first use."""

from __future__ import annotations

from typing import TYPE_CHECKING, Generic, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["StoreCache"]

S = TypeVar("S")


class StoreCache(Generic[S]):
    """Stores that one object reads and writes; threads may share it.

    Args:
        open_store: Opens a store at a uri. It also decides how the store is closed when the cache
            drops it: see `_bridge.close_when_dropped`.
        max_stores: Stores that are cached at most; one more drops all of them.
    """

    def __init__(self, open_store: Callable[[str], S], *, max_stores: int | None = None) -> None:
        self._open_store = open_store
        self._max_stores = max_stores
        self._by_uri: dict[str, S] = {}

    def __getitem__(self, uri: str) -> S:
        store = self._by_uri.get(uri)
        if store is None:
            if self._max_stores is not None and len(self._by_uri) >= self._max_stores:
                self._by_uri.clear()  # those in use are referred to by their users
            store = self._by_uri.setdefault(uri, self._open_store(uri))
        return store

    def all(self) -> list[S]:
        """Return the stores that are open."""
        return list(self._by_uri.values())

    def clear(self) -> list[S]:
        """Drop all stores and return them, for the caller to close."""
        stores, self._by_uri = self._by_uri, {}
        return list(stores.values())

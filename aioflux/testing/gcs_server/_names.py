"""Names of buckets and objects, and the objects of one bucket by name, in the order of GCS."""

from __future__ import annotations

import re
from bisect import bisect_left, insort
from typing import TYPE_CHECKING, Generic, TypeVar

from aioflux.testing.gcs_server._errors import APIError

if TYPE_CHECKING:
    from collections.abc import Iterable

T = TypeVar("T")
_FEW = 64
_MAX_NAME_BYTES = 1024
_FORBIDDEN = frozenset("\r\n\0")
_LABEL = re.compile(r"[a-z0-9]([a-z0-9_-]{0,61}[a-z0-9])?")


def check_object_name(name: str) -> None:
    """Reject a name that no object can have.

    Source: cloud.google.com/storage/docs/objects#naming. NUL is rejected too.

    Raises:
        APIError: 400.
    """
    size = len(name.encode())
    if not 1 <= size <= _MAX_NAME_BYTES:
        message = f"The name of an object has 1 to {_MAX_NAME_BYTES} bytes, not {size}."
        code = "KeyTooLongError" if size else "InvalidObjectName"
        raise APIError(400, "invalid", message, code=code)
    if name in (".", "..") or not _FORBIDDEN.isdisjoint(name):
        message = f"Disallowed object name: {name!r}"
        raise APIError(400, "invalid", message, code="InvalidObjectName")


def check_bucket_name(name: str) -> None:
    """Reject a name that GCS does not allow (cloud.google.com/storage/docs/buckets#naming).

    Raises:
        APIError: 400.
    """
    labels = name.split(".")
    longest = 63 if len(labels) == 1 else 222
    if not 3 <= len(name) <= longest or not all(map(_LABEL.fullmatch, labels)):
        raise APIError(400, "invalid", f"Invalid bucket name: '{name}'", code="InvalidBucketName")


class SortedNames(Generic[T]):
    """A dictionary that sorts its names on demand.

    Strings compare by code point, which is the order of their UTF-8 bytes. Added and removed names
    are sorted in by the next `ordered`: filling a bucket with a million objects costs one sort.
    """

    def __init__(self) -> None:
        self._items: dict[str, T] = {}
        self._ordered: list[str] = []
        self._added: dict[str, None] = {}  # in order of arrival, which sorts fast
        self._removed: set[str] = set()

    def __len__(self) -> int:
        return len(self._items)

    def get(self, name: str) -> T | None:
        """Return the value of a name, or None."""
        return self._items.get(name)

    def get_all(self, names: Iterable[str]) -> list[T]:
        """Return the values of names that are present."""
        return list(map(self._items.__getitem__, names))

    def put(self, name: str, value: T) -> None:
        """Set the value of a name."""
        if name not in self._items:
            if name in self._removed:
                self._removed.discard(name)
            else:
                self._added[name] = None
        self._items[name] = value

    def remove(self, name: str) -> None:
        """Remove a name that is present."""
        del self._items[name]
        if name in self._added:
            del self._added[name]
        else:
            self._removed.add(name)

    def ordered(self) -> list[str]:
        """Return all names in order. The list is shared: do not change it."""
        if len(self._removed) > _FEW:
            self._ordered = [name for name in self._ordered if name not in self._removed]
        else:
            for name in self._removed:
                del self._ordered[bisect_left(self._ordered, name)]
        if len(self._added) > _FEW:
            self._ordered.extend(self._added)
            self._ordered.sort()
        else:
            for name in self._added:
                insort(self._ordered, name)
        self._added.clear()
        self._removed.clear()
        return self._ordered

"""Keys and listings as columns, at a sixth of the memory of a list of ObjectMeta.

A column is one buffer. Reading it changes no reference count, so that forked workers share the
parent's pages, and it pickles at the speed of a copy for spawned ones.
"""

from __future__ import annotations

import zlib
from array import array
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, TypeAlias

from aioflux._meta import ObjectMeta
from aioflux._uri import quote_path

if TYPE_CHECKING:
    from collections.abc import Iterable

__all__ = ["KeyColumn", "Listing"]

_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
_MICROSECOND = timedelta(microseconds=1)
_NONE = -1
"""Stands for None in a column of numbers."""

Kind: TypeAlias = tuple[str, str, str, tuple[tuple[str, str], ...]]
"""What many objects share: content type, content encoding, storage class, the user's metadata."""


class KeyColumn:
    """Strings, end to end in one buffer."""

    __slots__ = ("_ends", "_text")

    def __init__(self, texts: Iterable[str] = ()) -> None:
        self._text = bytearray()
        self._ends = array("Q", [0])
        for text in texts:
            self.append(text)

    def append(self, text: str) -> None:
        """Add a string."""
        # Names of local files may hold lone surrogates, which stand for bytes that are no UTF-8.
        self._text += text.encode("utf-8", "surrogatepass")
        self._ends.append(len(self._text))

    def __len__(self) -> int:
        return len(self._ends) - 1

    def __getitem__(self, index: int) -> str:
        start, end = self._ends[index], self._ends[index + 1]
        return self._text[start:end].decode("utf-8", "surrogatepass")

    def checksum(self) -> int:
        """Return a CRC32 of the strings and where they end: the same for the same strings."""
        return zlib.crc32(self._ends, zlib.crc32(self._text))


class Listing:
    """Metadata of many objects of one store, in order."""

    __slots__ = (
        "_crc32c",
        "_etag",
        "_generation",
        "_key",
        "_kind",
        "_kinds",
        "_root",
        "_size",
        "_updated",
    )

    def __init__(self, metas: Iterable[ObjectMeta] = ()) -> None:
        self._root = ""
        self._key = KeyColumn()
        self._etag = KeyColumn()
        self._generation = KeyColumn()
        self._size = array("q")
        self._crc32c = array("q")
        self._updated = array("q")
        self._kind = array("Q")
        self._kinds: list[Kind] = []
        self.extend(metas)

    def extend(self, metas: Iterable[ObjectMeta]) -> None:
        """Add objects.

        Raises:
            ValueError: One is of another store than the others.
        """
        numbers = {kind: number for number, kind in enumerate(self._kinds)}
        for meta in metas:
            self._append(meta)
            kind = _kind(meta)
            self._kind.append(numbers.setdefault(kind, len(numbers)))
        self._kinds = list(numbers)

    def _append(self, meta: ObjectMeta) -> None:
        root = meta.uri.removesuffix(_in_uri(meta.key, meta.uri))
        if root != self._root and len(self):
            raise ValueError(f"{meta.uri} is not below {self._root}, like the objects before it")
        self._root = root
        self._key.append(meta.key)
        self._etag.append(meta.etag)
        self._generation.append(meta.generation)
        self._size.append(meta.size)
        self._crc32c.append(_NONE if meta.crc32c is None else meta.crc32c)
        updated = _NONE if meta.updated is None else (meta.updated - _EPOCH) // _MICROSECOND
        self._updated.append(updated)

    @property
    def keys(self) -> KeyColumn:
        """The keys, in order."""
        return self._key

    @property
    def sizes(self) -> array[int]:
        """The sizes, in order, in bytes."""
        return self._size

    def __len__(self) -> int:
        return len(self._size)

    def __getitem__(self, index: int) -> ObjectMeta:
        key = self._key[index]
        crc32c, updated = self._crc32c[index], self._updated[index]
        content_type, content_encoding, storage_class, user = self._kinds[self._kind[index]]
        return ObjectMeta(
            key=key,
            uri=self._root + _in_uri(key, self._root),
            size=self._size[index],
            etag=self._etag[index],
            generation=self._generation[index],
            crc32c=None if crc32c == _NONE else crc32c,
            updated=None if updated == _NONE else _EPOCH + updated * _MICROSECOND,
            content_type=content_type,
            content_encoding=content_encoding,
            storage_class=storage_class,
            metadata=dict(user),
        )


def _kind(meta: ObjectMeta) -> Kind:
    user = tuple(sorted(meta.metadata.items()))
    return meta.content_type, meta.content_encoding, meta.storage_class, user


def _in_uri(key: str, uri: str) -> str:
    return quote_path(key) if uri.startswith("file://") else key

"""Keys and listings as columns, at a sixth of the memory of a list of ObjectMeta.

Columns pickle at the speed of a copy for spawned workers, and forked ones share them. The same
bytes are a manifest: a listing that is stored as an object.

    magic | version, size of the header | header: JSON | columns | crc32c of all before
"""

from __future__ import annotations

import json
import struct
import sys
from array import array
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Final, Self, TypeAlias, overload

import google_crc32c

from aioflux._values.columns import NONE, KeyColumn, TimeColumn
from aioflux._values.meta import ObjectMeta
from aioflux._values.uri import quote_path

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator
    from datetime import datetime

__all__ = ["MAX_SIZE_BYTES", "KeyColumn", "Kind", "Listing"]

MAX_SIZE_BYTES: Final = 2**63 - 1
"""Largest size that a listing holds, in bytes."""
_MAX_KNOWN_KINDS = 1024
"""Kinds that are looked up: if each object has its own kind, that is useless."""
_MAGIC = b"aioflux listing\n"
_VERSION = 1
_HEAD = struct.Struct("<II")
_TAIL = struct.Struct("<I")

Kind: TypeAlias = tuple[str, str, str, tuple[tuple[str, str], ...]]
"""Attributes that many objects share: content type and encoding, storage class, user metadata."""


class Listing(Sequence[ObjectMeta]):
    """Metadata of many objects of one store, in order; an `ObjectMeta` is made on access.

    Attributes:
        prefixes: Common prefixes, sorted, if one level was listed.
    """

    __slots__ = (
        "_crc32c",
        "_etag",
        "_generation",
        "_key",
        "_kind",
        "_kinds",
        "_known",
        "_parsed",
        "_root",
        "_size",
        "_updated",
        "prefixes",
    )
    __hash__ = None  # type: ignore[assignment]  # it can be extended

    def __init__(self, metas: Iterable[ObjectMeta] = ()) -> None:
        self._root = ""
        self._key = KeyColumn()
        self._etag = KeyColumn()
        self._generation = KeyColumn()
        self._size = array("q")
        self._crc32c = array("q")
        self._updated = TimeColumn()
        self._kind = array("I")
        self._kinds = KeyColumn()
        self._known: dict[str, int] = {}
        self._parsed: dict[int, Kind] = {}
        self.prefixes: list[str] = []
        self.extend(metas)

    def extend(self, metas: Iterable[ObjectMeta]) -> None:
        """Add objects.

        Raises:
            ValueError: One is of another store than the others.
        """
        if isinstance(metas, Listing):
            self._extend_with(metas)
            return
        for meta in metas:
            self._append(meta)

    def _append(self, meta: ObjectMeta) -> None:
        self._set_root(meta.uri.removesuffix(_in_uri(meta.key, meta.uri)), meta.uri)
        self._key.append(meta.key)
        self._etag.append(meta.etag)
        self._generation.append(meta.generation)
        self._size.append(meta.size)
        self._crc32c.append(NONE if meta.crc32c is None else meta.crc32c)
        self._updated.append(meta.updated)
        self._kind.append(self._number(_kind(meta)))

    def _extend_with(self, other: Listing) -> None:
        if not other:
            self.prefixes += other.prefixes
            return
        self._set_root(other._root, other._root)
        numbers = [self._number_of_text(text) for text in other._kinds]
        is_same = numbers == list(range(len(numbers)))
        self._key.extend(other._key)
        self._etag.extend(other._etag)
        self._generation.extend(other._generation)
        self._size.extend(other._size)
        self._crc32c.extend(other._crc32c)
        self._updated.extend(other._updated)
        self._kind.extend(other._kind if is_same else map(numbers.__getitem__, other._kind))
        self.prefixes += other.prefixes

    def extend_columns(
        self,
        root: str,
        *,
        keys: list[str],
        sizes: list[int],
        etags: list[str],
        generations: list[str],
        crc32c: array[int],
        updated: TimeColumn,
        kinds: Iterable[Kind] | None = None,
        kind: Kind = ("", "", "", ()),
    ) -> None:
        """Add objects, given by a list for each field, which is three times faster.

        Args:
            root: Beginning of the uris, before the keys.
            keys: Keys.
            sizes: Sizes, in bytes.
            etags: Entity tags.
            generations: Generations.
            crc32c: Checksums; -1 for none.
            updated: Times of the last change.
            kinds: Kind of each object.
            kind: Kind of all objects, if `kinds` is not given.
        """
        if not keys:
            return
        self._set_root(root, root)
        self._key.extend(keys)
        self._etag.extend(etags)
        self._generation.extend(generations)
        self._size.fromlist(sizes)  # twice as fast as `extend`
        self._crc32c.extend(crc32c)
        self._updated.extend(updated)
        if kinds is None:
            self._kind.extend(array("I", [self._number(kind)]) * len(keys))
        else:
            self._kind.extend(map(self._number, kinds))

    def _set_root(self, root: str, uri: str) -> None:
        if root != self._root and len(self):
            raise ValueError(f"{uri} is not below {self._root}, like the objects before it")
        self._root = root

    def _number(self, kind: Kind) -> int:
        return self._number_of_text(json.dumps(kind, separators=(",", ":")))

    def _number_of_text(self, text: str) -> int:
        number = self._known.get(text)
        if number is None:
            number = len(self._kinds)
            self._kinds.append(text)
            if len(self._known) < _MAX_KNOWN_KINDS:
                self._known[text] = number
        return number

    def _kind_of(self, number: int) -> Kind:
        kind = self._parsed.get(number)
        if kind is None:
            content_type, content_encoding, storage_class, user = json.loads(self._kinds[number])
            pairs = tuple((name, value) for name, value in user)
            kind = content_type, content_encoding, storage_class, pairs
            if len(self._parsed) < _MAX_KNOWN_KINDS:
                self._parsed[number] = kind
        return kind

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

    @overload
    def __getitem__(self, index: int) -> ObjectMeta: ...
    @overload
    def __getitem__(self, index: slice) -> Listing: ...
    def __getitem__(self, index: int | slice) -> ObjectMeta | Listing:
        if isinstance(index, slice):
            places = range(*index.indices(len(self)))
            if places.step == 1:
                return self._part(places.start, places.stop)
            return self.pick(places)
        at = range(len(self))[index]  # negative indexes, IndexError
        return self._meta(
            self._key[at],
            self._etag[at],
            self._generation[at],
            self._size[at],
            self._crc32c[at],
            self._updated[at],
            self._kind[at],
        )

    def __iter__(self) -> Iterator[ObjectMeta]:
        return map(
            self._meta,
            self._key,
            self._etag,
            self._generation,
            self._size,
            self._crc32c,
            self._updated,
            self._kind,
        )

    def _meta(
        self,
        key: str,
        etag: str,
        generation: str,
        size: int,
        crc32c: int,
        updated: datetime | None,
        kind: int,
    ) -> ObjectMeta:
        content_type, content_encoding, storage_class, user = self._kind_of(kind)
        return ObjectMeta(
            key=key,
            uri=self._root + _in_uri(key, self._root),
            size=size,
            etag=etag,
            generation=generation,
            crc32c=None if crc32c == NONE else crc32c,
            updated=updated,
            content_type=content_type,
            content_encoding=content_encoding,
            storage_class=storage_class,
            metadata=dict(user),
        )

    def _part(self, start: int, end: int) -> Listing:
        """Return the objects `[start, end)`, kinds and all, and no prefixes."""
        result = Listing()
        result._root = self._root
        result._key = self._key.part(start, end)
        result._etag = self._etag.part(start, end)
        result._generation = self._generation.part(start, end)
        result._size = self._size[start:end]
        result._crc32c = self._crc32c[start:end]
        result._updated = self._updated.part(start, end)
        result._kind = self._kind[start:end]
        result._kinds = self._kinds.part(0, len(self._kinds))
        result._known = dict(self._known)
        return result

    def pick(self, indices: Iterable[int]) -> Listing:
        """Return the objects at these indexes, in this order."""
        places = [range(len(self))[index] for index in indices]
        result = self._part(0, 0)
        if places:
            for name in ("_key", "_etag", "_generation", "_updated"):
                setattr(result, name, getattr(self, name).pick(places))
            for name in ("_size", "_crc32c", "_kind"):
                column = getattr(self, name)
                setattr(result, name, array(column.typecode, map(column.__getitem__, places)))
        return result

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Sequence):
            return NotImplemented
        is_alike = len(self) == len(other)
        return is_alike and all(mine == theirs for mine, theirs in zip(self, other, strict=True))

    def __repr__(self) -> str:
        return f"<Listing of {len(self)} objects below {self._root or 'nothing'}>"

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self).from_bytes, (self.to_bytes(),)

    def _columns(self) -> list[array[int] | bytearray]:
        texts = (self._key, self._etag, self._generation, self._kinds)
        return [
            *(buffer for column in texts for buffer in column.buffers()),
            *(self._size, self._crc32c, self._updated.numbers(), self._kind),
        ]

    def to_bytes(self) -> bytes:
        """Return the whole listing as a manifest, which `from_bytes` reads."""
        columns = [_little_endian(column) for column in self._columns()]
        header = {
            "root": self._root,
            "prefixes": self.prefixes,
            "columns": [memoryview(column).nbytes for column in columns],
        }
        text = json.dumps(header).encode()
        body = b"".join((_MAGIC, _HEAD.pack(_VERSION, len(text)), text, *columns))
        return body + _TAIL.pack(google_crc32c.value(body))

    @classmethod
    def from_bytes(cls, data: bytes | bytearray | memoryview) -> Self:
        """Return the listing of a manifest.

        Raises:
            ValueError: It is none, it is damaged, or a later aioflux wrote it.
        """
        whole = bytes(data)
        start = len(_MAGIC) + _HEAD.size
        if not whole.startswith(_MAGIC) or len(whole) < start + _TAIL.size:
            raise ValueError(
                f"this is no listing that aioflux saved: it begins with {whole[:16]!r}, not with "
                f"{_MAGIC!r}"
            )
        version, header_size = _HEAD.unpack_from(whole, len(_MAGIC))
        if version != _VERSION:
            raise ValueError(
                f"this listing is of version {version}, and this aioflux reads {_VERSION}; save it "
                "again, or update aioflux"
            )
        body_size = len(whole) - _TAIL.size
        crc32c = google_crc32c.value(whole[:body_size])
        if crc32c != _TAIL.unpack_from(whole, body_size)[0]:
            raise ValueError(
                "this listing is damaged: its bytes do not match its crc32c; save it again"
            )
        try:
            header = json.loads(whole[start : start + header_size])
            return cls._restored(header, memoryview(whole)[start + header_size : body_size])
        except (LookupError, TypeError, ValueError) as exc:
            raise ValueError(
                f"this is no listing that aioflux saved, although its crc32c holds: {exc!r}"
            ) from exc

    @classmethod
    def _restored(cls, header: dict[str, Any], body: memoryview) -> Self:
        pieces: list[memoryview] = []
        for size in header["columns"]:
            pieces.append(body[:size])
            body = body[size:]
        listing = cls()
        listing._root, listing.prefixes = header["root"], header["prefixes"]
        for place, name in enumerate(("_key", "_etag", "_generation", "_kinds")):
            sizes = _filled("I", pieces[2 * place])
            setattr(listing, name, KeyColumn.of_buffers(sizes, bytearray(pieces[2 * place + 1])))
        listing._size, listing._crc32c, updated, listing._kind = map(_filled, "qqqI", pieces[8:])
        listing._updated = TimeColumn.of_numbers(updated)
        lengths = {len(getattr(listing, name)) for name in _ONE_EACH}
        if lengths != {len(listing)} or body or len(pieces) != 12:
            raise ValueError(f"its columns have lengths {sorted(lengths)}")
        if listing._kind and max(listing._kind) >= len(listing._kinds):
            raise ValueError("it has fewer kinds of objects than it names")
        for number, text in zip(range(_MAX_KNOWN_KINDS), listing._kinds, strict=False):
            listing._known[text] = number
        return listing


_ONE_EACH: Final = ("_key", "_etag", "_generation", "_size", "_crc32c", "_updated", "_kind")
"""Columns with one entry for each object."""


def _little_endian(column: array[int] | bytearray) -> array[int] | bytearray:
    if sys.byteorder == "little" or isinstance(column, bytearray):
        return column
    swapped = column[:]
    swapped.byteswap()
    return swapped


def _filled(typecode: str, data: memoryview) -> array[int]:
    column: array[int] = array(typecode)
    column.frombytes(data)
    if sys.byteorder != "little":
        column.byteswap()
    return column


def _kind(meta: ObjectMeta) -> Kind:
    user = tuple(sorted(meta.metadata.items()))
    return meta.content_type, meta.content_encoding, meta.storage_class, user


def _in_uri(key: str, uri: str) -> str:
    return quote_path(key) if uri.startswith("file://") else key

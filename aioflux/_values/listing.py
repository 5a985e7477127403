"""Listings, stored in columns with a sixth of the memory of a list of ObjectMeta.

Pickling the columns for spawned workers is as fast as a copy, and forked workers share their memory
pages. The pickled bytes are also the format of a manifest, which is a listing stored as an object:

    magic | version, size of the header | header: JSON | columns | crc32c of all bytes before it
"""

from __future__ import annotations

import json
import struct
import sys
from array import array
from collections.abc import Iterable, Iterator, Sequence
from datetime import datetime
from functools import lru_cache
from typing import Any, Final, NamedTuple, Self, overload

import google_crc32c

from aioflux._values.columns import NONE, KeyColumn, TimeColumn
from aioflux._values.dataset_keys import MANIFEST_KEY, is_manifest
from aioflux._values.meta import ObjectMeta
from aioflux._values.uri import join_uri, quote_path, split_object_uri

__all__ = ["MAX_SIZE_BYTES", "KeyColumn", "Kind", "Listing"]

MAX_SIZE_BYTES: Final = 2**63 - 1
"""Largest size of an object in a listing, in bytes."""
_MAX_CACHED_KINDS = 1024
"""Size of the caches of kinds. A cache is useless if each object has another kind."""
_MAGIC = b"aioflux listing\n"
_VERSION = 1
_HEAD = struct.Struct("<II")
_TAIL = struct.Struct("<I")


class Kind(NamedTuple):
    """Attributes that many objects share. Manifests have the first four if the others are empty."""

    content_type: str = ""
    content_encoding: str = ""
    storage_class: str = ""
    metadata: tuple[tuple[str, str], ...] = ()
    content_disposition: str = ""
    cache_control: str = ""


_DEFAULT_KIND = Kind()


@lru_cache(maxsize=_MAX_CACHED_KINDS)
def _encode_kind(kind: Kind) -> str:
    """Encode a kind, without its last fields if they are empty: earlier versions read that."""
    return json.dumps(kind if any(kind[4:]) else kind[:4], separators=(",", ":"))


class Listing(Sequence[ObjectMeta]):
    """Sequence of the metadata of objects of one store, about 70 bytes and the key for each object.

    An `ObjectMeta` is created on each access. A slice is a Listing, too.

    Attributes:
        prefixes: Common prefixes of omitted keys, sorted, if a delimiter was given.
    """

    __slots__ = (
        "_crc32c",
        "_decoded_kinds",
        "_etag",
        "_generation",
        "_key",
        "_kind",
        "_kind_numbers",
        "_kinds",
        "_root",
        "_size",
        "_updated",
        "prefixes",
    )
    __hash__ = None  # type: ignore[assignment]  # mutable

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
        self._kind_numbers: dict[str, int] = {}
        self._decoded_kinds: dict[int, Kind] = {}
        self.prefixes: list[str] = []
        self.extend(metas)

    def extend(self, metas: Iterable[ObjectMeta]) -> None:
        """Add objects.

        Raises:
            ValueError: The objects are not all of one store.
        """
        if isinstance(metas, Listing):
            self._extend_with(metas)
            return
        for meta in metas:
            self._append(meta)

    def _append(self, meta: ObjectMeta) -> None:
        key = quote_path(meta.key) if meta.uri.startswith("file://") else meta.key
        self._set_root(meta.uri.removesuffix(key), meta.uri)
        self._key.append(meta.key)
        self._etag.append(meta.etag)
        self._generation.append(meta.generation)
        self._size.append(meta.size)
        self._crc32c.append(NONE if meta.crc32c is None else meta.crc32c)
        self._updated.append(meta.updated)
        user = tuple(sorted(meta.metadata.items()))
        kind = Kind(
            meta.content_type,
            meta.content_encoding,
            meta.storage_class,
            user,
            meta.content_disposition,
            meta.cache_control,
        )
        self._kind.append(self._number_kind(kind))

    def _extend_with(self, other: Listing) -> None:
        if not other:
            self.prefixes += other.prefixes
            return
        self._set_root(other._root, other._root)
        numbers = [self._number_encoded_kind(text) for text in other._kinds]
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
        kind: Kind = _DEFAULT_KIND,
    ) -> None:
        """Add objects from one list for each field, which is three times as fast as `extend`.

        Args:
            root: Common beginning of the uris, up to the keys.
            keys: Keys.
            sizes: Sizes, in bytes.
            etags: Entity tags.
            generations: Generations.
            crc32c: CRC32C of each object; -1 if the service returned none.
            updated: Times of the last change.
            kinds: Kind of each object, or None if all objects have one kind.
            kind: Kind of all objects, if `kinds` is None.
        """
        if not keys:
            return
        self._set_root(root, root)
        self._key.extend(keys)
        self._etag.extend(etags)
        self._generation.extend(generations)
        self._size.fromlist(sizes)  # twice as fast as `array.extend`
        self._crc32c.extend(crc32c)
        self._updated.extend(updated)
        if kinds is None:
            self._kind.extend(array("I", [self._number_kind(kind)]) * len(keys))
        else:
            self._kind.extend(map(self._number_kind, kinds))

    def _set_root(self, root: str, uri: str) -> None:
        if root != self._root and len(self):
            raise ValueError(
                f"{uri} is not below {self._root}, but all objects of this listing must be; use "
                "one Listing for each store"
            )
        self._root = root

    def _number_kind(self, kind: Kind) -> int:
        return self._number_encoded_kind(_encode_kind(kind))

    def _number_encoded_kind(self, text: str) -> int:
        number = self._kind_numbers.get(text)
        if number is None:
            number = len(self._kinds)
            self._kinds.append(text)
            if len(self._kind_numbers) < _MAX_CACHED_KINDS:
                self._kind_numbers[text] = number
        return number

    def _decode_kind(self, number: int) -> Kind:
        kind = Kind(*json.loads(self._kinds[number]))
        kind = kind._replace(metadata=tuple((name, value) for name, value in kind.metadata))
        if len(self._decoded_kinds) < _MAX_CACHED_KINDS:
            self._decoded_kinds[number] = kind
        return kind

    @property
    def root(self) -> str:
        """Uri of the store of the objects; empty if there is no object."""
        return self._root

    @property
    def keys(self) -> KeyColumn:
        """Keys of the objects, in order."""
        return self._key

    @property
    def sizes(self) -> array[int]:
        """Sizes of the objects, in order, in bytes."""
        return self._size

    def __len__(self) -> int:
        return len(self._size)

    @overload
    def __getitem__(self, index: int) -> ObjectMeta: ...
    @overload
    def __getitem__(self, index: slice) -> Listing: ...
    def __getitem__(self, index: int | slice) -> ObjectMeta | Listing:
        if isinstance(index, slice):
            indexes = range(*index.indices(len(self)))
            if indexes.step == 1:
                return self._part(indexes.start, indexes.stop)
            return self.pick(indexes)
        position = range(len(self._size))[index]  # converts a negative index, and raises IndexError
        return self._meta(
            self._key[position],
            self._etag[position],
            self._generation[position],
            self._size[position],
            self._crc32c[position],
            self._updated[position],
            self._kind[position],
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
        decoded = self._decoded_kinds.get(kind) or self._decode_kind(kind)
        content_type, content_encoding, storage_class, user, disposition, cache_control = decoded
        root = self._root
        return ObjectMeta(
            key=key,
            uri=root + (quote_path(key) if root.startswith("file://") else key),
            size=size,
            etag=etag,
            generation=generation,
            crc32c=None if crc32c == NONE else crc32c,
            updated=updated,
            content_type=content_type,
            content_encoding=content_encoding,
            content_disposition=disposition,
            cache_control=cache_control,
            storage_class=storage_class,
            metadata=dict(user),
        )

    def _part(self, start: int, end: int) -> Listing:
        """Return the objects `[start, end)` without prefixes, with the table of all kinds."""
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
        result._kind_numbers = dict(self._kind_numbers)
        return result

    def pick(self, indices: Iterable[int]) -> Listing:
        """Return the objects at these indexes, in this order, without prefixes."""
        # An array needs a fifth of the memory of a list.
        positions = array("q", (range(len(self))[index] for index in indices))
        result = self._part(0, 0)
        if positions:
            for name in ("_key", "_etag", "_generation", "_updated"):
                setattr(result, name, getattr(self, name).pick(positions))
            for name in ("_size", "_crc32c", "_kind"):
                column = getattr(self, name)
                setattr(result, name, array(column.typecode, map(column.__getitem__, positions)))
        return result

    def without_directories(self) -> Listing:
        """Return the objects that web consoles did not create to show an empty directory.

        Such an object is empty, and its key ends with "/".
        """
        if all(self._size):  # a fifth of the time of the loop below
            return self
        empty = (index for index, size in enumerate(self._size) if not size)
        left_out = {index for index in empty if self._key[index].endswith("/")}
        if not left_out:
            return self
        return self.pick(index for index in range(len(self)) if index not in left_out)

    def without_manifests(self) -> tuple[Listing, list[str]]:
        """Return the objects that are not manifests of datasets, and the keys of the manifests."""
        if not self._key.may_contain(MANIFEST_KEY):
            return self, []
        kept = (index for index, key in enumerate(self._key) if not is_manifest(key))
        return self.pick(kept), [key for key in self._key if is_manifest(key)]

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Sequence):
            return NotImplemented
        if len(self) != len(other):
            return False
        return all(meta == other_meta for meta, other_meta in zip(self, other, strict=True))

    def __repr__(self) -> str:
        return f"<Listing of {len(self)} objects below {self._root or 'nothing'}>"

    def __reduce__(self) -> tuple[Any, ...]:
        return _restore, (self.to_bytes(),)

    def _columns(self) -> list[array[int] | bytearray]:
        texts = (self._key, self._etag, self._generation, self._kinds)
        return [
            *(buffer for column in texts for buffer in column.buffers()),
            *(self._size, self._crc32c, self._updated.numbers(), self._kind),
        ]

    def to_bytes(self, *, is_relative: bool = False) -> bytes:
        """Return the listing as a manifest, which `from_bytes` decodes.

        With `is_relative`, a copy of the manifest lists the objects beside it, else the same ones.
        """
        columns = [_encode_array(column) for column in self._columns()]
        header = {
            "root": self._root,
            "prefixes": self.prefixes,
            "is_relative": is_relative,
            "columns": [memoryview(column).nbytes for column in columns],
        }
        text = json.dumps(header).encode()
        body = b"".join((_MAGIC, _HEAD.pack(_VERSION, len(text)), text, *columns))
        return body + _TAIL.pack(google_crc32c.value(body))

    @classmethod
    def from_bytes(cls, data: bytes | bytearray | memoryview, *, uri: str = "") -> Self:
        """Return the listing of a manifest.

        Args:
            data: Content of the manifest.
            uri: Uri of the manifest. A copy of a manifest of `write_objects` lists the objects
                beside this uri, with the sizes and checksums of the originals, without generations.

        Raises:
            ValueError: The bytes are not a manifest, or are damaged, or have a version that is
                not supported.
        """
        name = f"the manifest {uri}" if uri else "this manifest"
        manifest = bytes(data)
        start = len(_MAGIC) + _HEAD.size
        if not manifest.startswith(_MAGIC):
            raise ValueError(
                f"{name} is not a listing that aioflux saved: it begins with {manifest[:16]!r}, "
                f"not with {_MAGIC!r}"
            )
        if len(manifest) < start + _TAIL.size:
            raise ValueError(
                f"{name} is damaged: it is truncated after {len(manifest)} bytes; save it again"
            )
        version, header_size = _HEAD.unpack_from(manifest, len(_MAGIC))
        if version != _VERSION:
            raise ValueError(
                f"{name} is of version {version}, and this aioflux reads {_VERSION}; save it "
                "again, or update aioflux"
            )
        body_size = len(manifest) - _TAIL.size
        crc32c = google_crc32c.value(manifest[:body_size])
        if crc32c != _TAIL.unpack_from(manifest, body_size)[0]:
            raise ValueError(f"{name} is damaged: its bytes do not match its crc32c; save it again")
        try:
            header = json.loads(manifest[start : start + header_size])
            body = memoryview(manifest)[start + header_size : body_size]
            return cls._from_columns(header, body, uri)
        except (LookupError, TypeError, ValueError) as exc:
            raise ValueError(
                f"{name} is not a listing that aioflux saved, although its crc32c matches: {exc!r}"
            ) from exc

    @classmethod
    def _from_columns(cls, header: dict[str, Any], body: memoryview, uri: str) -> Self:
        pieces: list[memoryview] = []
        for size in header["columns"]:
            pieces.append(body[:size])
            body = body[size:]
        listing = cls()
        listing._root, listing.prefixes = header["root"], header["prefixes"]
        for number, name in enumerate(("_key", "_etag", "_generation", "_kinds")):
            sizes = _decode_array("I", pieces[2 * number])
            setattr(listing, name, KeyColumn.of_buffers(sizes, bytearray(pieces[2 * number + 1])))
        listing._size, listing._crc32c, updated, listing._kind = map(
            _decode_array, "qqqI", pieces[8:]
        )
        listing._updated = TimeColumn.of_numbers(updated)
        lengths = {len(getattr(listing, name)) for name in _COLUMNS}
        if lengths != {len(listing)} or body or len(pieces) != 12:
            raise ValueError(f"its columns have lengths {sorted(lengths)}")
        if listing._kind and max(listing._kind) >= len(listing._kinds):
            raise ValueError("an object has a kind that the table of kinds does not contain")
        for number, text in zip(range(_MAX_CACHED_KINDS), listing._kinds, strict=False):
            listing._kind_numbers[text] = number
        root = join_uri(split_object_uri(uri)[0], "") if uri else header["root"]
        if header.get("is_relative") and root != header["root"]:
            listing._root = root
            listing._etag, listing._generation = (KeyColumn([""] * len(listing)) for _ in range(2))
            listing._updated = TimeColumn.of_numbers(array("q", [NONE]) * len(listing))
        return listing


def _restore(data: bytes) -> Listing:
    return Listing.from_bytes(data)  # cloudpickle cannot pickle the class method


_COLUMNS: Final = ("_key", "_etag", "_generation", "_size", "_crc32c", "_updated", "_kind")
"""Columns with one value for each object."""


def _encode_array(column: array[int] | bytearray) -> array[int] | bytearray:
    if sys.byteorder == "little" or isinstance(column, bytearray):
        return column
    swapped = column[:]
    swapped.byteswap()
    return swapped


def _decode_array(typecode: str, data: memoryview) -> array[int]:
    column: array[int] = array(typecode)
    column.frombytes(data)
    if sys.byteorder != "little":
        column.byteswap()
    return column

"""The last piece of DCP's metadata, added to its pickle without torch. Pure.

    Metadata, {its fields, | "storage_data": {index: _StorageInfo, ...}} | BUILD, STOP

Where things are stored is known when they are uploaded, and the process that uploads should not
need seconds and 200 MB for torch. The indices are pickled where torch is; what stands between them
is a handful of opcodes (docs.python.org/3/library/pickletools.html).
"""

from __future__ import annotations

import io
import pickle
import struct
from typing import TYPE_CHECKING, Any, Final, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Iterable

__all__ = ["Place", "complete", "pickle_index", "pickle_metadata"]

_PROTOCOL: Final = 2
"""The newest that has no frames, which could not be continued."""

_HEAD: Final = bytes([0x80, _PROTOCOL])


class Place(NamedTuple):
    """Where an item is stored."""

    key: str
    """Name of the object, below the checkpoint's prefix."""
    offset: int
    """First byte of the item."""
    length: int
    """Bytes of the item."""
    transforms: tuple[str, ...] = ()
    """What was done to it, as DCP's extensions call it; nothing by default."""


def pickle_metadata(metadata: Any) -> bytes:
    """Return the beginning of the pickle of a dataclass, which `complete` ends."""
    kind = type(metadata)
    fields = {name: value for name, value in vars(metadata).items() if name != "storage_data"}
    name = f"{kind.__module__}\n{kind.__qualname__}\n".encode()
    body = pickle.dumps(fields, protocol=_PROTOCOL, fix_imports=False)[len(_HEAD) : -1]
    return b"".join((_HEAD, pickle.GLOBAL, name, pickle.EMPTY_TUPLE, pickle.NEWOBJ, body))


def pickle_index(index: Any) -> bytes:
    """Return the opcodes that put an object on the stack, wherever they stand in a pickle."""
    buffer = io.BytesIO()
    pickler = pickle.Pickler(buffer, protocol=_PROTOCOL, fix_imports=False)
    pickler.fast = True  # refers to nothing that was pickled before
    pickler.dump(index)
    return buffer.getvalue()[len(_HEAD) : -1]


def complete(metadata: bytes, places: Iterable[tuple[bytes, Place]]) -> bytes:
    """Return the pickle of the metadata with `storage_data`.

    Args:
        metadata: What `pickle_metadata` returned.
        places: What `pickle_index` returned, and where it is stored.
    """
    pieces = [metadata, _text("storage_data"), pickle.EMPTY_DICT, pickle.MARK]
    for index, place in places:
        pieces += (index, _info(place))
    pieces += (pickle.SETITEMS, pickle.SETITEM, pickle.BUILD, pickle.STOP)
    return b"".join(pieces)


def _info(place: Place) -> bytes:
    pieces = [
        pickle.GLOBAL + b"torch.distributed.checkpoint.filesystem\n_StorageInfo\n",
        pickle.EMPTY_TUPLE,
        pickle.NEWOBJ,
        pickle.EMPTY_DICT,
        pickle.MARK,
        _text("relative_path"),
        _text(place.key),
        _text("offset"),
        _number(place.offset),
        _text("length"),
        _number(place.length),
    ]
    if place.transforms:
        pieces += (_text("transform_descriptors"), pickle.EMPTY_LIST, pickle.MARK)
        pieces += map(_text, place.transforms)
        pieces.append(pickle.APPENDS)
    return b"".join((*pieces, pickle.SETITEMS, pickle.BUILD))


def _text(text: str) -> bytes:
    data = text.encode()
    return pickle.BINUNICODE + struct.pack("<I", len(data)) + data


def _number(number: int) -> bytes:
    if number < 1 << 31:
        return pickle.BININT + struct.pack("<i", number)
    data = number.to_bytes(8, "little", signed=True)
    return pickle.LONG1 + bytes([len(data)]) + data

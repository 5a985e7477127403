"""The pickle of DCP's `Metadata`, completed by a process without torch. Pure.

    `pickle_metadata`    Metadata, {all other fields,
    `add_storage_data`   "storage_data": {index: _StorageInfo, ...}}, BUILD, STOP

The process that uploads does not import torch, because the import costs seconds and 200 MB. But
this process writes the metadata, because the locations of items are known only after their upload.
So the training process pickles the fields and indices with torch, and the uploading process joins
them with a few opcodes in `add_storage_data` (docs.python.org/3/library/pickletools.html).
"""

from __future__ import annotations

import io
import pickle
import struct
from collections.abc import Iterable
from typing import Any, Final, NamedTuple

_PROTOCOL: Final = 2
"""A protocol without frames, because opcodes cannot be appended to a frame."""

_START: Final = bytes([0x80, _PROTOCOL])
_MODULE: Final = b"torch.distributed.checkpoint.metadata\n"


class ItemLocation(NamedTuple):
    """The location of a stored item, as DCP's class `_StorageInfo` describes it."""

    key: str
    """Name of the object, below the checkpoint's prefix."""
    offset: int
    length: int
    transforms: tuple[str, ...] = ()
    """Descriptors of the extensions that transformed the item, such as its compression."""


def pickle_metadata(metadata: Any) -> bytes:
    """Return the first part of the pickle of `metadata`; `add_storage_data` completes it."""
    kind = type(metadata)
    fields = {name: value for name, value in vars(metadata).items() if name != "storage_data"}
    name = f"{kind.__module__}\n{kind.__qualname__}\n".encode()
    body = pickle.dumps(fields, protocol=_PROTOCOL, fix_imports=False)[len(_START) : -1]
    return b"".join((_START, pickle.GLOBAL, name, pickle.EMPTY_TUPLE, pickle.NEWOBJ, body))


def pickle_index(index: Any) -> bytes:
    """Return opcodes that push a `MetadataIndex` on the stack, at any position in a pickle."""
    buffer = io.BytesIO()
    pickler = pickle.Pickler(buffer, protocol=_PROTOCOL, fix_imports=False)
    pickler.fast = True  # without the memo: no references to other pickled objects
    pickler.dump(index)
    return buffer.getvalue()[len(_START) : -1]


def add_storage_data(metadata: bytes, locations: Iterable[tuple[bytes, ItemLocation]]) -> bytes:
    """Return the complete pickle of the metadata.

    Args:
        metadata: The result of `pickle_metadata`.
        locations: The result of `pickle_index` for each item, and the item's location.
    """
    pieces = [metadata, _text("storage_data"), pickle.EMPTY_DICT, pickle.MARK]
    for index, location in locations:
        pieces += (index, _storage_info(location))
    pieces += (pickle.SETITEMS, pickle.SETITEM, pickle.BUILD, pickle.STOP)
    return b"".join(pieces)


def pickle_metadata_of_parts(parts: Iterable[tuple[str, str, int]]) -> bytes:
    """Return the pickle of the metadata of a checkpoint that consists of named parts.

    Each part is described as `BytesStorageMetadata`, DCP's type of items that `torch.save` wrote.
    So stock DCP loads a part by its name, and `aioflux ckpt` lists, verifies, copies and cleans up
    these checkpoints like all others.

    Args:
        parts: For each part its name, the key of its object, and its size in bytes.
    """
    parts = list(parts)
    start = [
        _START,
        _instance("Metadata"),
        pickle.EMPTY_DICT,
        _text("state_dict_metadata"),
        pickle.EMPTY_DICT,
    ]
    for name, _, _ in parts:
        start += (_text(name), _instance("BytesStorageMetadata"), pickle.SETITEM)
    start.append(pickle.SETITEM)
    locations = [(_index(name), ItemLocation(key, 0, size)) for name, key, size in parts]
    return add_storage_data(b"".join(start), locations)


def _instance(kind: str) -> bytes:
    return b"".join(
        (pickle.GLOBAL, _MODULE, f"{kind}\n".encode(), pickle.EMPTY_TUPLE, pickle.NEWOBJ)
    )


def _index(name: str) -> bytes:
    fields = (_text("fqn"), _text(name), _text("offset"), pickle.NONE, _text("index"), pickle.NONE)
    pieces = (_instance("MetadataIndex"), pickle.EMPTY_DICT, pickle.MARK, *fields, pickle.SETITEMS)
    return b"".join((*pieces, pickle.BUILD))


def _storage_info(location: ItemLocation) -> bytes:
    pieces = [
        pickle.GLOBAL + b"torch.distributed.checkpoint.filesystem\n_StorageInfo\n",
        pickle.EMPTY_TUPLE,
        pickle.NEWOBJ,
        pickle.EMPTY_DICT,
        pickle.MARK,
        _text("relative_path"),
        _text(location.key),
        _text("offset"),
        _number(location.offset),
        _text("length"),
        _number(location.length),
    ]
    if location.transforms:
        pieces += (_text("transform_descriptors"), pickle.EMPTY_LIST, pickle.MARK)
        pieces += map(_text, location.transforms)
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

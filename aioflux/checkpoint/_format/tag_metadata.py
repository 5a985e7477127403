"""DCP's metadata of a checkpoint of parts, without torch: stock DCP loads a part by its name. Pure.

A part is what DCP calls bytes: an item that `torch.save` wrote. So what is stored under a tag is a
checkpoint like all others here, which `aioflux ckpt` lists, verifies, copies and cleans up after.
"""

from __future__ import annotations

import pickle
import struct
from typing import TYPE_CHECKING, Final

from aioflux.checkpoint._format.storage_data import Place, complete

if TYPE_CHECKING:
    from collections.abc import Iterable

__all__ = ["describe"]

_PROTOCOL: Final = 2
_METADATA: Final = b"torch.distributed.checkpoint.metadata\n"


def describe(parts: Iterable[tuple[str, str, int]]) -> bytes:
    """Return the pickle of the metadata.

    Args:
        parts: Of each part its name, the key of its object and its size in bytes.
    """
    known = list(parts)
    head = [
        bytes([0x80, _PROTOCOL]),
        _new("Metadata"),
        pickle.EMPTY_DICT,
        _text("state_dict_metadata"),
        pickle.EMPTY_DICT,
    ]
    for name, _, _ in known:
        head += (_text(name), _new("BytesStorageMetadata"), pickle.SETITEM)
    head.append(pickle.SETITEM)
    return complete(b"".join(head), [(_index(name), Place(key, 0, n)) for name, key, n in known])


def _new(kind: str) -> bytes:
    return b"".join(
        (pickle.GLOBAL, _METADATA, f"{kind}\n".encode(), pickle.EMPTY_TUPLE, pickle.NEWOBJ)
    )


def _index(name: str) -> bytes:
    fields = (_text("fqn"), _text(name), _text("offset"), pickle.NONE, _text("index"), pickle.NONE)
    return (
        b"".join((_new("MetadataIndex"), pickle.EMPTY_DICT, pickle.MARK, *fields, pickle.SETITEMS))
        + pickle.BUILD
    )


def _text(text: str) -> bytes:
    data = text.encode()
    return pickle.BINUNICODE + struct.pack("<I", len(data)) + data

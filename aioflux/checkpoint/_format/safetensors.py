"""The layout of a safetensors object, without torch. Pure.

    8 bytes: size of the header | header, JSON padded with spaces | tensors, without gaps

Source: github.com/huggingface/safetensors, "Format".
"""

from __future__ import annotations

import base64
import json
import math
import struct
from typing import TYPE_CHECKING, Final, NamedTuple

from aioflux.errors import CheckpointCorruptError

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from aioflux.checkpoint._format.commit import Commit

__all__ = [
    "DTYPES",
    "ObjectLayout",
    "TensorSpec",
    "model_key",
    "pack_metadata",
    "plan_layout",
    "unpack_metadata",
]

DTYPES: Final[Mapping[str, tuple[str, int]]] = {
    "float64": ("F64", 8),
    "float32": ("F32", 4),
    "float16": ("F16", 2),
    "bfloat16": ("BF16", 2),
    "float8_e4m3fn": ("F8_E4M3", 1),
    "float8_e5m2": ("F8_E5M2", 1),
    "int64": ("I64", 8),
    "int32": ("I32", 4),
    "int16": ("I16", 2),
    "int8": ("I8", 1),
    "uint64": ("U64", 8),
    "uint32": ("U32", 4),
    "uint16": ("U16", 2),
    "uint8": ("U8", 1),
    "bool": ("BOOL", 1),
}
"""By PyTorch's name of a dtype: its name in safetensors, and bytes of an element.

Every reader of safetensors knows these; tensors of other dtypes are stored like values."""

_METADATA: Final = "metadata"


class TensorSpec(NamedTuple):
    """Name, dtype and sizes of a whole tensor."""

    name: str
    dtype: str
    """A key of `DTYPES`."""
    sizes: tuple[int, ...]

    @property
    def item_size(self) -> int:
        """Bytes of an element."""
        return DTYPES[self.dtype][1]

    @property
    def num_bytes(self) -> int:
        """Bytes of its memory."""
        return math.prod(self.sizes) * self.item_size


class ObjectLayout(NamedTuple):
    """The header of one object, and the offsets of its tensors."""

    header: bytes
    """The bytes before the tensors."""
    offsets: Mapping[str, int]
    """First byte of each tensor in the object, in order."""
    size: int
    """Bytes of the object."""


def model_key(save_id: str, number: int, num_objects: int) -> str:
    """Return the key of an object, below the checkpoint's prefix."""
    return f"model-{save_id}-{number:05d}-of-{num_objects:05d}.safetensors"


def plan_layout(tensors: Iterable[TensorSpec]) -> ObjectLayout:
    """Return the layout of an object of these tensors.

    Large elements come first, so that all are aligned to their size; empty tensors come last.
    """
    ordered = sorted(tensors, key=lambda each: (not each.num_bytes, -each.item_size))
    entries: dict[str, object] = {"__metadata__": {"format": "pt"}}
    starts, at = dict[str, int](), 0
    for each in ordered:
        starts[each.name] = at
        at += each.num_bytes
        entries[each.name] = {
            "dtype": DTYPES[each.dtype][0],
            "shape": list(each.sizes),
            "data_offsets": [starts[each.name], at],
        }
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    header = struct.pack("<Q", len(text)) + text
    offsets = {name: start + len(header) for name, start in starts.items()}
    return ObjectLayout(header, offsets, len(header) + at)


def pack_metadata(pickled: bytes) -> dict[str, str]:
    """Return the `extra` of a commit that holds the pickle of DCP's metadata."""
    return {_METADATA: base64.b64encode(pickled).decode()}


def unpack_metadata(commit: Commit, *, uri: str) -> bytes:
    """Return the pickle of DCP's metadata from the `extra` of a commit.

    Raises:
        CheckpointCorruptError: There is none.
    """
    try:
        return base64.b64decode(commit.extra[_METADATA], validate=True)
    except (KeyError, ValueError) as exc:
        raise CheckpointCorruptError(
            f"{uri} is damaged: it holds no metadata of its tensors; load an earlier checkpoint"
        ) from exc

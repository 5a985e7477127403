"""The layout of a safetensors object, without torch. Pure.

    8 bytes: size of the header | header: JSON, padded with spaces | tensors, without gaps

Source: github.com/huggingface/safetensors, "Format".
"""

from __future__ import annotations

import base64
import json
import math
import struct
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Final, NamedTuple

from aioflux.errors import CheckpointCorruptError

if TYPE_CHECKING:
    from aioflux.checkpoint._format.commit import Commit

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
"""For each dtype of PyTorch: name of the dtype in safetensors, and bytes of an element.

Every reader of safetensors supports these dtypes. Tensors of other dtypes are stored as in the
layout of DCP."""

_METADATA: Final = "metadata"


class TensorSpec(NamedTuple):
    """Name, dtype and sizes of a whole tensor."""

    name: str
    dtype: str
    """A key of `DTYPES`."""
    sizes: tuple[int, ...]

    @property
    def item_size(self) -> int:
        return DTYPES[self.dtype][1]

    @property
    def num_bytes(self) -> int:
        return math.prod(self.sizes) * self.item_size


class ObjectLayout(NamedTuple):
    """The header of one object, and the offsets of its tensors."""

    header: bytes
    """The bytes before the tensors."""
    offsets: Mapping[str, int]
    """First byte of each tensor in the object, by name, in ascending order."""
    size: int


def model_key(save_id: str, number: int, num_objects: int) -> str:
    """Return the key of a safetensors object, below the checkpoint's prefix."""
    return f"model-{save_id}-{number:05d}-of-{num_objects:05d}.safetensors"


def plan_layout(tensors: Iterable[TensorSpec]) -> ObjectLayout:
    """Return the layout of an object that contains these tensors.

    Tensors with larger elements come first, so that every element is aligned to its size. Empty
    tensors come last.
    """
    ordered = sorted(tensors, key=lambda tensor: (not tensor.num_bytes, -tensor.item_size))
    entries: dict[str, object] = {"__metadata__": {"format": "pt"}}
    starts, end = dict[str, int](), 0
    for tensor in ordered:
        starts[tensor.name] = end
        end += tensor.num_bytes
        entries[tensor.name] = {
            "dtype": DTYPES[tensor.dtype][0],
            "shape": list(tensor.sizes),
            "data_offsets": [starts[tensor.name], end],
        }
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    header = struct.pack("<Q", len(text)) + text
    offsets = {name: start + len(header) for name, start in starts.items()}
    return ObjectLayout(header, offsets, len(header) + end)


def pack_metadata(pickled: bytes) -> dict[str, str]:
    """Return the value of `Commit.extra` that stores the pickle of DCP's metadata."""
    return {_METADATA: base64.b64encode(pickled).decode()}


def unpack_metadata(commit: Commit, *, uri: str) -> bytes:
    """Return the pickle of DCP's metadata from `Commit.extra`.

    Raises:
        CheckpointCorruptError: The commit has no metadata.
    """
    try:
        return base64.b64decode(commit.extra[_METADATA], validate=True)
    except (KeyError, ValueError) as exc:
        raise CheckpointCorruptError(
            f"{uri} is damaged: it has no metadata of its tensors; load an earlier checkpoint"
        ) from exc

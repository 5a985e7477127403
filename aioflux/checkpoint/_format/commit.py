"""The commit object, which makes a checkpoint visible and holds its checksums. Pure.

    pickle of DCP's Metadata | head | JSON of `Commit` | footer: magic, size of the JSON, crc32c

Stock readers of `torch.distributed.checkpoint` stop at the end of the pickle and ignore the rest
(docs.python.org/3/library/pickle.html: "bytes past the pickled representation are ignored"). So one
object, written last, serves them and aioflux, and replacing it is atomic for both.

In the layout of safetensors the index of Hugging Face is the commit object, with `Commit` in its
"metadata" (huggingface.co/docs/transformers/main_classes/model, sharded checkpoints).
"""

from __future__ import annotations

import json
import math
import re
import struct
from typing import TYPE_CHECKING, Any, Final

import msgspec

from aioflux._values.checksums import crc32c
from aioflux.errors import CheckpointCorruptError

if TYPE_CHECKING:
    from datetime import datetime

__all__ = [
    "COMMIT_KEY",
    "INDEX_KEY",
    "Commit",
    "StoredItem",
    "StoredObject",
    "data_key",
    "decode_commit",
    "decode_index",
    "encode_commit",
    "encode_index",
    "find_save_id",
    "is_save_id",
    "new_save_id",
    "parse_step",
    "part_key",
    "plan_block_size",
    "step_prefix",
]

FORMAT: Final = 1

COMMIT_KEY: Final = ".metadata"
"""Key of the commit object below a checkpoint's prefix; the name that stock DCP gives it."""

INDEX_KEY: Final = "model.safetensors.index.json"
"""Key of the commit object in the layout of safetensors; the name that Hugging Face gives it."""

_HEAD = b"\0aioflux-commit\0"
_FOOTER = struct.Struct(">8sQI")
_MAGIC = b"aioflux1"

_MIN_BLOCK_BYTES = 64 * 1024
_MAX_BLOCKS = 65_536

_MAX_BLOCK_BYTES = 256 * 1024 * 1024
"""The block size of objects of 16 TiB, more than any service stores."""

_SAVE_ID = re.compile(r"\d{8}T\d{6}\.\d{3}Z-[0-9a-f]{8}")
_DATA_KEY = re.compile(
    rf"{_SAVE_ID.pattern}/__\d+_\d+\.distcp|"
    rf"{_SAVE_ID.pattern}/part-[^/]+|"
    rf"model-{_SAVE_ID.pattern}-\d+-of-\d+\.safetensors"
)
_STEP = re.compile(r"step-(\d{8,})/?")
_INDEX_FIELD = "aioflux"


class StoredItem(msgspec.Struct, frozen=True, array_like=True):
    """The location of one tensor or one value in its object."""

    offset: int
    """First byte of the stored item in the object."""
    length: int
    """Bytes of the stored item."""
    data_start: int = 0
    """First byte in the object of the tensor's memory, or of its first frame; or 0."""
    data_size: int = 0
    """Bytes of the tensor's memory, decompressed."""
    frame_size: int = 0
    """Bytes of memory in each compressed frame but the last; 0 if it is not compressed."""
    frame_ends: tuple[int, ...] = ()
    """One past the last stored byte of each frame, counted from `data_start`."""
    plane_size: int = 1
    """Bytes of one element if they are stored in planes, or 1."""


class StoredObject(msgspec.Struct, frozen=True, kw_only=True):
    """One data object of a checkpoint, as the service reported it after the write."""

    key: str
    """Name of the object, below the checkpoint's prefix."""
    size: int
    """Size in bytes."""
    crc32c: int
    """CRC32C of all of it."""
    generation: str = ""
    """Generation of the object; empty if the service has none."""
    rank: int = 0
    """Rank that wrote it."""
    block_size: int = _MIN_BLOCK_BYTES
    """Bytes in each block with a checksum of its own; the last may be shorter."""
    block_crcs: bytes = b""
    """CRC32C of each block, 4 bytes each, big-endian."""
    items: tuple[StoredItem, ...] = ()
    """Its items, in order."""


class Commit(msgspec.Struct, frozen=True, kw_only=True):
    """The objects of one save; the checkpoint exists when its commit object does."""

    save_id: str
    """Name of the save, which the keys of its objects contain."""
    uri: str
    """Uri of the checkpoint. A copy elsewhere has other generations, and is verified by sizes and
    checksums alone."""
    created: float
    """Time of the commit, in seconds since 1970, UTC."""
    world_size: int = 1
    """Ranks that wrote it."""
    step: int | None = None
    """Training step, if it has one."""
    layout: str = "dcp"
    """`dcp` or `safetensors`."""
    objects: tuple[StoredObject, ...] = ()
    """Every data object."""
    metrics: dict[str, float] = {}
    """Metrics for retention; those that are not finite are not stored."""
    extra: dict[str, str] = {}
    """More data of the layout."""
    format: int = FORMAT
    """Version of this structure."""

    @property
    def num_bytes(self) -> int:
        """Bytes of all data objects, without the commit object."""
        return sum(each.size for each in self.objects)


_encoder = msgspec.json.Encoder()
_decoder = msgspec.json.Decoder(Commit)


def _encode(commit: Commit) -> bytes:
    """Return a commit as JSON, which has no NaN and no infinity."""
    metrics = {name: float(value) for name, value in commit.metrics.items()}
    finite = {name: value for name, value in metrics.items() if math.isfinite(value)}
    return _encoder.encode(msgspec.structs.replace(commit, metrics=finite))


def encode_commit(metadata: bytes, commit: Commit) -> bytes:
    """Return the bytes of a commit object: the pickle of DCP's metadata, then the commit."""
    body = metadata + _HEAD + _encode(commit)
    size = len(body) - len(metadata) - len(_HEAD)
    return body + _FOOTER.pack(_MAGIC, size, crc32c(body))


def decode_commit(data: bytes, *, uri: str) -> tuple[bytes, Commit | None]:
    """Return the pickle of DCP's metadata and the commit, or None if stock DCP wrote it.

    An object that was truncated right after its pickle looks like one of stock DCP, except that the
    keys in the pickle begin with a save id: callers check that.

    Raises:
        CheckpointCorruptError: aioflux wrote it, and it is damaged or of a newer format.
    """
    body, footer = data[: -_FOOTER.size], data[-_FOOTER.size :]
    if len(footer) < _FOOTER.size or footer[: len(_MAGIC)] != _MAGIC:
        if _HEAD[:-1] in data or _MAGIC in footer:
            raise _corrupt(uri, "its end is missing or damaged")
        return data, None
    _, size, checksum = _FOOTER.unpack(footer)
    if crc32c(body) != checksum:
        raise _corrupt(uri, "its crc32c does not match")
    head = len(body) - size - len(_HEAD)
    if head < 0 or body[head : head + len(_HEAD)] != _HEAD:
        raise _corrupt(uri, "its footer does not fit its size")
    return body[:head], _decode(body[head + len(_HEAD) :], uri)


def encode_index(index: dict[str, Any], commit: Commit) -> bytes:
    """Return the bytes of an index of Hugging Face that is a commit object."""
    inner = {**index.get("metadata", {}), _INDEX_FIELD: _encode(commit).decode()}
    whole = {**index, "metadata": inner}
    inner[f"{_INDEX_FIELD}_crc32c"] = f"{crc32c(_canonical(whole)):08x}"
    return json.dumps(whole, indent=1, sort_keys=True).encode()


def decode_index(data: bytes, *, uri: str) -> tuple[dict[str, Any], Commit | None]:
    """Return an index of Hugging Face, and the commit, or None if another program wrote it.

    Raises:
        CheckpointCorruptError: It is no index, or aioflux wrote it and it is damaged.
    """
    try:
        index = json.loads(data)
    except (ValueError, RecursionError) as exc:
        raise _corrupt(uri, f"it is no JSON: {exc}") from exc
    inner = index.get("metadata", {}) if isinstance(index, dict) else None
    if not isinstance(inner, dict) or not isinstance(index.get("weight_map"), dict):
        raise _corrupt(uri, "it is no index of safetensors")
    is_ours = any(str(name).startswith(_INDEX_FIELD) for name in inner) or b"save_id" in data
    if not is_ours:
        return index, None
    checksum = inner.pop(f"{_INDEX_FIELD}_crc32c", None)
    text = inner.get(_INDEX_FIELD)
    if checksum != f"{crc32c(_canonical(index)):08x}" or not isinstance(text, str):
        raise _corrupt(uri, "its crc32c does not match")
    return index, _decode(text.encode(), uri)


def _canonical(index: dict[str, Any]) -> bytes:
    return json.dumps(index, sort_keys=True, separators=(",", ":")).encode()


def _decode(text: bytes, uri: str) -> Commit:
    try:
        commit = _decoder.decode(text)
    except msgspec.ValidationError as exc:
        raise _corrupt(uri, f"its commit does not read: {exc}") from exc
    except (msgspec.DecodeError, RecursionError) as exc:
        raise _corrupt(uri, f"its commit is no JSON: {exc}") from exc
    if commit.format > FORMAT:
        raise CheckpointCorruptError(
            f"{uri} is of format {commit.format}, and this aioflux reads up to {FORMAT}; "
            "install a newer one"
        )
    for each in commit.objects:
        # An object elsewhere may be of another checkpoint, and would be deleted with this one.
        if _DATA_KEY.fullmatch(each.key) is None:
            raise _corrupt(uri, f"{each.key[:200]!r} is no data object of a checkpoint")
        is_sane = 0 < each.block_size <= _MAX_BLOCK_BYTES
        num_blocks = -(-each.size // each.block_size) if is_sane else -1
        if each.size < 0 or len(each.block_crcs) != 4 * num_blocks:
            raise _corrupt(uri, f"the blocks of {each.key!r} do not fit its size")
    return commit


def _corrupt(uri: str, what: str) -> CheckpointCorruptError:
    return CheckpointCorruptError(f"{uri} cannot be read: {what}; load an earlier checkpoint")


def plan_block_size(size: int) -> int:
    """Return the bytes in each block of an object of `size` bytes.

    64 KiB, to which a partial read is widened on both sides; larger objects have blocks of a larger
    power of two, so that there are at most 65,536, with 256 KiB of checksums.
    """
    block = _MIN_BLOCK_BYTES
    while block * _MAX_BLOCKS < size:
        block *= 2
    return block


def new_save_id(now: datetime, token: str) -> str:
    """Return the name of a save that began at `now` (in UTC); names sort by time.

    The token is 8 hexadecimal digits that no other save has.
    """
    return f"{now:%Y%m%dT%H%M%S}.{now.microsecond // 1000:03d}Z-{token}"


def is_save_id(text: str) -> bool:
    """Return whether `text` is the name of a save."""
    return _SAVE_ID.fullmatch(text) is not None


def find_save_id(key: str) -> str:
    """Return the name of the save in the key of an object, or nothing if there is none."""
    name = key.rpartition("/")[2]
    before = key.split("/")[-2] if "/" in key else ""
    if is_save_id(before):
        return before
    found = re.fullmatch(rf"model-({_SAVE_ID.pattern})-\d+-of-\d+\.safetensors", name)
    return found[1] if found else ""


def data_key(save_id: str, rank: int, number: int) -> str:
    """Return the key of a data object, below the checkpoint's prefix."""
    return f"{save_id}/__{rank}_{number}.distcp"


def part_key(save_id: str, name: str) -> str:
    """Return the key of a data object that holds one named part; no name has a slash."""
    return f"{save_id}/part-{name}"


def step_prefix(step: int) -> str:
    """Return the prefix of a step's checkpoint, below the root.

    Raises:
        ValueError: `step` is negative.
    """
    if step < 0:
        raise ValueError(f"a step must be 0 or more, not {step}")
    return f"step-{step:08d}/"


def parse_step(prefix: str) -> int | None:
    """Return the step of a prefix of `step_prefix`, or None."""
    found = _STEP.fullmatch(prefix)
    if found is None or step_prefix(int(found[1])).rstrip("/") != prefix.rstrip("/"):
        return None
    return int(found[1])

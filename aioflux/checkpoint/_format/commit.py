"""The commit object with its checksums, and the keys of all objects of a checkpoint. Pure.

The commit object makes a checkpoint visible:

    pickle of DCP's Metadata | head | JSON of `Commit` | footer: magic, size of the JSON, crc32c

Stock readers of `torch.distributed.checkpoint` stop at the end of the pickle and ignore the bytes
after it (docs.python.org/3/library/pickle.html: "bytes past the pickled representation are
ignored"). So stock readers and aioflux read the same object, and a replacement is atomic for both.

In the safetensors layout the commit object is Hugging Face's index, and its "metadata" contains the
`Commit` (huggingface.co/docs/transformers/main_classes/model, sharded checkpoints).

Services store a checksum of the whole object only. To verify ranges, the commit stores the crc32c
of each block of a data object. A block has 64 KiB or more.
"""

from __future__ import annotations

import json
import math
import re
import struct
from collections.abc import Iterator
from datetime import datetime
from typing import Any, Final, NamedTuple
from urllib.parse import quote, unquote

import msgspec

from aioflux._values.checksums import combine_crc32c, crc32c, crc32c_blocks, join_crc32c
from aioflux.errors import CheckpointCorruptError

FORMAT: Final = 1

COMMIT_KEY: Final = ".metadata"
"""Key of the commit object below a checkpoint's prefix; stock DCP uses the same name."""

INDEX_KEY: Final = "model.safetensors.index.json"
"""Key of the commit object in the safetensors layout; Hugging Face uses the same name."""

_HEAD = b"\0aioflux-commit\0"
_FOOTER = struct.Struct(">8sQI")
_MAGIC = b"aioflux1"

_MIN_BLOCK_BYTES = 64 * 1024
_MAX_BLOCKS = 65_536

_MAX_BLOCK_BYTES = 256 * 1024 * 1024
"""The block size of an object of 16 TiB. A commit with a larger object is rejected as damaged."""

_SAVE_ID = re.compile(r"\d{8}T\d{6}\.\d{3}Z-[0-9a-f]{8}")
_DATA_KEY = re.compile(
    rf"{_SAVE_ID.pattern}/__\d+_\d+\.distcp|"
    rf"{_SAVE_ID.pattern}/part-[^/]+|"
    rf"model-{_SAVE_ID.pattern}-\d+-of-\d+\.safetensors"
)
_STEP = re.compile(r"step-(\d{8,})/?")
_INDEX_FIELD = "aioflux"

_SAFE_IN_NAMES: Final = " !#$&'()+,;=@[]^{}~"
"""Characters besides letters, digits and `-._` that every service and file system allows."""

_MAX_NAME_BYTES: Final = 200
"""File systems allow names of 255 bytes, and the key of a part adds a prefix to its name."""

_NUMBER_AT_END = re.compile(r"(\d{1,15})$")
_PART = "part-"


class NewerFormatError(CheckpointCorruptError):
    """A newer aioflux wrote the checkpoint: it is not damaged, and must not be removed."""


class StoredItem(msgspec.Struct, frozen=True, array_like=True):
    """The location of one tensor or one value in its object."""

    offset: int
    """First byte of the stored item in the object."""
    length: int
    data_start: int = 0
    """First byte of the tensor's memory in the object, or of its first frame; 0 if unknown."""
    data_size: int = 0
    """Size of the tensor's memory in bytes, before compression."""
    frame_size: int = 0
    """Bytes of memory in each compressed frame except the last; 0 if the item is not compressed."""
    frame_ends: tuple[int, ...] = ()
    """End of each stored frame, as the offset one past its last byte, counted from `data_start`."""
    plane_size: int = 1
    """Number of planes, equal to the bytes of one element; 1 if the bytes are not split."""


class StoredObject(msgspec.Struct, frozen=True, kw_only=True):
    """One data object of a checkpoint, as the service confirmed its write."""

    key: str
    """Name of the object, below the checkpoint's prefix."""
    size: int
    crc32c: int
    """CRC32C of the whole object."""
    generation: str = ""
    """Generation of the object; empty if the service has no generations."""
    rank: int = 0
    block_size: int = _MIN_BLOCK_BYTES
    """Bytes in each block; the last block may be shorter."""
    block_crcs: bytes = b""
    """CRC32C of each block, 4 bytes each, big-endian."""
    items: tuple[StoredItem, ...] = ()
    """Items in the object, in the order of their offsets."""


class SaveFacts(msgspec.Struct, frozen=True, kw_only=True):
    """The facts of a save that its commit stores, and that lists of steps show.

    A new fact needs a default, because older commits lack it. `Checkpointer.save_async` sets it;
    `Checkpointer.list` and `aioflux ckpt list --json` then show it.
    """

    save_id: str = ""
    """Name of the save; part of the keys of its data objects."""
    uri: str = ""
    """Uri that the checkpoint was saved to. A copy made by another program has another uri and
    other generations; it is verified by sizes and checksums alone."""
    created: float = 0.0
    """Time of the commit, in seconds since 1970, UTC."""
    world_size: int = 1
    """Number of ranks that wrote the checkpoint."""
    step: int | None = None
    """Training step; None if the checkpoint has none."""
    layout: str = "dcp"
    """Layout of the data objects: `dcp` or `safetensors`."""
    metrics: dict[str, float] = {}
    """Metrics for retention. NaN and infinity are not stored."""


class StepInfo(SaveFacts, frozen=True, kw_only=True):
    """A step of a run: the facts of its save, without the list of its objects.

    If its commit object cannot be decoded, `problem` is set, and only step and uri are known.
    """

    step: int
    """Number of the training step."""
    num_bytes: int = 0
    """Size of all data objects in bytes, without the commit object."""
    num_objects: int = 0
    """Number of data objects."""
    generation: str = ""
    """Generation of the commit object."""
    problem: str = ""
    """Error message if the commit object cannot be decoded."""
    is_ours: bool = True
    """False if another program, or a newer aioflux, wrote the checkpoint; `problem` is set then."""


class Commit(SaveFacts, frozen=True, kw_only=True):
    """The data objects of one save, and facts about the save."""

    save_id: str
    uri: str
    created: float
    objects: tuple[StoredObject, ...] = ()
    extra: dict[str, str] = {}
    """Further data, such as the containers of the state and the tag."""
    format: int = FORMAT
    """Version of this structure."""

    @property
    def num_bytes(self) -> int:
        """Bytes of all data objects, without the commit object."""
        return sum(stored.size for stored in self.objects)

    def step_info(self, step: int, uri: str, generation: str) -> StepInfo:
        """Return the facts of a step whose commit object, at `uri`, has this generation."""
        facts = {name: getattr(self, name) for name in SaveFacts.__struct_fields__}
        return StepInfo(
            **facts | {"step": step, "uri": uri},
            num_bytes=self.num_bytes,
            num_objects=len(self.objects),
            generation=generation,
        )


_encoder = msgspec.json.Encoder()
_decoder = msgspec.json.Decoder(Commit)


def _encode(commit: Commit) -> bytes:
    """Return a commit as JSON, without metrics that JSON cannot store."""
    metrics = {name: float(value) for name, value in commit.metrics.items()}
    finite = {name: value for name, value in metrics.items() if math.isfinite(value)}
    return _encoder.encode(msgspec.structs.replace(commit, metrics=finite))


def encode_commit(metadata: bytes, commit: Commit) -> bytes:
    """Return the bytes of a commit object: the pickle of DCP's metadata, then the commit."""
    body = metadata + _HEAD + _encode(commit)
    size = len(body) - len(metadata) - len(_HEAD)
    return body + _FOOTER.pack(_MAGIC, size, crc32c(body))


def decode_commit(data: bytes, *, uri: str) -> tuple[bytes, Commit | None]:
    """Return the pickle of DCP's metadata, and the commit; None if stock DCP wrote the object.

    An object that was truncated right after its pickle looks as if stock DCP had written it, except
    that the keys in the pickle begin with a save id. The caller must check for these keys.

    Raises:
        CheckpointCorruptError: aioflux wrote the object, and it is damaged or of a newer format.
    """
    body, footer = data[: -_FOOTER.size], data[-_FOOTER.size :]
    if len(footer) < _FOOTER.size or footer[: len(_MAGIC)] != _MAGIC:
        if _HEAD[:-1] in data or _MAGIC in footer:
            raise _corrupt(uri, "its last bytes are missing or damaged")
        return data, None
    _, size, checksum = _FOOTER.unpack(footer)
    if crc32c(body) != checksum:
        raise _corrupt(uri, "its crc32c does not match")
    head = len(body) - size - len(_HEAD)
    if head < 0 or body[head : head + len(_HEAD)] != _HEAD:
        raise _corrupt(uri, "the size in its footer is wrong")
    return body[:head], _decode(body[head + len(_HEAD) :], uri)


def encode_index(index: dict[str, Any], commit: Commit) -> bytes:
    """Return the bytes of a commit object that is also a Hugging Face index."""
    inner = {**index.get("metadata", {}), _INDEX_FIELD: _encode(commit).decode()}
    whole = {**index, "metadata": inner}
    inner[f"{_INDEX_FIELD}_crc32c"] = f"{crc32c(_canonical(whole)):08x}"
    return json.dumps(whole, indent=1, sort_keys=True).encode()


def decode_index(data: bytes, *, uri: str) -> tuple[dict[str, Any], Commit | None]:
    """Return a Hugging Face index, and the commit in it; None if another program wrote the index.

    Raises:
        CheckpointCorruptError: The bytes are not an index, or are a damaged index of aioflux.
    """
    try:
        index = json.loads(data)
    except (ValueError, RecursionError) as exc:
        raise _corrupt(uri, f"it is not JSON: {exc}") from exc
    inner = index.get("metadata", {}) if isinstance(index, dict) else None
    if not isinstance(inner, dict) or not isinstance(index.get("weight_map"), dict):
        raise _corrupt(uri, "it is not an index of safetensors")
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
        raise _corrupt(uri, f"its commit has an invalid field: {exc}") from exc
    except (msgspec.DecodeError, RecursionError) as exc:
        raise _corrupt(uri, f"its commit is not JSON: {exc}") from exc
    if commit.format > FORMAT:
        raise NewerFormatError(
            f"{uri} has format {commit.format}, and this aioflux reads formats up to {FORMAT}; "
            "install a newer aioflux"
        )
    for stored in commit.objects:
        # A key outside of the checkpoint may name an object of another checkpoint. A removal of
        # this checkpoint would delete that object.
        if _DATA_KEY.fullmatch(stored.key) is None:
            raise _corrupt(uri, f"{stored.key[:200]!r} is not the key of a data object")
        is_valid_size = 0 < stored.block_size <= _MAX_BLOCK_BYTES
        num_blocks = -(-stored.size // stored.block_size) if is_valid_size else -1
        if stored.size < 0 or len(stored.block_crcs) != 4 * num_blocks:
            raise _corrupt(uri, f"the blocks of {stored.key!r} do not fit its size")
    return commit


def _corrupt(uri: str, reason: str) -> CheckpointCorruptError:
    return CheckpointCorruptError(f"{uri} cannot be read: {reason}; load an earlier checkpoint")


def plan_block_size(size: int) -> int:
    """Return the block size of an object of `size` bytes.

    A read of a range is widened to whole blocks, so blocks are as small as 64 KiB. Large objects
    have larger blocks, a power of two, so that no object has more than 65,536 blocks: 256 KiB of
    checksums.
    """
    block = _MIN_BLOCK_BYTES
    while block * _MAX_BLOCKS < size:
        block *= 2
    return block


def new_save_id(now: datetime, token: str) -> str:
    """Return the save id of a save that starts at `now` (in UTC). Save ids sort by time.

    The token is 8 random hexadecimal digits.
    """
    return f"{now:%Y%m%dT%H%M%S}.{now.microsecond // 1000:03d}Z-{token}"


def is_save_id(text: str) -> bool:
    return _SAVE_ID.fullmatch(text) is not None


def find_save_id(key: str) -> str:
    """Return the save id in the key of a data object; empty if the key has none."""
    name = key.rpartition("/")[2]
    parent = key.split("/")[-2] if "/" in key else ""
    if is_save_id(parent):
        return parent
    match = re.fullmatch(rf"model-({_SAVE_ID.pattern})-\d+-of-\d+\.safetensors", name)
    return match[1] if match else ""


def data_key(save_id: str, rank: int, number: int) -> str:
    """Return the key of a data object, below the checkpoint's prefix."""
    return f"{save_id}/__{rank}_{number}.distcp"


def part_key(save_id: str, name: str) -> str:
    """Return the key of the data object of one named part. The name must not contain a slash."""
    return f"{save_id}/part-{name}"


def step_prefix(step: int) -> str:
    """Return the prefix of a step's checkpoint, relative to the root.

    Raises:
        ValueError: `step` is negative.
    """
    if step < 0:
        raise ValueError(f"a step must be 0 or more, not {step}")
    return f"step-{step:08d}/"


def parse_step(prefix: str) -> int | None:
    """Return the step whose `step_prefix` is `prefix`; None for other prefixes."""
    match = _STEP.fullmatch(prefix)
    if match is None or step_prefix(int(match[1])).rstrip("/") != prefix.rstrip("/"):
        return None
    return int(match[1])


def quote_name(name: str) -> str:
    """Quote a tag or the name of a part as one segment of a key; `tag_of` reverses it.

    Raises:
        TypeError: `name` is not a string.
        ValueError: `name` is empty or too long.
    """
    if not isinstance(name, str):
        raise TypeError(f"a tag or the name of a part must be a string, not {type(name).__name__}")
    quoted = quote(name, safe=_SAFE_IN_NAMES)
    if quoted.startswith("."):  # `.` and `..` are directories; listings may skip dot files
        quoted = f"%2E{quoted[1:]}"
    if not 1 <= len(quoted) <= _MAX_NAME_BYTES:
        raise ValueError(
            f"{name!r} is not a valid tag or name of a part: in a key it has {len(quoted)} bytes, "
            f"and 1 to {_MAX_NAME_BYTES} are allowed"
        )
    return quoted


def is_tag(segment: str) -> bool:
    """Return whether a segment of a key is a result of `quote_name`."""
    try:
        return quote_name(tag_of(segment)) == segment
    except ValueError:
        return False


def tag_of(segment: str) -> str:
    """Return the tag that `quote_name` has quoted as a segment of a key."""
    return unquote(segment)


def part_name(key: str) -> str:
    """Return the name of the part in the key of a data object."""
    return unquote(key.rpartition("/")[2].removeprefix(_PART))


def step_of(tag: str) -> int:
    """Return the number at the end of a tag, such as 500 of `global_step500`, or 0."""
    match = _NUMBER_AT_END.search(tag)
    return int(match[1]) if match else 0


class RangeChecksum(NamedTuple):
    """The checksum of a range of bytes within one block of an object."""

    crc32c: int
    size: int


class BlockDigest:
    """CRC32C of each block of a stream of bytes, and of the whole stream."""

    def __init__(self, block_size: int) -> None:
        self.block_size = block_size
        self.size = 0
        self._crcs: list[int] = []
        self._current = 0

    def update(self, view: memoryview) -> None:
        if num_pending := self.size % self.block_size:
            head = view[: self.block_size - num_pending]
            self._current = crc32c(head, self._current)
            self._advance(head.nbytes)
            view = view[head.nbytes :]
        if not view.nbytes:
            return
        self._crcs += crc32c_blocks(view, self.block_size)
        self.size += view.nbytes
        if view.nbytes % self.block_size:
            self._current = self._crcs.pop()

    def add(self, checksum: RangeChecksum) -> None:
        """Add the checksum of bytes that do not cross the end of the current block."""
        self._current = combine_crc32c(self._current, checksum.crc32c, checksum.size)
        self._advance(checksum.size)

    def _advance(self, size: int) -> None:
        self.size += size
        if self.size % self.block_size == 0:
            self._crcs.append(self._current)
            self._current = 0

    def finish(self) -> tuple[int, bytes]:
        """Return the crc32c of all bytes, and the bytes for `StoredObject.block_crcs`."""
        crcs = list(self._crcs)
        if self.size % self.block_size:
            crcs.append(self._current)
        whole = join_crc32c(crcs, self.block_size, self.size)
        return whole, struct.pack(f">{len(crcs)}I", *crcs)


def checksum_ranges(view: memoryview, *, offset: int, block_size: int) -> Iterator[RangeChecksum]:
    """Yield the checksum of each piece of `view`, which is cut at the ends of blocks.

    `view` begins at byte `offset` of its object.
    """
    start = 0
    while start < view.nbytes:
        num_in_block = block_size - (offset + start) % block_size
        piece = view[start : start + num_in_block]
        yield RangeChecksum(crc32c(piece), piece.nbytes)
        start += piece.nbytes


def joined_blocks(stored: StoredObject, start: int, size: int) -> int:
    """Return the crc32c of `size` bytes of whole blocks from `start` on, from the commit."""
    block_size = stored.block_size
    first, num_blocks = start // block_size, -(-size // block_size)
    crcs = struct.unpack_from(f">{num_blocks}I", stored.block_crcs, 4 * first)
    return join_crc32c(crcs, block_size, size)


def verify_blocks(stored: StoredObject, start: int, view: memoryview) -> int | None:
    """Return the index of the first block whose checksum does not match, or None.

    `view` holds whole blocks of the object; the first block begins at byte `start` of the object.
    """
    first = start // stored.block_size
    actual = crc32c_blocks(view, stored.block_size)
    expected = struct.unpack_from(f">{len(actual)}I", stored.block_crcs, 4 * first)
    pairs = enumerate(zip(actual, expected, strict=True), first)
    return next((index for index, (crc, saved) in pairs if crc != saved), None)

"""Compressed frames of memory, which decode independently and by ranges. Pure.

Memory is cut every `frame_size` bytes, and each piece is encoded as one frame:

    frame: head (16 bytes) | size of each plane (4 bytes each) | planes | bytes of no whole element
    head:  number of planes, a bit for each that is not compressed, 0, raw size,
           size of the rest, crc32c of everything else in the frame

A plane is one zstd frame (RFC 8878) with its size, or the raw bytes if compression saves less than
3 %. Numbers are little-endian.

Decoding is bounded: nothing is decompressed before all sizes are found to fit the target's memory,
and decoding a frame allocates no more than that memory once more. A frame that cannot be decoded,
or whose crc32c does not match, is a CheckpointCorruptError.
"""

from __future__ import annotations

import struct
from typing import TYPE_CHECKING, Any, Final, NamedTuple, TypeAlias

import numpy as np

from aioflux._values.checksums import crc32c
from aioflux.checkpoint._format.methods import MIN_GAIN, MIN_PLANE_BYTES, Compressor, Method
from aioflux.checkpoint._format.planes import PLANE_SIZES, Bytes, join_planes, split_planes
from aioflux.errors import CheckpointCorruptError

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = [
    "END_OF_STREAM",
    "FRAME_SIZE_BYTES",
    "HEAD_SIZE_BYTES",
    "MAX_FRAME_SIZE_BYTES",
    "START_OF_STREAM",
    "FrameHead",
    "FrameSlice",
    "decode_frame",
    "decode_slice",
    "encode_frame",
    "frame_bounds",
    "max_stored_size",
    "parse_head",
    "plan_slices",
]

FRAME_SIZE_BYTES: Final = 1024 * 1024
"""Bytes of memory in a frame: 1 ms of one core, and few bytes read beyond the ends of a range.
Larger frames compress no better."""

MAX_FRAME_SIZE_BYTES: Final = 16 * 1024 * 1024
"""A frame of a larger size is damaged."""

_HEAD: Final = struct.Struct("<BBHIII")
_CHECKED: Final = struct.Struct("<BBHII")
"""The head without its checksum, which comes last."""

HEAD_SIZE_BYTES: Final = _HEAD.size

START_OF_STREAM: Final = b"aioflux\1"
"""Bytes before the frames of a stream without a table. The last byte is the version."""

END_OF_STREAM: Final = _HEAD.pack(0, 0, 0, 0, 0, crc32c(_CHECKED.pack(0, 0, 0, 0, 0)))
"""Bytes after them: the head of an empty frame."""

_Buffer: TypeAlias = "bytes | bytearray | memoryview"


class FrameHead(NamedTuple):
    """The head of a frame."""

    plane_size: int
    """Bytes of an element, each stored in a plane; 1 if they are not split."""
    raw_mask: int
    """Bit k: plane k is not compressed."""
    reserved: int
    """0."""
    raw_size: int
    """Bytes after decoding."""
    body_size: int
    """Bytes after the head."""
    checksum: int
    """CRC32C of the head before this field, and of the body."""


class FrameSlice(NamedTuple):
    """The part of one frame that a range of memory needs."""

    stored_start: int
    """First stored byte of the frame, counted from the first frame."""
    stored_end: int
    """One past its last stored byte."""
    raw_size: int
    """Bytes of the frame after decoding."""
    start: int
    """First decoded byte that is needed."""
    end: int
    """One past the last decoded byte that is needed."""
    at: int
    """Offset of these bytes in the range."""


def frame_bounds(size: int, frame_size: int) -> list[tuple[int, int]]:
    """Return the ranges that `size` bytes of memory are cut into."""
    return [(start, min(start + frame_size, size)) for start in range(0, size, frame_size)]


def encode_frame(raw: _Buffer, methods: Sequence[Method], compressor: Compressor) -> bytearray:
    """Return the frame of some memory.

    Args:
        raw: The bytes, at most `MAX_FRAME_SIZE_BYTES`.
        methods: The method of each plane; as many as an element has bytes.
        compressor: Used by no other thread meanwhile.
    """
    whole = np.frombuffer(raw, np.uint8)
    if all(method is Method.RAW for method in methods):
        return _frame(0b1, [whole.data], len(whole), b"")
    end = len(whole) - len(whole) % len(methods)
    planes = compressor.planes(len(methods), end // len(methods))
    split_planes(whole[:end], planes)
    bodies, raw_mask = list[_Buffer](), 0
    for index, (plane, method) in enumerate(zip(planes, methods, strict=True)):
        body = _encode_plane(plane, method, compressor)
        raw_mask |= (body is None) << index
        bodies.append(plane.data if body is None else body)
    return _frame(raw_mask, bodies, len(whole), whole[end:].data)


def _encode_plane(plane: Bytes, method: Method, compressor: Compressor) -> bytes | None:
    """Return a compressed plane, or None if that saves too little."""
    if method is Method.RAW or len(plane) < MIN_PLANE_BYTES:
        return None
    body = compressor.compress(plane, method)
    return body if len(body) <= (1 - MIN_GAIN) * len(plane) else None


def _frame(raw_mask: int, planes: Sequence[_Buffer], raw_size: int, tail: _Buffer) -> bytearray:
    sizes = struct.pack(f"<{len(planes)}I", *map(len, planes))
    body_size = len(sizes) + sum(map(len, planes)) + len(tail)
    checked = _CHECKED.pack(len(planes), raw_mask, 0, raw_size, body_size)
    frame = bytearray().join((checked, b"\0\0\0\0", sizes, *planes, tail))
    checksum = crc32c(memoryview(frame)[HEAD_SIZE_BYTES:], crc32c(checked))
    frame[_CHECKED.size : HEAD_SIZE_BYTES] = checksum.to_bytes(4, "little")
    return frame


def parse_head(data: _Buffer, *, max_raw_size: int = MAX_FRAME_SIZE_BYTES) -> FrameHead:
    """Return the head of a frame, after a check of its fields.

    Raises:
        CheckpointCorruptError: It is no head, or of more than `max_raw_size` bytes.
    """
    if len(data) < HEAD_SIZE_BYTES:
        raise _corrupt(f"it ends after {len(data)} of the {HEAD_SIZE_BYTES} bytes of its head")
    head = FrameHead(*_HEAD.unpack_from(data))
    if (
        head.plane_size not in {0, *PLANE_SIZES}
        or head.reserved
        or head.raw_mask >> head.plane_size
    ):
        raise _corrupt("its head is invalid")
    if head.raw_size > max_raw_size:
        raise _corrupt(f"it claims {head.raw_size:,} bytes, more than {max_raw_size:,}")
    # A plane takes at most its raw bytes, and 4 bytes for its size.
    if head.body_size > head.raw_size + 4 * head.plane_size:
        raise _corrupt(f"it claims {head.body_size:,} stored bytes for {head.raw_size:,}")
    return head


def decode_frame(stored: _Buffer, out: memoryview, *, plane_size: int = 0) -> None:
    """Decode a frame into `out`.

    Args:
        stored: All bytes of the frame and no more.
        out: Contiguous, writable, and of the size of the memory. Undefined after an error.
        plane_size: The number of planes that the frame may have, besides 1; 0 allows any.

    Raises:
        CheckpointCorruptError: The frame is damaged, or is of another size.
    """
    stored = memoryview(stored).cast("B")
    target = np.frombuffer(out, np.uint8)
    head = parse_head(stored, max_raw_size=len(target))
    if head.raw_size != len(target) or head.body_size != len(stored) - HEAD_SIZE_BYTES:
        raise _corrupt(
            f"it is one of {head.raw_size:,} bytes in {HEAD_SIZE_BYTES + head.body_size:,}, and "
            f"{len(target):,} in {len(stored):,} were expected"
        )
    if head.plane_size not in ({plane_size, 1} if plane_size else PLANE_SIZES):
        raise _corrupt(f"it has {head.plane_size} planes, and {plane_size} were expected")
    checksum = crc32c(stored[HEAD_SIZE_BYTES:], crc32c(stored[: _CHECKED.size]))
    if checksum != head.checksum:
        raise _corrupt("its crc32c does not match")
    _decode_planes(head, np.frombuffer(stored[HEAD_SIZE_BYTES:], np.uint8), target)


def _decode_planes(head: FrameHead, body: Bytes, target: Bytes) -> None:
    """Decode the body of a frame into `target`, which has the raw size of the head."""
    num_planes = head.plane_size
    num_elements, num_tail = divmod(head.raw_size, num_planes)
    begin, end = 4 * num_planes, len(body) - num_tail
    if begin > end:
        raise _corrupt("it is too short for its planes")
    sizes = body[:begin].view("<u4").tolist()
    if begin + sum(sizes) != end:
        raise _corrupt("its size is not that of its planes")
    elements = target[: num_planes * num_elements]
    planes = list[Bytes]()
    for index, size in enumerate(sizes):
        plane, begin = body[begin : begin + size], begin + size
        if head.raw_mask >> index & 1:
            if size != num_elements:
                raise _corrupt(f"its plane {index} has {size:,} bytes of {num_elements:,}")
        else:
            target_plane = elements if num_planes == 1 else np.empty(num_elements, np.uint8)
            _decompress(plane, target_plane)
            plane = target_plane
        planes.append(plane)
    if planes[0] is not elements:
        join_planes(planes, elements)
    target[len(elements) :] = body[end:]


def _decompress(stored: Bytes, out: Bytes) -> None:
    """Decompress one plane, which must have the size of `out`."""
    import zstandard

    try:
        frame: Any = zstandard.get_frame_parameters(stored.data)
        # Both bound what zstd allocates: it decompresses a frame of known size in one pass.
        if frame.content_size != len(out) or frame.window_size > max(len(out), 1024):
            raise _corrupt(f"a plane claims {frame.content_size:,} bytes, and has {len(out):,}")
        num_read = zstandard.ZstdDecompressor().stream_reader(stored.data).readinto(out.data)
    except zstandard.ZstdError as exc:
        raise _corrupt(f"a plane does not decompress: {exc}") from exc
    if num_read != len(out):
        raise _corrupt(f"a plane ends after {num_read:,} of its {len(out):,} bytes")


def plan_slices(
    start: int, end: int, *, size: int, frame_size: int, frame_ends: Sequence[int]
) -> list[FrameSlice]:
    """Return the slices of the frames that hold the bytes `[start, end)` of memory, in order.

    The memory has `size` bytes; `frame_size` and `frame_ends` are those of its `StoredItem`. The
    stored bytes of the slices are contiguous, from the `stored_start` of the first to the
    `stored_end` of the last.

    Raises:
        CheckpointCorruptError: The table does not fit the size.
        ValueError: The range is not within the memory.
    """
    if not 0 <= start <= end <= size:
        raise ValueError(f"the range must be within 0 and {size}, not {start} to {end}")
    if not 0 < frame_size <= MAX_FRAME_SIZE_BYTES or len(frame_ends) != -(-size // frame_size):
        raise CheckpointCorruptError(
            f"a table of {len(frame_ends)} frames of {frame_size:,} bytes does not fit a tensor of "
            f"{size:,}; load an earlier checkpoint"
        )
    slices = list[FrameSlice]()
    for index in range(start // frame_size, -(-end // frame_size) if start < end else 0):
        raw_start = index * frame_size
        raw_size = min(frame_size, size - raw_start)
        first, last = max(start, raw_start), min(end, raw_start + raw_size)
        stored_start, stored_end = frame_ends[index - 1] if index else 0, frame_ends[index]
        if not HEAD_SIZE_BYTES <= stored_end - stored_start <= max_stored_size(raw_size):
            raise _corrupt(f"it claims {stored_end - stored_start:,} stored bytes for {raw_size:,}")
        slices.append(
            FrameSlice(
                stored_start,
                stored_end,
                raw_size,
                first - raw_start,
                last - raw_start,
                first - start,
            )
        )
    return slices


def max_stored_size(raw_size: int) -> int:
    """Return the largest size of a frame of `raw_size` bytes."""
    return HEAD_SIZE_BYTES + 4 * PLANE_SIZES[-1] + raw_size


def decode_slice(stored: _Buffer, part: FrameSlice, out: memoryview, *, plane_size: int) -> None:
    """Decode the slice of a frame, as `decode_frame`, into `out`, the memory of the whole range."""
    target = out[part.at : part.at + part.end - part.start]
    if part.end - part.start == part.raw_size:
        decode_frame(stored, target, plane_size=plane_size)
        return
    whole = memoryview(bytearray(part.raw_size))
    decode_frame(stored, whole, plane_size=plane_size)
    target[:] = whole[part.start : part.end]


def _corrupt(what: str) -> CheckpointCorruptError:
    return CheckpointCorruptError(
        f"a compressed frame cannot be read: {what}; load an earlier checkpoint"
    )

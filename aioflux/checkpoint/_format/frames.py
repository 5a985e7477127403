"""Compressed frames of memory. Each frame can be decoded without the others. Pure.

Memory is cut every `frame_size` bytes, and each piece is encoded as one frame:

    frame: head (16 bytes) | size of each plane (4 bytes each) | planes | tail
    head:  number of planes, one bit for each plane that is not compressed, 0, raw size,
           size of the frame after the head, crc32c of everything else in the frame
    tail:  the bytes of memory after the last whole element

A plane is one zstd frame (RFC 8878) that states its size. If compression saves less than 3 %, the
plane is stored as raw bytes. Numbers are little-endian.

The decoder checks the sizes in the head before it allocates memory, and the size of each plane
before it decompresses the plane. It allocates at most a small multiple of the size of the decoded
frame. A frame that cannot be decoded, or whose crc32c does not match, raises
CheckpointCorruptError.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import Any, Final, NamedTuple, TypeAlias

import numpy as np

from aioflux._values.checksums import crc32c
from aioflux.checkpoint._format.methods import (
    MIN_GAIN,
    MIN_PLANE_BYTES,
    PLANE_SIZES,
    Bytes,
    Compressor,
    Method,
    join_planes,
    split_planes,
)
from aioflux.errors import CheckpointCorruptError

FRAME_SIZE_BYTES: Final = 1024 * 1024
"""Bytes of memory in a frame. One core needs 1 ms for a frame, and the read of a range reads few
bytes beyond the range. Larger frames compress no better."""

MAX_FRAME_SIZE_BYTES: Final = 16 * 1024 * 1024
"""The decoder rejects larger frames as damaged."""

_HEAD: Final = struct.Struct("<BBHIII")
_CHECKED_HEAD: Final = struct.Struct("<BBHII")
"""The head without its last field, the checksum."""

HEAD_SIZE_BYTES: Final = _HEAD.size

START_OF_STREAM: Final = b"aioflux\1"
"""Bytes before the frames of a stream that has no frame table. The last byte is the version."""

END_OF_STREAM: Final = _HEAD.pack(0, 0, 0, 0, 0, crc32c(_CHECKED_HEAD.pack(0, 0, 0, 0, 0)))
"""Bytes after the frames of a stream that has no frame table: the head of an empty frame."""

_Buffer: TypeAlias = "bytes | bytearray | memoryview"


class FrameHead(NamedTuple):
    """The fields at the beginning of a frame."""

    plane_size: int
    """Number of planes, equal to the bytes of an element; 1 if the bytes are not split."""
    raw_mask: int
    """Bit k: plane k is not compressed."""
    reserved: int
    """Always 0."""
    raw_size: int
    """Size of the decoded frame in bytes."""
    body_size: int
    """Size of the frame in bytes, without the head."""
    checksum: int
    """CRC32C of the fields before this one, and of all bytes after the head."""


class FrameSlice(NamedTuple):
    """One frame, and the part of the decoded frame that belongs to a range of memory."""

    stored_start: int
    """First byte of the stored frame, counted from the first frame of the item."""
    stored_end: int
    """One past the last byte of the stored frame."""
    raw_size: int
    """Size of the decoded frame in bytes."""
    start: int
    """First byte in the decoded frame that belongs to the range."""
    end: int
    """One past the last byte in the decoded frame that belongs to the range."""
    range_offset: int
    """Offset in the range of the byte at `start`."""


def frame_bounds(size: int, frame_size: int) -> list[tuple[int, int]]:
    """Return the range of memory of each frame."""
    return [(start, min(start + frame_size, size)) for start in range(0, size, frame_size)]


def encode_frame(raw: _Buffer, methods: Sequence[Method], compressor: Compressor) -> bytearray:
    """Encode memory as one frame.

    Args:
        raw: The bytes, at most `MAX_FRAME_SIZE_BYTES`.
        methods: The method of each plane; there are as many planes as bytes in an element.
        compressor: No other thread may use it during the call.
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
    """Return a compressed plane, or None if compression saves too little."""
    if method is Method.RAW or len(plane) < MIN_PLANE_BYTES:
        return None
    body = compressor.compress(plane, method)
    return body if len(body) <= (1 - MIN_GAIN) * len(plane) else None


def _frame(raw_mask: int, planes: Sequence[_Buffer], raw_size: int, tail: _Buffer) -> bytearray:
    sizes = struct.pack(f"<{len(planes)}I", *map(len, planes))
    body_size = len(sizes) + sum(map(len, planes)) + len(tail)
    checked = _CHECKED_HEAD.pack(len(planes), raw_mask, 0, raw_size, body_size)
    frame = bytearray().join((checked, b"\0\0\0\0", sizes, *planes, tail))
    checksum = crc32c(memoryview(frame)[HEAD_SIZE_BYTES:], crc32c(checked))
    frame[_CHECKED_HEAD.size : HEAD_SIZE_BYTES] = checksum.to_bytes(4, "little")
    return frame


def parse_head(data: _Buffer, *, max_raw_size: int = MAX_FRAME_SIZE_BYTES) -> FrameHead:
    """Return the head of a frame, after a check of its fields.

    Raises:
        CheckpointCorruptError: The head is invalid, or states more than `max_raw_size` bytes.
    """
    if len(data) < HEAD_SIZE_BYTES:
        raise _corrupt(
            f"it is truncated after {len(data)} of the {HEAD_SIZE_BYTES} bytes of its head"
        )
    head = FrameHead(*_HEAD.unpack_from(data))
    if (
        head.plane_size not in {0, *PLANE_SIZES}
        or head.reserved
        or head.raw_mask >> head.plane_size
    ):
        raise _corrupt("its head is invalid")
    if head.raw_size > max_raw_size:
        raise _corrupt(f"its head states {head.raw_size:,} bytes, more than {max_raw_size:,}")
    # A plane needs at most its raw bytes, and 4 bytes for its size.
    if head.body_size > head.raw_size + 4 * head.plane_size:
        raise _corrupt(
            f"its head states {head.body_size:,} stored bytes, too many for {head.raw_size:,} "
            "decoded bytes"
        )
    return head


def decode_frame(stored: _Buffer, out: memoryview, *, plane_size: int = 0) -> None:
    """Decode a frame into `out`.

    Args:
        stored: The bytes of exactly one frame.
        out: Contiguous writable memory of the decoded size. Undefined after an error.
        plane_size: The number of planes that the frame may have. One plane is always allowed; 0
            allows any number.

    Raises:
        CheckpointCorruptError: The frame is damaged, or has another size.
    """
    stored = memoryview(stored).cast("B")
    target = np.frombuffer(out, np.uint8)
    head = parse_head(stored, max_raw_size=len(target))
    if head.raw_size != len(target) or head.body_size != len(stored) - HEAD_SIZE_BYTES:
        raise _corrupt(
            f"it has {head.raw_size:,} bytes, stored in {HEAD_SIZE_BYTES + head.body_size:,}, and "
            f"{len(target):,} bytes, stored in {len(stored):,}, were expected"
        )
    if head.plane_size not in ({plane_size, 1} if plane_size else PLANE_SIZES):
        raise _corrupt(f"it has {head.plane_size} planes, and {plane_size} were expected")
    checksum = crc32c(stored[HEAD_SIZE_BYTES:], crc32c(stored[: _CHECKED_HEAD.size]))
    if checksum != head.checksum:
        raise _corrupt("its crc32c does not match")
    _decode_planes(head, np.frombuffer(stored[HEAD_SIZE_BYTES:], np.uint8), target)


def _decode_planes(head: FrameHead, body: Bytes, target: Bytes) -> None:
    """Decode the bytes after a head into `target`, which has `head.raw_size` bytes."""
    num_planes = head.plane_size
    num_elements, num_tail = divmod(head.raw_size, num_planes)
    begin, end = 4 * num_planes, len(body) - num_tail
    if begin > end:
        raise _corrupt("it is too short for its planes")
    sizes = body[:begin].view("<u4").tolist()
    if begin + sum(sizes) != end:
        raise _corrupt("its size differs from the size of its planes")
    elements = target[: num_planes * num_elements]
    planes = list[Bytes]()
    for index, size in enumerate(sizes):
        plane, begin = body[begin : begin + size], begin + size
        if head.raw_mask >> index & 1:
            if size != num_elements:
                raise _corrupt(f"its plane {index} has {size:,} bytes instead of {num_elements:,}")
        else:
            target_plane = elements if num_planes == 1 else np.empty(num_elements, np.uint8)
            _decompress(plane, target_plane)
            plane = target_plane
        planes.append(plane)
    if planes[0] is not elements:
        join_planes(planes, elements)
    target[len(elements) :] = body[end:]


def _decompress(stored: Bytes, out: Bytes) -> None:
    """Decompress one plane into `out`, which has the size of the plane."""
    import zstandard

    try:
        frame: Any = zstandard.get_frame_parameters(stored.data)
        # The content size and the window size bound the memory that zstd allocates, since zstd
        # decompresses a frame of known size in one pass.
        if frame.content_size != len(out):
            raise _corrupt(f"a plane states {frame.content_size:,} bytes instead of {len(out):,}")
        max_window = max(len(out), 1024)
        if frame.window_size > max_window:
            raise _corrupt(
                f"a plane needs a window of {frame.window_size:,} bytes, more than {max_window:,}"
            )
        num_read = zstandard.ZstdDecompressor().stream_reader(stored.data).readinto(out.data)
    except zstandard.ZstdError as exc:
        raise _corrupt(f"a plane does not decompress: {exc}") from exc
    if num_read != len(out):
        raise _corrupt(f"a plane is truncated after {num_read:,} of its {len(out):,} bytes")


def plan_slices(
    start: int, end: int, *, size: int, frame_size: int, frame_ends: Sequence[int]
) -> list[FrameSlice]:
    """Return the frames that contain the bytes `[start, end)` of memory, in order.

    The memory has `size` bytes. `frame_size` and `frame_ends` are fields of its `StoredItem`. One
    read returns all frames of the result, since they are contiguous in the object.

    Raises:
        CheckpointCorruptError: The sizes of the frames do not fit the size of the memory.
        ValueError: The range is not within the memory.
    """
    if not 0 <= start <= end <= size:
        raise ValueError(f"the range must be within 0 and {size}, not {start} to {end}")
    if not 0 < frame_size <= MAX_FRAME_SIZE_BYTES or len(frame_ends) != -(-size // frame_size):
        raise CheckpointCorruptError(
            f"a table of {len(frame_ends)} frames of {frame_size:,} bytes does not fit a tensor of "
            f"{size:,} bytes; load an earlier checkpoint"
        )
    slices = list[FrameSlice]()
    for index in range(start // frame_size, -(-end // frame_size) if start < end else 0):
        raw_start = index * frame_size
        raw_size = min(frame_size, size - raw_start)
        first, last = max(start, raw_start), min(end, raw_start + raw_size)
        stored_start, stored_end = frame_ends[index - 1] if index else 0, frame_ends[index]
        if not HEAD_SIZE_BYTES <= stored_end - stored_start <= max_stored_size(raw_size):
            raise _corrupt(
                f"the frame table states {stored_end - stored_start:,} stored bytes for a frame of "
                f"{raw_size:,} bytes"
            )
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
    """Return the largest stored size of a frame whose decoded size is `raw_size` bytes."""
    return HEAD_SIZE_BYTES + 4 * PLANE_SIZES[-1] + raw_size


def decode_slice(stored: _Buffer, part: FrameSlice, out: memoryview, *, plane_size: int) -> None:
    """Decode a frame, and write its part of a range into `out`, the memory of the whole range."""
    target = out[part.range_offset : part.range_offset + part.end - part.start]
    if part.end - part.start == part.raw_size:
        decode_frame(stored, target, plane_size=plane_size)
        return
    whole = memoryview(bytearray(part.raw_size))
    decode_frame(stored, whole, plane_size=plane_size)
    target[:] = whole[part.start : part.end]


def _corrupt(reason: str) -> CheckpointCorruptError:
    return CheckpointCorruptError(
        f"a compressed frame cannot be read: {reason}; load an earlier checkpoint"
    )

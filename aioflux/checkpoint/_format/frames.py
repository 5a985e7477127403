"""Compressed frames: memory in, independent frames out, and any range of it back. Pure.

Memory is cut every `frame_size` bytes, and each piece becomes one frame that is read by itself:

    frame: head (16 bytes) | size of each plane (4 bytes each) | planes | bytes of no whole element
    head:  number of planes, which of them are as they were (a bit each), 0, raw size,
           size of what follows, crc32c of everything else in the frame

A plane is one zstd frame (RFC 8878) that tells its size, or the bytes as they were where that saves
less than 3 %. Numbers are little-endian.

Reading is bounded: nothing is decompressed before all sizes are found to fit the memory that waits
for it, and reading a frame takes no more than that memory once more. A frame that does not read, or
whose crc32c does not match, is a CheckpointCorruptError.
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
"""Bytes of memory in a frame: 1 ms of one core, and little to read too much of at the ends of a
range. Larger frames compress no better."""

MAX_FRAME_SIZE_BYTES: Final = 16 * 1024 * 1024
"""A frame that claims more is damaged; what reads frames need not be ready for larger ones."""

_HEAD: Final = struct.Struct("<BBHIII")
_CHECKED: Final = struct.Struct("<BBHII")
"""The head without its checksum, which comes last."""

HEAD_SIZE_BYTES: Final = _HEAD.size

START_OF_STREAM: Final = b"aioflux\1"
"""Comes before the frames of a stream, which no table tells of. The last byte is the version."""

END_OF_STREAM: Final = _HEAD.pack(0, 0, 0, 0, 0, crc32c(_CHECKED.pack(0, 0, 0, 0, 0)))
"""Comes behind them: the head of a frame of nothing."""

_Buffer: TypeAlias = "bytes | bytearray | memoryview"


class FrameHead(NamedTuple):
    """What a frame tells of itself."""

    plane_size: int
    """Bytes of an element, each stored in a plane; 1 where they are not split."""
    raw_mask: int
    """Bit k: plane k is stored as it was."""
    reserved: int
    """0."""
    raw_size: int
    """Bytes that it decodes to."""
    body_size: int
    """Bytes that follow its head."""
    checksum: int
    """CRC32C of the head before this field, and of the body."""


class FrameSlice(NamedTuple):
    """The part of one frame that a range of memory needs."""

    stored_start: int
    """First stored byte of the frame, counted from the first frame."""
    stored_end: int
    """One past its last stored byte."""
    raw_size: int
    """Bytes that the frame decodes to."""
    start: int
    """First byte needed of these."""
    end: int
    """One past the last byte needed."""
    at: int
    """Where they go, counted from the beginning of the range."""


def frame_bounds(size: int, frame_size: int) -> list[tuple[int, int]]:
    """Return the ranges that so many bytes of memory are cut into."""
    return [(start, min(start + frame_size, size)) for start in range(0, size, frame_size)]


def encode_frame(raw: _Buffer, methods: Sequence[Method], compressor: Compressor) -> bytearray:
    """Return the frame of some memory.

    Args:
        raw: The bytes, at most `MAX_FRAME_SIZE_BYTES`.
        methods: How each plane is stored; as many as an element has bytes.
        compressor: Nobody else uses it meanwhile.
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
    """Return a plane compressed, or None where it is better left as it is."""
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
    """Return what the head of a frame tells, once it is found to be possible.

    Raises:
        CheckpointCorruptError: It is none, or claims more than `max_raw_size`.
    """
    if len(data) < HEAD_SIZE_BYTES:
        raise _corrupt(f"it ends after {len(data)} of the {HEAD_SIZE_BYTES} bytes of its head")
    head = FrameHead(*_HEAD.unpack_from(data))
    if (
        head.plane_size not in {0, *PLANE_SIZES}
        or head.reserved
        or head.raw_mask >> head.plane_size
    ):
        raise _corrupt("its head is none of a frame")
    if head.raw_size > max_raw_size:
        raise _corrupt(f"it claims {head.raw_size:,} bytes where at most {max_raw_size:,} can be")
    # A plane takes at most what it was, and 4 bytes for its size.
    if head.body_size > head.raw_size + 4 * head.plane_size:
        raise _corrupt(f"it claims {head.body_size:,} stored bytes for {head.raw_size:,}")
    return head


def decode_frame(stored: _Buffer, out: memoryview, *, plane_size: int = 0) -> None:
    """Write the memory that a frame holds into `out`, as long as that was.

    Args:
        stored: All bytes of the frame and no more.
        out: Contiguous and writable. What it holds after an error is undefined.
        plane_size: How many planes the frame may have, beside 1; any number where it is 0.

    Raises:
        CheckpointCorruptError: The frame is damaged, or is not one of so many bytes.
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
    """Write what the body of a frame holds into `target`, of the size that its head tells."""
    num_planes = head.plane_size
    num_elements, num_tail = divmod(head.raw_size, num_planes)
    begin, end = 4 * num_planes, len(body) - num_tail
    if begin > end:
        raise _corrupt("it has no room for its planes")
    sizes = body[:begin].view("<u4").tolist()
    if begin + sum(sizes) != end:
        raise _corrupt("its planes do not fill it")
    elements = target[: num_planes * num_elements]
    planes = list[Bytes]()
    for index, size in enumerate(sizes):
        plane, begin = body[begin : begin + size], begin + size
        if head.raw_mask >> index & 1:
            if size != num_elements:
                raise _corrupt(f"its plane {index} has {size:,} bytes of {num_elements:,}")
        else:
            room = elements if num_planes == 1 else np.empty(num_elements, np.uint8)
            _decompress(plane, room)
            plane = room
        planes.append(plane)
    if planes[0] is not elements:
        join_planes(planes, elements)
    target[len(elements) :] = body[end:]


def _decompress(stored: Bytes, room: Bytes) -> None:
    """Decompress one plane, which must fill its room exactly."""
    import zstandard

    try:
        told: Any = zstandard.get_frame_parameters(stored.data)
        # Both bound what zstd allocates: it decompresses a frame that tells its size in one pass.
        if told.content_size != len(room) or told.window_size > max(len(room), 1024):
            raise _corrupt(
                f"a plane claims {told.content_size:,} bytes where there are {len(room):,}"
            )
        num_read = zstandard.ZstdDecompressor().stream_reader(stored.data).readinto(room.data)
    except zstandard.ZstdError as exc:
        raise _corrupt(f"a plane does not decompress: {exc}") from exc
    if num_read != len(room):
        raise _corrupt(f"a plane ends after {num_read:,} of its {len(room):,} bytes")


def plan_slices(
    start: int, end: int, *, size: int, frame_size: int, frame_ends: Sequence[int]
) -> list[FrameSlice]:
    """Return what of which frames the bytes `[start, end)` of some memory need, in order.

    What is stored of them lies without a gap from the first's `stored_start` to the last's
    `stored_end`.

    Args:
        start: First byte, counted in memory.
        end: One past the last byte.
        size: Bytes of all the memory.
        frame_size: Bytes of memory in each frame but the last.
        frame_ends: One past the last stored byte of each frame.

    Raises:
        CheckpointCorruptError: The table cannot be one of so many bytes.
        ValueError: The range is not one of the memory.
    """
    if not 0 <= start <= end <= size:
        raise ValueError(f"the range must be within 0 and {size}, not {start} to {end}")
    _check_table(size=size, frame_size=frame_size, frame_ends=frame_ends)
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
    """Return the most bytes that the frame of so many has."""
    return HEAD_SIZE_BYTES + 4 * PLANE_SIZES[-1] + raw_size


def decode_slice(stored: _Buffer, part: FrameSlice, out: memoryview, *, plane_size: int) -> None:
    """Write what a range needs of one frame to where it belongs.

    Args:
        stored: All bytes of the frame.
        part: What is needed of it.
        out: The memory of the whole range.
        plane_size: How many planes the frame may have, beside 1.

    Raises:
        CheckpointCorruptError: The frame is damaged, or is another one.
    """
    target = out[part.at : part.at + part.end - part.start]
    if part.end - part.start == part.raw_size:
        decode_frame(stored, target, plane_size=plane_size)
        return
    whole = memoryview(bytearray(part.raw_size))
    decode_frame(stored, whole, plane_size=plane_size)
    target[:] = whole[part.start : part.end]


def _check_table(*, size: int, frame_size: int, frame_ends: Sequence[int]) -> None:
    """Raise CheckpointCorruptError where a table of frames cannot be one of so many bytes."""
    if not 0 < frame_size <= MAX_FRAME_SIZE_BYTES or len(frame_ends) != -(-size // frame_size):
        raise CheckpointCorruptError(
            f"a table of {len(frame_ends)} frames of {frame_size:,} bytes is none of a tensor of "
            f"{size:,}; load an earlier checkpoint"
        )


def _corrupt(what: str) -> CheckpointCorruptError:
    return CheckpointCorruptError(
        f"a compressed frame cannot be read: {what}; load an earlier checkpoint"
    )

"""Compressed frames: any range of memory comes back, and damage is an error without harm."""

from __future__ import annotations

import random
import struct
import tracemalloc
from functools import cache
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import zstandard
from hypothesis import given
from hypothesis import strategies as st

from aioflux._values.checksums import crc32c
from aioflux.checkpoint._format import frames
from aioflux.checkpoint._format.frames import (
    HEAD_SIZE_BYTES,
    decode_frame,
    decode_slice,
    encode_frame,
    frame_bounds,
    max_stored_size,
    parse_head,
    plan_slices,
)
from aioflux.checkpoint._format.methods import (
    PLANE_SIZES,
    Compressor,
    Method,
    plan_methods,
    plan_planes,
)
from aioflux.errors import CheckpointCorruptError

KINDS = ("bf16", "fp32", "fp64", "int64", "random", "zeros", "text")
SIZE = 40_000
WORDS = b"layer weight bias of the optimizer state dict exp_avg momentum 0.9 decay".split()
TEXT = b" ".join(random.Random(0).choices(WORDS, k=100_000))


@cache
def memory(kind: str, size: int = SIZE) -> bytes:
    rng = np.random.default_rng(0)
    weights = rng.standard_normal(size // 2, dtype=np.float32) * np.float32(0.02)
    made: dict[str, Any] = {
        "bf16": (weights.view(np.uint32) >> 16).astype(np.uint16),
        "fp32": weights,
        "fp64": weights.astype(np.float64) * 1.1,
        "int64": rng.integers(0, 50_000, size // 8),
        "random": rng.integers(0, 256, size, dtype=np.uint8),
        "zeros": np.zeros(size, np.uint8),
        "text": np.frombuffer(TEXT, np.uint8),
    }
    return bytes(made[kind].tobytes()[:size])


ELEMENT_SIZES = {"bf16": 2, "fp32": 4, "fp64": 8, "int64": 8}


def encode(
    raw: bytes, *, plane_size: int, frame_size: int = SIZE, level: int = 1
) -> list[bytearray]:
    compressor = Compressor(level)
    methods = plan_methods(raw, plane_size, compressor) if raw else [Method.RAW]
    return [
        encode_frame(raw[start:end], methods, compressor)
        for start, end in frame_bounds(len(raw), frame_size)
    ]


def decode(stored: bytes | bytearray, size: int, *, plane_size: int = 0) -> bytes:
    out = bytearray(size)
    decode_frame(stored, memoryview(out), plane_size=plane_size)
    return bytes(out)


def table(pieces: list[bytearray]) -> list[int]:
    return np.cumsum([len(piece) for piece in pieces]).tolist()


@given(
    kind=st.sampled_from(KINDS),
    size=st.integers(1, SIZE),
    plane_size=st.sampled_from(PLANE_SIZES),
    frame_size=st.integers(300, SIZE),
    start=st.integers(0, SIZE),
    end=st.integers(0, SIZE),
)
def test_any_range_of_memory_is_the_range_of_the_whole(
    kind: str, size: int, plane_size: int, frame_size: int, start: int, end: int
) -> None:
    raw = memory(kind)[:size]
    start, end = sorted((min(start, size), min(end, size)))
    pieces = encode(raw, plane_size=plane_size, frame_size=frame_size)
    stored = b"".join(pieces)
    slices = plan_slices(start, end, size=size, frame_size=frame_size, frame_ends=table(pieces))
    out = bytearray(end - start)
    for part in slices:
        decode_slice(
            stored[part.stored_start : part.stored_end],
            part,
            memoryview(out),
            plane_size=plane_size,
        )
    assert bytes(out) == raw[start:end]
    # What is fetched has no gaps, and nothing but frames that are needed.
    for part, following in pairwise(slices):
        assert part.stored_end == following.stored_start
    assert all(part.start < part.end for part in slices)


@pytest.mark.parametrize("level", [-5, 1, 9])
@pytest.mark.parametrize("kind", KINDS)
def test_every_level_comes_back(kind: str, level: int) -> None:
    plane_size = ELEMENT_SIZES.get(kind, 1)
    (frame,) = encode(memory(kind), plane_size=plane_size, level=level)
    assert decode(frame, SIZE, plane_size=plane_size) == memory(kind)


@pytest.mark.parametrize(
    ("kind", "plane_size", "most"),
    [
        ("bf16", 2, 0.69),
        ("fp32", 4, 0.85),
        ("int64", 8, 0.26),
        ("random", 1, 1.001),
        ("random", 4, 1.001),
        ("zeros", 1, 0.01),
        ("text", 1, 0.30),
    ],
)
def test_how_small_memory_becomes(kind: str, plane_size: int, most: float) -> None:
    size = 1 << 19
    (frame,) = encode(memory(kind, size), plane_size=plane_size, frame_size=size)
    assert len(frame) <= most * size
    assert decode(frame, size) == memory(kind, size)


@pytest.mark.parametrize(
    ("kind", "plane_size", "expected"),
    [
        ("bf16", 2, (Method.RAW, Method.ENTROPY)),
        ("fp32", 4, (Method.RAW, Method.RAW, Method.RAW, Method.ENTROPY)),
        ("random", 1, (Method.RAW,)),
        ("text", 1, (Method.LEVEL,)),
    ],
)
def test_planes_are_stored_by_what_is_in_them(
    kind: str, plane_size: int, expected: tuple[Method, ...]
) -> None:
    assert plan_methods(memory(kind, 1 << 19), plane_size, Compressor(1)) == expected


@pytest.mark.parametrize(
    ("kind", "expected"),
    [("bf16", 2), ("fp32", 4), ("fp64", 8), ("int64", 8), ("random", 1), ("zeros", 1), ("text", 1)],
)
def test_the_size_of_elements_is_found(kind: str, expected: int) -> None:
    assert plan_planes(memory(kind, 1 << 19), Compressor(1)) == expected
    # Also behind a head that is no multiple of them.
    assert plan_planes(bytes(699) + memory(kind, 1 << 19), Compressor(1)) == expected


def test_a_part_of_memory_that_is_unlike_the_samples_comes_back() -> None:
    methods = [Method.ENTROPY, Method.ENTROPY]
    raw = memory("random")
    frame = encode_frame(raw, methods, Compressor(1))
    assert parse_head(frame).raw_mask == 0b11
    assert len(frame) <= max_stored_size(SIZE)
    assert decode(frame, SIZE) == raw


@given(
    kind=st.sampled_from(("bf16", "fp32", "text", "random")),
    seed=st.integers(0, 2**32),
    how=st.sampled_from(("flip", "set", "cut", "insert", "swap", "grow")),
)
def test_damage_is_reported(kind: str, seed: int, how: str) -> None:
    raw = memory(kind)[:5000]
    (frame,) = encode(raw, plane_size=ELEMENT_SIZES.get(kind, 1))
    damaged = damage(frame, random.Random(seed), how)
    try:
        assert decode(damaged, len(raw)) == raw
    except CheckpointCorruptError:
        assert damaged != frame


@given(
    kind=st.sampled_from(("bf16", "fp32", "text")),
    seed=st.integers(0, 2**32),
    how=st.sampled_from(("flip", "set", "swap")),
)
def test_damage_behind_a_right_checksum_stays_within_the_frame(
    kind: str, seed: int, how: str
) -> None:
    raw = memory(kind)[:5000]
    (frame,) = encode(raw, plane_size=ELEMENT_SIZES.get(kind, 1))
    forged = sealed(damage(frame, random.Random(seed), how))
    try:
        assert len(decode(forged, len(raw))) == len(raw)
    except CheckpointCorruptError:
        assert forged != frame


def damage(frame: bytearray, rng: random.Random, how: str) -> bytearray:
    damaged, at = bytearray(frame), rng.randrange(len(frame))
    match how:
        case "flip":
            damaged[at] ^= 1 << rng.randrange(8)
        case "set":
            damaged[at : at + 8] = rng.randbytes(8)
        case "cut":
            del damaged[at:]
        case "insert":
            damaged[at:at] = rng.randbytes(3)
        case "swap":
            other = rng.randrange(len(frame))
            damaged[at], damaged[other] = damaged[other], damaged[at]
        case "grow":
            damaged += rng.randbytes(5)
    return damaged


def sealed(frame: bytearray) -> bytearray:
    """The same with the checksum that fits it."""
    whole = bytearray(frame)
    checksum = crc32c(bytes(whole[HEAD_SIZE_BYTES:]), crc32c(bytes(whole[: HEAD_SIZE_BYTES - 4])))
    whole[HEAD_SIZE_BYTES - 4 : HEAD_SIZE_BYTES] = struct.pack("<I", checksum)
    return whole


def forge(
    *bodies: bytes, raw_size: int, planes: int = 1, raw_mask: int = 0, body_size: int | None = None
) -> bytearray:
    body = struct.pack(f"<{len(bodies)}I", *map(len, bodies)) + b"".join(bodies)
    size = len(body) if body_size is None else body_size
    return sealed(bytearray(struct.pack("<BBHIII", planes, raw_mask, 0, raw_size, size, 0) + body))


def bomb(claimed: int, actual: int) -> bytes:
    """A zstd frame of so many bytes that claims others."""
    made = zstandard.ZstdCompressor(level=1).compress(bytes(actual))
    parameters = zstandard.get_frame_parameters(made)
    assert parameters.content_size == actual
    # The size in the head of the frame (RFC 8878, 3.1.1): 4 or 8 bytes behind magic and descriptor.
    descriptor = 0b11100000
    begin = 5 + {0: 1, 1: 2, 2: 4, 3: 8}[made[4] >> 6]
    return made[:4] + bytes([descriptor]) + struct.pack("<Q", claimed) + made[begin:]


def junk() -> bytearray:
    """A frame with bytes that belong to no plane."""
    plane = zstandard.ZstdCompressor().compress(bytes(100_000))
    return forge(plane + b"junk", raw_size=100_000)[:HEAD_SIZE_BYTES] + (
        struct.pack("<I", len(plane)) + plane + b"junk"
    )


def narrow(size: int) -> bytes:
    """A zstd frame that needs a window of 1 KiB only, whatever its size."""
    parameters = zstandard.ZstdCompressionParameters.from_level(1, window_log=10)
    return zstandard.ZstdCompressor(compression_params=parameters).compress(bytes(size))


def wide(size: int) -> bytes:
    """A zstd frame of zeros that claims a window of 128 MiB (RFC 8878, 3.1.1.1.2)."""
    made = zstandard.ZstdCompressor(level=1).compress(bytes(size))
    begin = 5 + {0: 1, 1: 2, 2: 4, 3: 8}[made[4] >> 6]
    window = bytes([(27 - 10) << 3])
    return made[:4] + bytes([0b11000000]) + window + struct.pack("<Q", size) + made[begin:]


def sizeless(size: int) -> bytes:
    """A zstd frame that has no size."""
    return zstandard.ZstdCompressor(write_content_size=False).compress(bytes(size))


@pytest.mark.parametrize(
    "frame",
    [
        forge(bomb(1 << 40, 1 << 20), raw_size=100_000),
        forge(bomb(100_000, 1 << 24), raw_size=100_000),
        forge(bomb(100_000, 50_000), raw_size=100_000),
        forge(zstandard.ZstdCompressor().compress(bytes(1 << 24)), raw_size=100_000),
        forge(sizeless(100_000), raw_size=100_000),
        forge(b"no zstd at all", raw_size=100_000),
        forge(b"", raw_size=100_000),
        forge(b"a" * 100, raw_size=100_000, raw_mask=1),
        forge(b"a" * 50_000, b"b" * 49_999, raw_size=100_000, planes=2, raw_mask=3),
        forge(b"a" * 50_000, raw_size=100_000, planes=2, raw_mask=3),
        forge(b"a" * 99_999, raw_size=99_999, raw_mask=1),
        forge(b"a" * 100_000, raw_size=100_000, raw_mask=2),
        forge(b"a" * 100_000, raw_size=100_000, planes=3, raw_mask=1),
        forge(b"a" * 100_000, raw_size=100_000, planes=0, raw_mask=0),
        forge(b"a" * 100_000, raw_size=0xFFFFFFFF, raw_mask=1),
        forge(b"a" * 100_000, raw_size=100_000, raw_mask=1, body_size=0xFFFFFFFF),
        sealed(bytearray(struct.pack("<BBHIII", 8, 255, 0, 100_000, 3, 0) + b"abc")),
        forge(narrow(1 << 24), raw_size=100_000),
        forge(wide(100_000), raw_size=100_000),
        sealed(junk()),
        bytearray(),
        bytearray(b"\1"),
    ],
    ids=[
        "claims-a-terabyte", "holds-more", "holds-less", "claims-more", "has-no-size", "no-zstd",
        "nothing", "short-plane", "uneven-planes", "missing-plane", "another-size", "mask",
        "three-planes", "no-planes", "claims-4-GiB", "stored-4-GiB", "no-room",
        "narrow-and-long", "wide-window", "junk-behind-planes", "empty", "one-byte",
    ],
)  # fmt: skip
def test_a_forged_frame_is_refused_without_its_memory(frame: bytearray) -> None:
    out = memoryview(bytearray(100_000))
    tracemalloc.start()
    try:
        with pytest.raises(CheckpointCorruptError, match="load an earlier checkpoint"):
            decode_frame(frame, out)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 2 * len(out) + 200_000


def test_a_frame_of_other_planes_than_its_table_reports_is_refused() -> None:
    (frame,) = encode(memory("fp32"), plane_size=4)
    with pytest.raises(CheckpointCorruptError, match="4 planes, and 2"):
        decode(frame, SIZE, plane_size=2)


def test_a_frame_may_be_stored_without_planes_where_they_gain_nothing() -> None:
    (frame,) = encode(memory("random"), plane_size=4)
    assert parse_head(frame).plane_size == 1
    assert decode(frame, SIZE, plane_size=4) == memory("random")


def test_a_head_that_claims_more_than_any_frame_is_refused() -> None:
    head = struct.pack("<BBHIII", 1, 1, 0, frames.MAX_FRAME_SIZE_BYTES + 1, 100, 0)
    with pytest.raises(CheckpointCorruptError, match="more than 16,777,216"):
        parse_head(head)


@pytest.mark.parametrize(
    "wrong",
    [
        {"size": 101},
        {"size": 300},
        {"frame_size": 0},
        {"frame_size": -1},
        {"frame_size": frames.MAX_FRAME_SIZE_BYTES + 1},
        {"frame_ends": [120]},
        {"frame_ends": [120, 100]},
        {"frame_ends": [120, 120]},
        {"frame_ends": [120, 1 << 40]},
        {"frame_ends": [-5, 120]},
    ],
    ids=str,
)
def test_a_table_that_cannot_be_is_refused(wrong: dict[str, Any]) -> None:
    right = {"size": 200, "frame_size": 100, "frame_ends": [120, 240]}
    assert len(plan_slices(0, 200, **right)) == 2
    table = right | wrong
    with pytest.raises(CheckpointCorruptError):
        plan_slices(0, table["size"], **table)


@pytest.mark.parametrize(("start", "end"), [(-1, 5), (5, 4), (0, 201)])
def test_a_range_beyond_the_memory_is_the_callers_mistake(start: int, end: int) -> None:
    with pytest.raises(ValueError, match="within 0 and 200"):
        plan_slices(start, end, size=200, frame_size=100, frame_ends=[120, 240])


def test_an_empty_tensor_has_no_frames() -> None:
    assert plan_slices(0, 0, size=0, frame_size=100, frame_ends=[]) == []
    assert plan_slices(50, 50, size=100, frame_size=100, frame_ends=[120]) == []


def test_few_random_bytes_do_not_look_like_elements() -> None:
    for seed in range(20):
        assert plan_planes(random.Random(seed).randbytes(4096), Compressor(1)) == 1


def test_what_repeats_itself_is_not_split() -> None:
    rows = b"".join(b"layer.%d.weight of a state_dict; " % number for number in range(20_000))
    assert plan_planes(rows, Compressor(1)) == 1

"""Byte planes, and their compression methods, chosen from samples of the memory. Pure.

Plane k contains byte k of every element of a tensor. The bytes of a float differ in kind: sign and
exponent have few values, the mantissa has nearly all. A plane of exponents compresses to a third,
and zstd detects at once that a plane of mantissas does not compress. Elements that are not split
compress little. The idea is from ZipNN (arXiv 2411.05239).

Plane 0 holds the least significant bytes, on machines of any byte order.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from enum import Enum
from typing import Any, Final, TypeAlias

import numpy as np
import numpy.typing as npt

Bytes: TypeAlias = npt.NDArray[np.uint8]

PLANE_SIZES: Final = (1, 2, 4, 8)
"""Numbers of planes that elements are split into; 1 means not split."""

_WORDS: Final[dict[int, np.dtype[Any]]] = {
    size: np.dtype(f"<u{size}") for size in PLANE_SIZES if size > 1
}

MIN_GAIN: Final = 0.03
"""Share of a plane that compression must save, to be worth the time of decompression."""

MIN_PLANE_BYTES: Final = 256
"""Shorter planes are not compressed: the head of a zstd frame would cost much of the saving."""

_SAMPLE_RANGES: Final = 8
_PLANE_SAMPLE_BYTES: Final = 8 * 1024
_GUESS_PLANE_BYTES: Final = 2 * 1024

_WINDOW_LOG: Final = 20
"""A window of 1 MiB. A larger window would find no more runs of equal bytes."""

_Buffer: TypeAlias = "bytes | bytearray | memoryview"


def plan_plane_size(element_size: int) -> int:
    """Return the number of planes for elements of `element_size` bytes; 1 means not split.

    Elements of 16 bytes are split like two elements of 8: complex numbers are two floats.
    """
    if element_size in PLANE_SIZES:
        return element_size
    return PLANE_SIZES[-1] if element_size and element_size % PLANE_SIZES[-1] == 0 else 1


def split_planes(raw: Bytes, planes: Bytes) -> None:
    """Split elements into planes.

    Args:
        raw: The elements: `plane_size * n` contiguous bytes.
        planes: Memory for the result, of shape (plane_size, n).
    """
    plane_size = len(planes)
    if plane_size == 1:
        planes[0] = raw
        return
    # 10, 6 and 3 GB/s for 2, 4 and 8 planes. A copy of `raw[index::plane_size]` reaches 3 GB/s.
    word = _WORDS[plane_size]
    words = raw.view(word)
    np.copyto(planes[0], words, casting="unsafe")
    for index in range(1, plane_size):
        np.right_shift(words, 8 * index, out=planes[index], casting="unsafe", dtype=word)


def join_planes(planes: Sequence[Bytes], out: Bytes) -> None:
    """Join planes to elements in `out`: the inverse of `split_planes`."""
    match len(planes):
        case 1:
            out[:] = planes[0]
        case 2:
            _join(planes[0], planes[1], out.view(_WORDS[2]), 8)
        case 4:
            halves = np.empty((2, len(planes[0])), _WORDS[2])
            for index, half in enumerate(halves):
                _join(planes[2 * index], planes[2 * index + 1], half, 8)
            _join(halves[0], halves[1], out.view(_WORDS[4]), 16)
        case num_planes:
            for index, plane in enumerate(planes):
                out[index::num_planes] = plane


def _join(low: npt.NDArray[Any], high: npt.NDArray[Any], out: npt.NDArray[Any], bits: int) -> None:
    np.left_shift(high, bits, out=out, casting="unsafe", dtype=out.dtype)
    np.bitwise_or(out, low, out=out)


class Method(Enum):
    """Ways to store one plane."""

    RAW = "raw"
    ENTROPY = "entropy"
    """zstd that matches only long runs, and Huffman-codes all other bytes. For the exponents of
    floats the low levels of zstd are slower and compress less, since they encode short matches that
    cost more than they save. Measured on bf16 weights: 34.0 % of the size at 520 MB/s, against
    36.8 % at 220 MB/s with level 1 and 42.0 % at 80 MB/s with level 3."""
    LEVEL = "level"
    """zstd at the level of the `Compressor`, for text and repetitive data."""


def require_zstandard() -> None:
    """Raise ModuleNotFoundError, with the extra to install, if zstandard is missing."""
    try:
        import zstandard  # noqa: F401  check that the import works
    except ModuleNotFoundError as exc:
        from aioflux._values.distribution import pip_install

        raise ModuleNotFoundError(
            f"compressed checkpoints need zstandard: {pip_install('compression')}",
            name=exc.name,
        ) from exc


class Compressor:
    """zstd for both methods, and memory for planes. One thread at a time may use it."""

    def __init__(self, level: int) -> None:
        import zstandard

        entropy = zstandard.ZstdCompressionParameters(
            strategy=zstandard.STRATEGY_FAST,
            window_log=_WINDOW_LOG,
            hash_log=6,
            chain_log=6,
            search_log=1,
            min_match=7,
        )
        self._by_method = {
            Method.ENTROPY: zstandard.ZstdCompressor(compression_params=entropy),
            Method.LEVEL: zstandard.ZstdCompressor(level=level),
        }
        self._memory: Bytes = np.empty(0, np.uint8)

    def compress(self, plane: Bytes, method: Method) -> bytes:
        """Return a plane as one zstd frame that states the size of the plane."""
        return self._by_method[method].compress(plane.data)

    def planes(self, plane_size: int, num_elements: int) -> Bytes:
        """Return memory of shape (plane_size, num_elements), which the next call overwrites."""
        size = plane_size * num_elements
        if len(self._memory) < size:
            self._memory = np.empty(size, np.uint8)
        return self._memory[:size].reshape(plane_size, num_elements)


def plan_methods(raw: _Buffer, plane_size: int, compressor: Compressor) -> tuple[Method, ...]:
    """Return the best method of each plane, tried on samples from all parts of the memory."""
    planes = _sample_planes(raw, plane_size, plane_size * _PLANE_SAMPLE_BYTES)
    return tuple(_plan_method(plane, compressor) for plane in planes)


def plan_planes(raw: _Buffer, compressor: Compressor) -> int:
    """Return the best number of planes for memory whose element size is unknown.

    Repetitive data is not split, so that zstd finds the repetitions.
    """
    max_planes = PLANE_SIZES[-1]
    planes = _sample_planes(raw, max_planes, max_planes * _GUESS_PLANE_BYTES)
    if planes.shape[1] < MIN_PLANE_BYTES:
        return 1
    positions = (np.arange(max_planes) * 256)[:, None]
    counts = np.bincount((planes + positions).ravel(), minlength=max_planes * 256)
    shares = {
        # The sample has eight planes. If memory is split into n planes, plane k has the bytes of
        # all sampled planes i with i % n == k. Twice the planes must save 1 %, since random bytes
        # have the same entropy for every n.
        size: _entropy_share(counts.reshape(max_planes // size, size, 256).sum(axis=0))
        * 1.01**doublings
        for doublings, size in enumerate(PLANE_SIZES)
    }
    best = min(shares, key=shares.__getitem__)
    (plain,) = _sample_planes(raw, 1, planes.size)
    is_repeating = len(compressor.compress(plain, Method.LEVEL)) < shares[best] * len(plain)
    return 1 if is_repeating else best


def _entropy_share(counts: npt.NDArray[np.int64]) -> float:
    """Return the compressed size of planes divided by their size, estimated from their entropy.

    `counts` has the number of bytes of each value for each plane. A small sample underestimates the
    entropy; the estimate is corrected (Miller 1955).
    """
    total = counts.sum(axis=1)
    share = np.where(counts, counts, 1) / total[:, None]
    bits = -(counts / total[:, None] * np.log2(share)).sum(axis=1)
    bits += (np.count_nonzero(counts, axis=1) - 1) / (2 * math.log(2) * total)
    return float(np.where(bits > 8 * (1 - MIN_GAIN), 8, bits).mean() / 8)


def _sample_planes(raw: _Buffer, plane_size: int, size: int) -> Bytes:
    """Return the planes of about `size` bytes from several offsets, or of all bytes if fewer."""
    whole = np.frombuffer(raw, np.uint8)
    sample = _sample(whole[: len(whole) - len(whole) % plane_size], plane_size, size)
    planes = np.empty((plane_size, len(sample) // plane_size), np.uint8)
    split_planes(sample, planes)
    return planes


def _sample(raw: Bytes, plane_size: int, size: int) -> Bytes:
    if len(raw) <= size:
        return raw
    range_size = size // _SAMPLE_RANGES
    last = (len(raw) - range_size) // plane_size
    starts = (last * index // (_SAMPLE_RANGES - 1) * plane_size for index in range(_SAMPLE_RANGES))
    return np.concatenate([raw[start : start + range_size] for start in starts])


def _plan_method(plane: Bytes, compressor: Compressor) -> Method:
    if len(plane) < MIN_PLANE_BYTES:
        return Method.RAW
    entropy = len(compressor.compress(plane, Method.ENTROPY))
    level = len(compressor.compress(plane, Method.LEVEL))
    if min(entropy, level) > (1 - MIN_GAIN) * len(plane):
        return Method.RAW
    return Method.LEVEL if level < (1 - MIN_GAIN) * entropy else Method.ENTROPY

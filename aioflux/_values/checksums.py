"""CRC32C (Castagnoli) of memory, and combination of the CRC32C of parts.

google-crc32c computes 5 to 20 GB/s, but holds the GIL, and rejects memoryview and bytearray. So
memory is passed by its address to the C library that google-crc32c is linked with. Large memory is
hashed without the GIL: otherwise uploads of checkpoints stop a training thread for 2 to 5 ms at a
time.
"""

from __future__ import annotations

import ctypes
import importlib
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import lru_cache

import google_crc32c

_COPIED_BYTES = 64 * 1024
"""Smaller memory is copied, which is faster than a call by address."""

_LARGE_BYTES = 1024 * 1024
"""Minimum size that is hashed without the GIL, for which the caller may wait 5 ms afterwards."""


class _Buffer(ctypes.Structure):
    """The C structure `Py_buffer` (docs.python.org/3/c-api/buffer.html)."""

    _fields_ = (
        ("buf", ctypes.c_void_p),
        ("obj", ctypes.py_object),
        ("len", ctypes.c_ssize_t),
        ("itemsize", ctypes.c_ssize_t),
        ("readonly", ctypes.c_int),
        ("ndim", ctypes.c_int),
        ("format", ctypes.c_char_p),
        ("shape", ctypes.c_void_p),
        ("strides", ctypes.c_void_p),
        ("suboffsets", ctypes.c_void_p),
        ("internal", ctypes.c_void_p),
    )


# Separate prototypes: `argtypes` set on a function of `pythonapi` would apply to all modules.
_get_buffer = ctypes.PYFUNCTYPE(
    ctypes.c_int, ctypes.py_object, ctypes.POINTER(_Buffer), ctypes.c_int
)(("PyObject_GetBuffer", ctypes.pythonapi))
_release_buffer = ctypes.PYFUNCTYPE(None, ctypes.POINTER(_Buffer))(
    ("PyBuffer_Release", ctypes.pythonapi)
)


@contextmanager
def address_of(view: memoryview) -> Iterator[int]:
    """Yield the address of contiguous memory, which stays valid during the `with` block.

    Unlike `from_buffer` of ctypes, this accepts read-only memory.
    """
    buffer = _Buffer()
    _get_buffer(view, ctypes.byref(buffer), 0)
    try:
        yield buffer.buf
    finally:
        _release_buffer(ctypes.byref(buffer))


def crc32c(data: bytes | bytearray | memoryview, value: int = 0) -> int:
    """Return the crc32c of `data`, or of preceding bytes and `data`.

    Args:
        data: Contiguous memory.
        value: CRC32C of the preceding bytes; 0 without preceding bytes.
    """
    if isinstance(data, bytes):
        return int(google_crc32c.extend(value, data))
    view = memoryview(data).cast("B")
    owner = view.obj
    if isinstance(owner, bytes) and len(owner) == view.nbytes:
        return int(google_crc32c.extend(value, owner))
    if view.nbytes < _COPIED_BYTES:
        return int(google_crc32c.extend(value, bytes(view)))
    with address_of(view) as address:
        return _choose_extend(view)(value, address, view.nbytes)


def crc32c_of_pieces(pieces: Iterable[memoryview]) -> int:
    """Return the crc32c of pieces of memory, one after another."""
    value = 0
    for piece in pieces:
        value = crc32c(piece, value)
    return value


def crc32c_blocks(view: memoryview, block_size: int) -> list[int]:
    """Return the crc32c of each block of contiguous memory; the last block may be shorter.

    With large memory, the GIL is released during each block. If another thread then keeps it for
    the switch interval (5 ms), the other blocks are hashed with the GIL: after each of 4,500 blocks
    in 298 MB such a wait would take 22 s.
    """
    if view.nbytes <= block_size:
        return [crc32c(view)] if view.nbytes else []
    extend = _choose_extend(view)
    crcs: list[int] = []
    with address_of(view) as start:
        end = start + view.nbytes
        max_seconds, before = sys.getswitchinterval(), time.perf_counter()
        for address in range(start, end, block_size):
            crcs.append(extend(0, address, min(block_size, end - address)))
            after = time.perf_counter()
            if after - before > max_seconds:
                extend = _extend
            before = after
    return crcs


def _choose_extend(view: memoryview) -> Callable[[int, int, int], int]:
    return _extend if view.nbytes < _LARGE_BYTES else _extend_without_gil


@lru_cache(maxsize=32)
def _window(size: int) -> type[ctypes.Array[ctypes.c_ubyte]]:
    return ctypes.c_ubyte * size


def _extend_by_window(value: int, address: int, size: int) -> int:
    return int(google_crc32c.extend(value, _window(size).from_address(address)))


def _load_extend(library: type[ctypes.CDLL]) -> Callable[[int, int, int], int]:
    """Return a function that extends a crc32c by the memory at an address, of a size.

    It is `crc32c_extend` of the C library that google-crc32c is linked with: through `ctypes.CDLL`
    it runs without the GIL, through `ctypes.PyDLL` with the GIL. If it is not found, as on Windows,
    the function of google-crc32c is used, which holds the GIL.
    """
    try:
        extension = importlib.import_module("google_crc32c._crc32c")
        extend = library(extension.__file__).crc32c_extend
    except (ImportError, AttributeError, OSError):
        return _extend_by_window
    extend.argtypes = (ctypes.c_uint32, ctypes.c_void_p, ctypes.c_size_t)
    extend.restype = ctypes.c_uint32
    return extend


_extend = _load_extend(ctypes.PyDLL)
_extend_without_gil = _load_extend(ctypes.CDLL)


_POLYNOMIAL = 0x82F63B78
"""The Castagnoli polynomial, bit-reversed (RFC 3720, appendix B.4)."""


def _multiply(a: int, b: int) -> int:
    """Multiply two bit-reversed polynomials modulo the Castagnoli polynomial."""
    product = 0
    mask = 1 << 31
    while True:
        if a & mask:
            product ^= b
            if not a & (mask - 1):
                return product
        mask >>= 1
        b = (b >> 1) ^ _POLYNOMIAL if b & 1 else b >> 1


@lru_cache(maxsize=64)
def _shift(num_bytes: int) -> int:
    """Return the polynomial x ** (8 * num_bytes), by repeated squaring."""
    result = 1 << 31
    power = 1 << 23  # x ** 8
    while num_bytes:
        if num_bytes & 1:
            result = _multiply(power, result)
        num_bytes >>= 1
        power = _multiply(power, power)
    return result


def combine_crc32c(first: int, second: int, second_size: int) -> int:
    """Return the crc32c of two concatenated parts, from the crc32c of each part.

    Args:
        first: CRC32C of the first part.
        second: CRC32C of the second part.
        second_size: Size of the second part, in bytes.

    Source: `crc32_combine` of zlib (Adler), here with the Castagnoli polynomial.
    """
    if second_size == 0:
        return first
    return _multiply(_shift(second_size), first) ^ second


@lru_cache(maxsize=16)
def _shift_tables(num_bytes: int) -> tuple[tuple[int, ...], ...]:
    """Return tables that shift a crc32c by `num_bytes`: one for each of its bytes, lowest first."""
    shift = _shift(num_bytes)
    tables = []
    for position in range(4):
        table = [0]
        for bit in range(8):
            shifted = _multiply(shift, 1 << (8 * position + bit))
            table += [shifted ^ entry for entry in table]
        tables.append(tuple(table))
    return tuple(tables)


def join_crc32c(crcs: Sequence[int], block_size: int, size: int) -> int:
    """Return the crc32c of concatenated blocks, from the crc32c of each block.

    Args:
        crcs: CRC32C of each block, in order.
        block_size: Size of all blocks except the last one, in bytes.
        size: Total size of the blocks, in bytes.
    """
    if not crcs:
        return 0
    zeroth, first, second, third = _shift_tables(block_size)
    joined = 0
    for crc in crcs[:-1]:
        joined = (
            zeroth[joined & 0xFF]
            ^ first[joined >> 8 & 0xFF]
            ^ second[joined >> 16 & 0xFF]
            ^ third[joined >> 24]
            ^ crc
        )
    return combine_crc32c(joined, crcs[-1], size - block_size * (len(crcs) - 1))

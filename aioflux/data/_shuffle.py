"""Shuffling: a permutation of objects by seed and epoch, and a shuffle buffer for records."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Generic, TypeVar

import torch

T = TypeVar("T")


def permutation(num_objects: int, *, seed: int, epoch: int) -> torch.Tensor:
    """Return the listing indices `0..num_objects-1` in an order that depends on seed and epoch.

    The indices are sorted by a hash. Every rank computes the same order without communication, and
    a saved state stays valid in a later version of torch, whose random generators may change. A
    million indices take about 0.1 s.
    """
    start = _hash(torch.tensor(_to_int64(seed)) + _GOLDEN_GAMMA)
    start = _hash((start ^ _to_int64(epoch)) + _GOLDEN_GAMMA)
    numbers = torch.arange(num_objects, dtype=torch.int64)
    return torch.argsort(_hash((numbers + 1) * _GOLDEN_GAMMA + start), stable=True)


def _hash(numbers: torch.Tensor) -> torch.Tensor:
    """Return the hash of each number.

    The finalizer of SplitMix64 (Steele, Lea, Flood: Fast splittable pseudorandom number generators,
    2014). Multiplication of int64 tensors overflows as in unsigned arithmetic modulo 2**64.
    """
    numbers = (numbers ^ _shift_right(numbers, 30)) * _to_int64(0xBF58476D1CE4E5B9)
    numbers = (numbers ^ _shift_right(numbers, 27)) * _to_int64(0x94D049BB133111EB)
    return numbers ^ _shift_right(numbers, 31)


def _to_int64(number: int) -> int:
    """Return the lowest 64 bits as a signed number."""
    number &= (1 << 64) - 1
    return number - (1 << 64) if number >> 63 else number


_GOLDEN_GAMMA = _to_int64(0x9E3779B97F4A7C15)
"""The increment of SplitMix64."""


def _shift_right(numbers: torch.Tensor, bits: int) -> torch.Tensor:
    """Shift to the right and fill with zeros, as for unsigned numbers."""
    return (numbers >> bits) & ((1 << (64 - bits)) - 1)


class ShuffleBuffer(Generic[T]):
    """Buffer that collects items and returns them in random order.

    Args:
        seed: Seed of the order: the same seed and calls return the same order.
    """

    def __init__(self, *, seed: str) -> None:
        self._rng = random.Random(seed)  # noqa: S311  not for security
        self._items: list[T] = []

    def __iter__(self) -> Iterator[T]:
        """Iterate over the items, in no particular order."""
        return iter(self._items)

    def add(self, item: T) -> None:
        """Add an item."""
        self._items.append(item)

    def pop(self) -> T:
        """Remove and return a random item; the buffer must not be empty."""
        index = self._rng.randrange(len(self._items))
        self._items[index], self._items[-1] = self._items[-1], self._items[index]
        return self._items.pop()

    def __len__(self) -> int:
        return len(self._items)

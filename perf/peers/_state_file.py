"""Saves and loads of a state as one object. Imports no peer."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from perf._meter import steady
from perf.states import num_bytes_of, state_of, touch
from perf.work import state_key

if TYPE_CHECKING:
    from collections.abc import Callable

    import torch

    from perf.work import Work

__all__ = ["load", "save"]


async def save(write: Callable[[str, dict[str, torch.Tensor]], Any], work: Work) -> int:
    """Write a state under a key, and return the bytes of its tensors."""

    async def move(work: Work) -> int:
        state = state_of(work.dtype, work.size_bytes)
        write(f"put/{state_key(work.dtype, work.size_bytes)}", state)
        return num_bytes_of(state)

    return await steady(move, work)


async def load(read: Callable[[str], dict[str, torch.Tensor]], work: Work) -> int:
    """Read a state and each of its memory pages, and return the bytes of its tensors."""

    async def move(work: Work) -> int:
        return touch(read(state_key(work.dtype, work.size_bytes)))

    return await steady(move, work)

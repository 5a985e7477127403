"""Stager: copies states into arenas, memory that is used again.

    tensors -> one copy each -> arena: the bytes of the data object as it will be stored
    values  -> pickled at once -> bytes that follow those of the arena

The bytes between the tensors in the object are written once for a plan, so that a later save only
copies. Warm memory takes 17 GB/s on two cores of a cloud machine, and fresh memory 2.4.
"""

from __future__ import annotations

import io
import mmap
import os
import pickle
import tempfile
import warnings
from contextlib import suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

import torch

from aioflux.checkpoint._format.commit import StoredItem
from aioflux.checkpoint._save.items import (
    encode_object,
    encode_subclass,
    encode_tensor,
    find_ties,
    has_plain_memory,
)
from aioflux.checkpoint._save.job import StagedState
from aioflux.checkpoint._save.memory_copy import MemoryCopy, address_of, copy_all
from aioflux.checkpoint._save.packing import ALIGNMENT_BYTES

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    from aioflux.checkpoint._save.state_spec import RankSavePlan

__all__ = ["Arena", "ArenaLayout", "Stager"]

_PAGE_BYTES: Final = 2 * 1024 * 1024
"""Arenas are whole huge pages long."""

_PLAIN_TYPES: Final = (int, float, str, bytes, bool, complex, type(None))


@dataclass(frozen=True, slots=True)
class _TensorSlot:
    """The place of one tensor's bytes in an arena."""

    start: int
    size: int
    dtype: torch.dtype
    shape: torch.Size


@dataclass(frozen=True, slots=True)
class ArenaLayout:
    """The layout of a plan's data object."""

    number: int
    """Number of the plan."""
    size: int
    """Bytes in the arena."""
    slots: tuple[_TensorSlot | None, ...]
    """Of each tensor, in the order of the plan; None if it is pickled like a value, or tied."""
    stored: tuple[StoredItem | None, ...]
    """The same, as the commit lists it."""
    around: tuple[tuple[int, bytes], ...]
    """The bytes before and after tensors, each with its offset."""
    ties: Mapping[int, int]
    """Tensors that are stored as an earlier one, by `find_ties`."""


def _plan_layout(
    number: int, tensors: Sequence[torch.Tensor], ties: Mapping[int, int]
) -> ArenaLayout:
    at = 0
    slots: list[_TensorSlot | None] = []
    stored: list[StoredItem | None] = []
    around: list[tuple[int, bytes]] = []
    for at_plan, tensor in enumerate(tensors):
        if at_plan in ties or not has_plain_memory(tensor):
            slots.append(None)
            stored.append(stored[ties[at_plan]] if at_plan in ties else None)
            continue
        # Only its dtype and shape matter: memory that is never written takes no pages.
        item = encode_tensor(torch.empty(tensor.shape, dtype=tensor.dtype))
        start = at + item.data_start
        slots.append(_TensorSlot(start, item.data_size, tensor.dtype, tensor.shape))
        stored.append(StoredItem(at, item.length, start, item.data_size))
        # The next item begins so that its tensor is aligned, too.
        padding = bytes(-item.length % ALIGNMENT_BYTES)
        around.append((at, bytes(item.segments[0])))
        around.append((start + item.data_size, bytes(item.segments[-1]) + padding))
        at += item.length + len(padding)
    return ArenaLayout(number, at, tuple(slots), tuple(stored), tuple(around), ties)


class Arena:
    """One block of memory that states are copied into.

    Attributes:
        number: Its number in this process.
        size: Its length in bytes.
        fd: Descriptor of shared memory; -1 if it is private.
    """

    def __init__(self, number: int, size: int, *, is_shared: bool) -> None:
        self.number = number
        self.size = size
        self.fd = _shared_memory(size) if is_shared else -1
        self._map = mmap.mmap(self.fd, size) if is_shared else mmap.mmap(-1, size, _PRIVATE)
        # Huge pages if the system has them; a forked worker neither needs nor copies this.
        for advice in ("MADV_HUGEPAGE", "MADV_DONTFORK"):
            with suppress(OSError):  # a kernel without one of them
                self._map.madvise(getattr(mmap, advice))
        self.view = memoryview(self._map)
        self._bytes = torch.frombuffer(self._map, dtype=torch.uint8)
        self._layout: ArenaLayout | None = None
        self._views: list[torch.Tensor | None] = []
        self._is_pinned = False

    def lay_out(self, layout: ArenaLayout) -> None:
        """Prepare for states of one plan; nothing to do if the last state had the same."""
        if self._layout is layout:
            return
        self._layout = None
        for offset, data in layout.around:
            self.view[offset : offset + len(data)] = data
        self._views = [
            None
            if slot is None
            else self._bytes[slot.start : slot.start + slot.size].view(slot.dtype).view(slot.shape)
            for slot in layout.slots
        ]
        self._layout = layout

    def fill(self, tensors: Sequence[torch.Tensor]) -> None:
        """Copy tensors to their slots; done when this returns."""
        devices = set()
        copies: list[MemoryCopy] = []
        with torch.no_grad():
            for view, tensor in zip(self._views, tensors, strict=True):
                if view is None:
                    continue
                if tensor.is_cuda:
                    devices.add(tensor.device)
                    self._pin()
                    view.copy_(tensor, non_blocking=True)
                elif source := address_of(tensor):
                    copies.append(MemoryCopy(view.data_ptr(), source, view.nbytes))
                else:
                    view.copy_(tensor)
        copy_all(copies)
        for device in devices:
            torch.cuda.current_stream(device).synchronize()

    def _pin(self) -> None:
        """Pin the memory, so that the device copies without the processor."""
        if not self._is_pinned:
            self._is_pinned = True
            # If the system allows no more pinned memory, copies go through the driver's buffers.
            with suppress(RuntimeError):
                torch.cuda.check_error(
                    _cuda().cudaHostRegister(self._bytes.data_ptr(), self.size, 0)
                )

    def close_descriptor(self) -> None:
        """Close the descriptor, once another process has it: the memory stays mapped."""
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1

    def close(self) -> None:
        """Release the memory, once no view of it is left."""
        if self._is_pinned:
            _cuda().cudaHostUnregister(self._bytes.data_ptr())
        self._views, self._layout = [], None
        self.close_descriptor()
        self.view.release()
        del self._bytes  # the map is closed with the last tensor that uses it


def _cuda() -> Any:
    return torch.cuda.cudart()  # type: ignore[no-untyped-call]


_PRIVATE: Final = getattr(mmap, "MAP_PRIVATE", 0) | getattr(mmap, "MAP_ANONYMOUS", 0)


def _shared_memory(size: int) -> int:
    """Return a descriptor of memory that another process can map."""
    if hasattr(os, "memfd_create"):
        fd = os.memfd_create("aioflux-staging", os.MFD_CLOEXEC)
    else:
        with tempfile.TemporaryFile() as file:
            fd = os.dup(file.fileno())
    os.ftruncate(fd, size)
    return fd


@dataclass(slots=True)
class Stager:
    """Copies states into the arenas of one process, within a limit on their bytes."""

    max_staged_bytes: int
    """Most bytes that are staged at once; one state alone may be larger."""
    is_shared: bool = False
    """Whether another process reads the arenas."""
    on_drop: Callable[[Arena], None] = lambda _: None
    """Called with an arena before it is closed."""
    _free: list[Arena] = field(default_factory=list)
    _used: dict[int, Arena] = field(default_factory=dict)
    _num_arenas: int = 0
    _layout: ArenaLayout | None = None
    _pickled: dict[int, tuple[bytes, bytes]] = field(default_factory=dict)
    _is_new_plan: bool = True

    @property
    def used_bytes(self) -> int:
        """Bytes of all arenas that hold a state."""
        return sum(arena.size for arena in self._used.values())

    def lay_out(self, plan: RankSavePlan) -> ArenaLayout:
        """Return the layout of a plan; that of the last plan is kept."""
        known, ties = self._layout, find_ties(plan.tensors)
        if known is None or (known.number, known.ties) != (plan.number, ties):
            known = self._layout = _plan_layout(plan.number, plan.tensors, ties)
            self._pickled.clear()
            self._is_new_plan = True
        return known

    def has_memory_for(self, layout: ArenaLayout, pickled_bytes: int = 0) -> bool:
        """Return whether a state fits now; otherwise one that is staged must be uploaded first."""
        held = self.used_bytes + pickled_bytes
        return not held or held + layout.size <= self.max_staged_bytes

    def stage(self, plan: RankSavePlan, layout: ArenaLayout) -> tuple[StagedState, Arena | None]:
        """Copy a state, and return it with the arena that holds its tensors, if there are any.

        Raises:
            ValueError: A tensor has no data, as those on the meta device.
        """
        for planned, tensor in zip(plan.items, plan.tensors, strict=False):
            if tensor.is_meta:
                raise ValueError(
                    f"{planned.index.fqn!r} is on the meta device: there is nothing to save yet"
                )
        arena = self._acquire(layout) if layout.size else None
        try:
            if arena is not None:
                arena.fill(plan.tensors)
            return self._with_tail(plan, layout, arena), arena
        except BaseException:
            if arena is not None:
                self.free(arena)
            raise

    def free(self, arena: Arena) -> None:
        """Mark an arena as free: its state is uploaded, or is not needed any more."""
        if self._used.pop(arena.number, None) is None:
            return
        self._free.append(arena)
        kept = self.used_bytes
        for each in sorted(self._free, key=lambda each: -each.number):
            kept += each.size
            if kept > self.max_staged_bytes and each is not arena:
                self._drop(each)

    def reclaim(self, held: Iterable[Arena | None]) -> None:
        """Free every arena but those that are held."""
        numbers = {arena.number for arena in held if arena is not None}
        for arena in [each for number, each in self._used.items() if number not in numbers]:
            self.free(arena)

    def close(self) -> None:
        """Close all free arenas."""
        for arena in list(self._free):
            self._drop(arena)

    def _acquire(self, layout: ArenaLayout) -> Arena:
        fitting = [arena for arena in self._free if arena.size >= layout.size]
        if fitting:
            arena = min(fitting, key=lambda each: each.size)
            self._free.remove(arena)
        else:
            for each in list(self._free):
                self._drop(each)
            self._num_arenas += 1
            size = -(-layout.size // _PAGE_BYTES) * _PAGE_BYTES
            arena = Arena(self._num_arenas, size, is_shared=self.is_shared)
        self._used[arena.number] = arena
        arena.lay_out(layout)
        return arena

    def _drop(self, arena: Arena) -> None:
        self._free.remove(arena)
        self.on_drop(arena)
        arena.close()

    def _with_tail(
        self, plan: RankSavePlan, layout: ArenaLayout, arena: Arena | None
    ) -> StagedState:
        """Add the pickled values to a state whose tensors are copied."""
        at = layout.size
        tail: list[bytes] = []
        items: list[StoredItem] = []
        values = iter(plan.values)
        for number, planned in enumerate(plan.items):
            stored = layout.stored[number] if planned.is_tensor else None
            if stored is None:
                if planned.is_tensor:
                    data = encode_subclass(planned.index.fqn, plan.tensors[number].detach().cpu())
                else:
                    data = self._encode(number, planned.index.fqn, next(values))
                stored = StoredItem(at, len(data))
                tail.append(data)
                at += len(data)
            items.append(stored)
        self._is_new_plan = False
        sizes = [tensor.itemsize for tensor in plan.tensors] + [0] * len(plan.values)
        number = arena.number if arena is not None else 0
        return StagedState(number, layout.size, tuple(tail), tuple(items), tuple(sizes))

    def _encode(self, number: int, name: str, value: Any) -> bytes:
        """Return what torch.save writes of a value; the same bytes for one that is unchanged."""
        if not _is_plain(value):
            data = encode_object(value)
            if self._is_new_plan:
                _warn_of_refusal(name, data)
            return data
        pickled = pickle.dumps(value)
        known = self._pickled.get(number)
        if known is None or known[0] != pickled:
            known = self._pickled[number] = pickled, encode_object(value)
        return known[1]


def _warn_of_refusal(name: str, data: bytes) -> None:
    """Warn at the save if a load will reject a value: at the load it is too late."""
    try:
        refused = torch.serialization.get_unsafe_globals_in_checkpoint(io.BytesIO(data))
    except pickle.UnpicklingError:  # such as a whole number of over 2,000 bits
        refused = ["what is pickled in an unusual way"]
    if refused:
        warnings.warn(
            f"the state's {name!r} holds {', '.join(sorted(refused))}, which a load with "
            "weights_only=True rejects: save a number, text or tensor instead, or allow it to "
            "loads by torch.serialization.add_safe_globals or weights_only=False",
            UserWarning,
            stacklevel=2,
        )


def _is_plain(value: Any) -> bool:
    """Return whether a value is made of numbers and strings only, which its pickle identifies."""
    if type(value) in _PLAIN_TYPES:
        return True
    if type(value) in {list, tuple}:
        return all(map(_is_plain, value))
    return (
        type(value) is dict and all(map(_is_plain, value)) and all(map(_is_plain, value.values()))
    )

"""Memory of a state's tensors: torch.save without a copy of it, and copies by a few threads.

    torch.save -> a file that uploads the memory (`torch_file`)
               -> StatePickle: copies headers, keeps views of the tensors' memory -> total size
                  -> one copy of all pieces into an arena; or an upload of the pieces

torch.save first pickles the state, and then writes the memory of each storage to the file. The
pickler records the storages in a `TensorMemory`, so that they stay alive until the upload is
complete. Any other memory that torch.save writes may be freed when the write returns, and must be
copied: a pickle, or torch's copy of the memory of another device.

torch starts threads for each tensor and waits for the slowest of them. On two busy cores torch took
500 to 2,600 ms to copy 148 tensors of 2 MB; `copy_all`, which starts threads once for all tensors,
took 70 to 100 ms.
"""

from __future__ import annotations

import ctypes
import pickle
from bisect import bisect_right, insort
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from contextvars import ContextVar, copy_context
from types import SimpleNamespace
from typing import IO, TYPE_CHECKING, Any, Final, NamedTuple

import torch

from aioflux._files import RawBinaryFile
from aioflux._values.checksums import address_of
from aioflux.checkpoint._format.nesting import naming_unpicklable

if TYPE_CHECKING:
    from _typeshed import ReadableBuffer

_MAX_THREADS: Final = 4
"""More threads do not copy faster, because memory bandwidth is the limit."""

_PIECE_BYTES: Final = 8 * 1024 * 1024
"""Bytes that a thread copies at a time. Threads finish at most one piece apart."""

_SMALL_BYTES: Final = 64 * 1024
"""Smaller tensors are copied by the caller's thread: passing a tensor to a thread takes longer."""

_MAX_CALLER_BYTES: Final = 4 * 1024 * 1024
"""If the larger tensors have at most this total size, the caller's thread copies them, too."""

# Faster for small copies than ctypes.memmove, because this function keeps the GIL.
_move_small = ctypes.PYFUNCTYPE(ctypes.c_void_p, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t)(
    ctypes.cast(ctypes.memmove, ctypes.c_void_p).value or 0
)

_MIN_VIEW_BYTES = 16 * 1024
"""Smaller pieces are copied: keeping a view costs as much as copying about 16 KiB."""


class TensorMemory:
    """Views of the storages of one state in main memory."""

    def __init__(self) -> None:
        self._starts: list[int] = []
        self._views: dict[int, memoryview] = {}

    @property
    def num_bytes(self) -> int:
        """Size of the recorded storages in bytes."""
        return sum(view.nbytes for view in self._views.values())

    def pickle_module(self) -> Any:
        """Return a `pickle_module` for torch.save whose pickler records each storage."""
        record = self._record

        class RecordingPickler(pickle.Pickler):
            """Base of the pickler of torch.save, which gives each storage a persistent id."""

            def __init_subclass__(cls) -> None:
                torch_persistent_id = cls.persistent_id

                def persistent_id(self: Any, obj: Any) -> Any:
                    storage_id = torch_persistent_id(self, obj)
                    if storage_id is not None:
                        record(obj)
                    return storage_id

                cls.persistent_id = persistent_id  # type: ignore[method-assign]

        return SimpleNamespace(__name__="pickle", Pickler=RecordingPickler)

    def find(self, view: memoryview) -> memoryview | None:
        """Return a view of the same memory that keeps its storage alive; None if not recorded."""
        with address_of(view) as address:
            index = bisect_right(self._starts, address) - 1
            if index < 0:
                return None
            start = self._starts[index]
            storage = self._views[start]
            if address + view.nbytes > start + storage.nbytes:
                return None
            return storage[address - start :][: view.nbytes]

    def _record(self, obj: Any) -> None:
        storage = getattr(obj, "_untyped_storage", obj)
        if type(storage) is not torch.UntypedStorage or storage.device.type != "cpu":
            return
        num_bytes, start = storage.nbytes(), storage.data_ptr()
        recorded = self._views.get(start)
        if not start or num_bytes <= (recorded.nbytes if recorded else 0):
            return
        whole = torch.empty(0, dtype=torch.uint8, device="cpu").set_(storage)
        self._views[start] = whole.numpy().data
        if recorded is None:
            insort(self._starts, start)


def save_by_torch(
    state: object, file: IO[bytes], memory: TensorMemory | None = None, *, has_crc32: bool = False
) -> None:
    """Write a state to a file with torch.save.

    Args:
        state: The state.
        file: The file.
        memory: Records the storages of the state.
        has_crc32: Whether the zip entries have their crc32. They always have it in a version of
            torch that can only disable it for all threads.
    """
    from torch.utils.serialization import config

    def run() -> None:
        entry = getattr(config, "_config", {}).get("save.compute_crc32")
        if not has_crc32 and isinstance(getattr(entry, "user_override", None), ContextVar):
            config.save.compute_crc32 = False
        torch.save(state, file, pickle_module=memory.pickle_module() if memory else pickle)

    with naming_unpicklable(state):
        copy_context().run(run)  # the setting of torch changes in this context only


class MemoryCopy(NamedTuple):
    """One copy of contiguous memory."""

    target: int
    """Address to write to."""
    source: int
    """Address to read from."""
    size: int
    """Size in bytes."""


def tensor_address(tensor: torch.Tensor) -> int:
    """Return the address of a tensor's elements, or 0 if they are not contiguous in memory."""
    if tensor.is_cpu and tensor.is_contiguous() and not (tensor.is_conj() or tensor.is_neg()):
        return tensor.data_ptr()
    return 0


def copy_all(copies: Sequence[MemoryCopy]) -> None:
    """Run all copies, and return when they are complete. The caller must keep the memory alive."""
    large: list[MemoryCopy] = []
    for copy in copies:
        if copy.size < _SMALL_BYTES:
            _move_small(*copy)
        else:
            large.append(copy)
    num_bytes = sum(copy.size for copy in large)
    num_threads = min(torch.get_num_threads(), _MAX_THREADS, -(-num_bytes // _PIECE_BYTES))
    if num_threads <= 1 or num_bytes <= _MAX_CALLER_BYTES:
        for copy in large:
            ctypes.memmove(*copy)
        return
    pieces = _cut(large)
    # Starting the threads for each save takes 0.1 ms. Threads that live longer would be missing in
    # a forked child.
    with ThreadPoolExecutor(num_threads - 1, thread_name_prefix="aioflux-staging") as executor:
        futures = [executor.submit(_copy_pieces, pieces) for _ in range(num_threads - 1)]
        _copy_pieces(pieces)
        for future in futures:
            future.result()


def _cut(copies: Sequence[MemoryCopy]) -> list[MemoryCopy]:
    """Cut copies into pieces, in reverse order, because `pop` removes from the end."""
    pieces = [
        MemoryCopy(target + offset, source + offset, min(_PIECE_BYTES, size - offset))
        for target, source, size in copies
        for offset in range(0, size, _PIECE_BYTES)
    ]
    pieces.reverse()
    return pieces


def _copy_pieces(pieces: list[MemoryCopy]) -> None:
    # `list.pop` is atomic, so that two threads never copy the same piece.
    with suppress(IndexError):  # another thread has taken the last piece
        while pieces:
            ctypes.memmove(*pieces.pop())


class StatePickle(RawBinaryFile):
    """A file for torch.save that keeps views of the tensors' memory, to copy or upload later."""

    def __init__(self, memory: TensorMemory) -> None:
        self._memory = memory
        self._pieces: list[memoryview] = []
        self._small = bytearray()
        self.num_bytes = 0

    def writable(self) -> bool:
        return True

    def write(self, data: ReadableBuffer, /) -> int:
        """Keep a view of the data if it is memory of a tensor and not small; otherwise copy it."""
        view = memoryview(data).cast("B")
        tensor_view = self._memory.find(view) if view.nbytes >= _MIN_VIEW_BYTES else None
        if tensor_view is None:
            self._small += view
        else:
            self._flush_small()
            self._pieces.append(tensor_view)
        self.num_bytes += view.nbytes
        return view.nbytes

    def copy_to(self, target: memoryview) -> None:
        """Copy all pieces to memory, which has at least `num_bytes` bytes."""
        self._flush_small()
        copies, offset = [], 0
        with address_of(target) as start:
            for piece in self._pieces:
                with address_of(piece) as source:
                    copies.append(MemoryCopy(start + offset, source, piece.nbytes))
                offset += piece.nbytes
            copy_all(copies)

    def views(self) -> list[memoryview]:
        """Return all pieces in order, without a copy."""
        self._flush_small()
        return self._pieces

    def _flush_small(self) -> None:
        if self._small:
            self._pieces.append(memoryview(bytes(self._small)))
            self._small.clear()


def pickle_state(value: Any) -> StatePickle:
    """Return the output of torch.save for a value.

    The tensors of the value must not change as long as the result is in use.
    """
    memory = TensorMemory()
    pickled = StatePickle(memory)
    save_by_torch(value, pickled, memory)
    return pickled

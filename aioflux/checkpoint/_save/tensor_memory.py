"""TensorMemory: the storages of a state in main memory, which can be uploaded without a copy.

torch.save first pickles the state, and then writes the memory of each storage to the file. The
pickler records the storages here, so that they stay alive until the upload is complete. Any other
memory that torch.save writes may be freed when the write returns, and must be copied: a pickle, or
torch's copy of GPU memory.
"""

from __future__ import annotations

import pickle
from bisect import bisect_right, insort
from types import SimpleNamespace
from typing import Any

import torch

from aioflux._values.checksums import address_of


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

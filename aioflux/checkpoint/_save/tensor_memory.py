"""TensorMemory: the storages of a state, as the pickler of torch.save finds them.

torch.save pickles first and then writes the memory of each storage to the file. Storages that the
pickler has found in main memory are kept alive here until the upload has ended, and need no copy.
Other bytes that are written may be gone when the write returns: a copy that torch made of memory of
a GPU, a pickle.
"""

from __future__ import annotations

import pickle
from bisect import bisect_right, insort
from types import SimpleNamespace
from typing import Any

import torch

from aioflux._values.checksums import address_of

__all__ = ["TensorMemory"]


class TensorMemory:
    """The memory of storages in main memory, which a state keeps while it is saved."""

    def __init__(self) -> None:
        self._starts: list[int] = []
        self._views: dict[int, memoryview] = {}

    @property
    def num_bytes(self) -> int:
        """Bytes of the storages that were found."""
        return sum(view.nbytes for view in self._views.values())

    def pickle_module(self) -> Any:
        """Return a `pickle_module` for torch.save that notes each storage."""
        note = self._note

        class NotingPickler(pickle.Pickler):
            """Notes the objects that the `persistent_id` of torch.save's subclass names."""

            def __init_subclass__(cls) -> None:
                identify = cls.persistent_id

                def persistent_id(self: Any, obj: Any) -> Any:
                    found = identify(self, obj)
                    if found is not None:
                        note(obj)
                    return found

                cls.persistent_id = persistent_id  # type: ignore[method-assign]

        return SimpleNamespace(__name__="pickle", Pickler=NotingPickler)

    def find(self, view: memoryview) -> memoryview | None:
        """Return the same memory as a view that keeps it alive; None if it is unknown."""
        with address_of(view) as begin:
            at = bisect_right(self._starts, begin) - 1
            if at < 0:
                return None
            start = self._starts[at]
            known = self._views[start]
            if begin + view.nbytes > start + known.nbytes:
                return None
            return known[begin - start :][: view.nbytes]

    def _note(self, obj: Any) -> None:
        storage = getattr(obj, "_untyped_storage", obj)
        if type(storage) is not torch.UntypedStorage or storage.device.type != "cpu":
            return
        num_bytes, start = storage.nbytes(), storage.data_ptr()
        known = self._views.get(start)
        if not start or num_bytes <= (known.nbytes if known else 0):
            return
        whole = torch.empty(0, dtype=torch.uint8, device="cpu").set_(storage)
        self._views[start] = whole.numpy().data
        if known is None:
            insort(self._starts, start)

"""The memory of the tensors of a state, as the pickler of torch.save meets them.

torch.save pickles first and writes then, and hands the memory of each storage to the file. What the
pickler has met and lies in main memory is held here, so that it outlives the upload: it need not
be copied. Anything else that is written may be gone when the write returns: a copy that torch made
of memory of a GPU, a pickle.
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
    """What is known to stay as it is while a state is saved."""

    def __init__(self) -> None:
        self._starts: list[int] = []
        self._views: dict[int, memoryview] = {}

    @property
    def num_bytes(self) -> int:
        """Bytes of the storages that were met."""
        return sum(view.nbytes for view in self._views.values())

    def pickle_module(self) -> Any:
        """Return what torch.save takes for its `pickle_module`: it notes each storage."""
        note = self._note

        class Pickler(pickle.Pickler):
            """Notes what the `persistent_id` of torch.save's own subclass is asked about."""

            def __init_subclass__(cls) -> None:
                identify = cls.persistent_id

                def persistent_id(self: Any, obj: Any) -> Any:
                    found = identify(self, obj)
                    if found is not None:
                        note(obj)
                    return found

                cls.persistent_id = persistent_id  # type: ignore[method-assign]

        return SimpleNamespace(__name__="pickle", Pickler=Pickler)

    def find(self, view: memoryview) -> memoryview | None:
        """Return the same memory as a view that keeps it alive, None where it is not known."""
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

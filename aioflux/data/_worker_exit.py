"""The end of a process whose DataLoader has workers: they get the time to delete their composites.

Where Ctrl-C, or what a worker has raised, leaves `next` of a DataLoader and then the script, the
traceback keeps the iterator alive, and its workers with it. multiprocessing ends them by SIGTERM,
which torch answers by `_exit`: nothing in a worker hears of it. So they are ended here before that,
in the way in which torch ends them where an iteration is over.
"""

from __future__ import annotations

import atexit
import gc
import multiprocessing
import os

# Imported for its hook: what is registered after it runs before it, and after it torch takes it
# that the processes are gone.
import torch.utils.data  # noqa: F401

from aioflux.data._store_objects import Access

__all__: list[str] = []


def _end_workers() -> None:
    """End the workers of each DataLoader, where a dataset of this process composes.

    A worker that is in the middle of a batch has the 5 seconds for it that torch gives.
    """
    if not multiprocessing.active_children():
        return
    objects = gc.get_objects()
    if not any(type(each) is Access and each.compose != "off" for each in objects):
        return
    for each in objects:
        # By its type: to ask the object itself may run code of anybody.
        end = getattr(type(each), "_shutdown_workers", None)
        if end is not None and _has_workers(each):
            end(each)


def _has_workers(batches: object) -> bool:
    """Tell whether an iterator has workers, and they are not those of a parent."""
    workers = getattr(batches, "_workers", ())
    return any(getattr(each, "_parent_pid", None) == os.getpid() for each in workers)


atexit.register(_end_workers)

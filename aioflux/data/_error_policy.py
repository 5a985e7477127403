"""ErrorPolicy: the option `on_error` of the datasets."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Literal, TypeAlias

from torch.utils.data import get_worker_info

from aioflux.errors import StorageError

if TYPE_CHECKING:
    from aioflux.data._counters import LoadCounters

OnError: TypeAlias = Literal["raise", "skip"] | Callable[[Exception, str], None]
"""`"raise"` raises the error. `"skip"` logs a warning and skips the sample. A function is called
with the error and the uri: if the function returns, the sample is skipped; it may also raise. A
MemoryError is always raised. `LoadStats.num_skipped` counts skipped samples."""

_log = logging.getLogger("aioflux")


@contextmanager
def worker_errors() -> Iterator[None]:
    """Preserve uri and status of a StorageError that a DataLoader worker sends to its parent."""
    try:
        yield
    except StorageError as exc:
        if get_worker_info() is not None:
            exc.carry_fields()
        raise


class ErrorPolicy:
    """Policy for the error of a sample: raise it, or skip and count the sample (`on_error`)."""

    def __init__(self, on_error: OnError, counters: LoadCounters) -> None:
        if not (callable(on_error) or on_error in {"raise", "skip"}):
            raise ValueError(
                f'on_error must be "raise", "skip" or a function of the error and the uri, not '
                f"{on_error!r}"
            )
        self._on_error = on_error
        self._counters = counters

    def handle(self, error: Exception, uri: str) -> None:
        """Raise `error`, or count the sample of `uri` as skipped."""
        if isinstance(error, MemoryError) or self._on_error == "raise":
            raise error
        if callable(self._on_error):
            self._on_error(error, uri)
        else:
            _log.warning("skipped %s: %s: %s", uri, type(error).__name__, error)
        self._counters.count_skipped()

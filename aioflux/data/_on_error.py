"""What becomes of a sample that cannot be read or transformed: never lost in silence."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import TYPE_CHECKING, Literal, TypeAlias

if TYPE_CHECKING:
    from aioflux.data._counters import Meter

__all__ = ["Failures", "OnError"]

OnError: TypeAlias = Literal["raise", "skip"] | Callable[[Exception, str], None]
"""`"raise"`; `"skip"`, which logs a warning and counts; or a function that is given the error and
the uri: where it returns, the sample is skipped and counted, where it raises, that is raised."""

_log = logging.getLogger("aioflux")


class Failures:
    """Decides on failures, and counts what was skipped.

    Attributes:
        last: What was skipped last, or None.
    """

    def __init__(self, on_error: OnError, meter: Meter) -> None:
        if not (callable(on_error) or on_error in {"raise", "skip"}):
            raise ValueError(
                f'on_error must be "raise", "skip" or a function of the error and the uri, not '
                f"{on_error!r}"
            )
        self._on_error = on_error
        self._meter = meter
        self.last: Exception | None = None

    @property
    def may_skip(self) -> bool:
        """Tell whether there are failures that do not end the iteration."""
        return self._on_error != "raise"

    def skip(self, error: Exception, uri: str) -> None:
        """Skip and count a sample, or raise."""
        if isinstance(error, MemoryError) or self._on_error == "raise":
            raise error
        if callable(self._on_error):
            self._on_error(error, uri)
        else:
            _log.warning("skipped %s: %s: %s", uri, type(error).__name__, error)
        self._meter.count_skipped()
        self.last = error

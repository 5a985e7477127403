"""Long timeouts for clean-up, because a busy machine may stall for longer than the defaults.

aioflux stops waiting for its clean-up after some seconds. Tests of the clean-up need all of it, so
they use limits that are longer than the timeout of any test.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from aioflux import Timeouts
from aioflux.options import CleanupTimeouts

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["FAR_SECONDS", "PATIENT", "PATIENT_CLEANUP", "be_patient"]

FAR_SECONDS = 600.0
"""Longer than the timeout of any test."""

PATIENT_CLEANUP = CleanupTimeouts(
    total_seconds=FAR_SECONDS,
    abort_wait_seconds=FAR_SECONDS,
    composite_wait_seconds=FAR_SECONDS,
    interrupted_seconds=FAR_SECONDS,
    close_seconds=FAR_SECONDS,
)

PATIENT = Timeouts(cleanup=PATIENT_CLEANUP)
"""Timeouts of a store with a long limit for clean-up."""


def be_patient(setitem: Callable[[Any, str, Any], object] = dict.__setitem__) -> None:
    """Make `PATIENT_CLEANUP` the default of `Timeouts`, for stores that a test does not open.

    Args:
        setitem: Sets the default; tests pass `monkeypatch.setitem`.
    """
    setitem(Timeouts.__init__.__kwdefaults__, "cleanup", PATIENT_CLEANUP)

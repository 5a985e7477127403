"""Timeouts out of reach: a busy machine may stop for longer than the defaults.

aioflux waits some seconds for its own clean-up while a user waits for it, and then goes on without.
What tests say of the clean-up holds if it may take its time; a call that waits for such a limit
shows it by taking longer than a test waits.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from aioflux import Timeouts
from aioflux.options import CleanupTimeouts

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["FAR_SECONDS", "PATIENT", "PATIENT_CLEANUP", "be_patient"]

FAR_SECONDS = 600.0
"""Longer than any test waits."""

PATIENT_CLEANUP = CleanupTimeouts(
    total_seconds=FAR_SECONDS,
    abort_wait_seconds=FAR_SECONDS,
    composite_wait_seconds=FAR_SECONDS,
    interrupted_seconds=FAR_SECONDS,
    close_seconds=FAR_SECONDS,
)

PATIENT = Timeouts(cleanup=PATIENT_CLEANUP)
"""Timeouts of a store whose clean-up may take its time."""


def be_patient(setitem: Callable[[Any, str, Any], object] = dict.__setitem__) -> None:
    """Make that the default of `Timeouts` in this process, for stores that a test cannot reach.

    A test passes `monkeypatch.setitem`.
    """
    setitem(Timeouts.__init__.__kwdefaults__, "cleanup", PATIENT_CLEANUP)

"""Limits of aioflux's own patience, out of reach: a busy machine may stop for longer than those.

Aioflux waits some seconds for its own clean-up where a user waits for it, and then goes on without.
What tests say of the clean-up holds where it may take its time; a call that waits for such a limit
is told by taking longer than a test waits.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["FAR_SECONDS", "be_patient"]

FAR_SECONDS = 600.0
"""Longer than any test waits."""


def be_patient(put: Callable[[Any, str, Any], object] = setattr) -> None:
    """Set these limits, in this process; a test passes `monkeypatch.setattr`."""
    import aioflux._bridge
    from aioflux._concurrency import shielded as _shielded
    from aioflux._transfer import composed_read as _composed_read
    from aioflux._transfer import publish as _publish
    from aioflux._transfer import sessions
    from aioflux._transfer import writer as _writer

    close_current = sessions.Sessions.close_current

    async def close(self: sessions.Sessions, *, seconds: float = 0.0) -> None:
        await close_current(self, seconds=FAR_SECONDS)

    put(sessions.Sessions, "close_current", close)
    for module, names in (
        (aioflux._bridge, ("_CLEANUP_SECONDS", "_EXIT_SECONDS")),
        (_composed_read, ("_LEAVE_SECONDS", "_REMOVE_SECONDS")),
        (_shielded, ("_LAST_SECONDS",)),
        (_publish, ("_REMOVE_SECONDS",)),
        (_writer, ("_ABORT_SECONDS", "_LEAVE_SECONDS")),
    ):
        for name in names:
            assert hasattr(module, name)
            put(module, name, FAR_SECONDS)

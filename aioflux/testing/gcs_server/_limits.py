"""What one request may cost the server, so that no client exhausts its memory by accident."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True, slots=True)
class Limits:
    """Bounds on a single request."""

    max_head_bytes: int = 64 << 10
    """Request line and headers; more is answered with 431."""
    max_body_bytes: int = (5 << 30) + (1 << 20)
    """Body; more is answered with 413 before it is read. By default a part of 5 GiB, the largest
    that GCS takes, and what a multipart/related upload has around it."""
    stalled_seconds: float = 60.0
    """A request of which only a part came is answered with 408 when nothing more has come for
    three quarters of this time to the whole of it."""

    def __post_init__(self) -> None:
        """Refuse limits under which no request would pass."""
        for name in ("max_head_bytes", "max_body_bytes", "stalled_seconds"):
            if getattr(self, name) <= 0:
                raise ValueError(f"{name} must be above 0, is {getattr(self, name)}")

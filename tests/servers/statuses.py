"""Statuses that a service returns although it may have carried out the write."""

from __future__ import annotations

__all__ = ["AMBIGUOUS", "THROTTLED"]

AMBIGUOUS = (408, 425, 429, 500, 502, 503, 504)
"""After any of them a request is repeated, and a write may have been done: a gateway also returns
them if the service behind it was only slow. The table in `docs/failures.md` has the same."""
THROTTLED = (429, 503)
"""Those of a busy service: a request for what was done would keep it busy."""

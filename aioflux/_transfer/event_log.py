"""Events of which there may be thousands, such as retries, as a few lines of a log."""

from __future__ import annotations

from math import inf
from typing import Final

INTERVAL_SECONDS: Final = 10.0
"""Shortest time between two lines of counts, in seconds."""


class EventLog:
    """Events of one store on one event loop: the first of each cause, then counts every 10 s.

    A cause is new again after an interval without it. There is no timer: the caller calls `pop`
    when a request ends after `due_at`, and when the store is closed.

    Args:
        verb: What happened to the requests, for the line: "10 of 2,000 requests {verb}".

    Attributes:
        due_at: Time of the next call of `pop`; infinity after an interval without events.
    """

    def __init__(self, verb: str) -> None:
        self.due_at = inf
        self._verb = verb
        self._counts: dict[str, int] = {}
        self._num_unlogged = 0
        self._num_requests_before = 0
        self._last = ""

    def add(self, cause: str, text: str, now: float, *, num_requests: int) -> bool:
        """Count an event; return whether it is the first of its cause, to be logged at once.

        Args:
            cause: Cause of the event, such as "HTTP 503".
            text: Description of the event, with its uri.
            now: Monotonic time in seconds.
            num_requests: Number of requests of the store that have ended so far, with this one.
        """
        if self.due_at == inf:
            self.due_at, self._num_requests_before = now + INTERVAL_SECONDS, num_requests - 1
        is_first = cause not in self._counts
        self._counts[cause] = self._counts.get(cause, 0) + 1
        self._num_unlogged += not is_first
        self._last = text
        return is_first

    def pop(self, now: float, *, num_requests: int) -> str:
        """Return the counts of the events, if they are due and not all events were logged.

        Args:
            now: As in `add`; infinity when the store is closed.
            num_requests: As in `add`.
        """
        if now < self.due_at:
            return ""
        counts, num_before = self._counts, self._num_requests_before
        is_logged, self._num_unlogged = not self._num_unlogged, 0
        causes = sorted((-count, cause) for cause, count in counts.items() if count)
        self._counts, self._num_requests_before = {cause: 0 for _, cause in causes}, num_requests
        self.due_at = now + INTERVAL_SECONDS if causes else inf
        if is_logged:
            return ""
        total = sum(counts.values())
        texts = ", ".join(f"{-count:,} x {cause}" for count, cause in causes)
        # An attempt may have ended before the last line, and its retry come after that.
        num_requests = max(total, num_requests - num_before)
        return f"{total:,} of {num_requests:,} requests {self._verb}: {texts}; last: {self._last}"

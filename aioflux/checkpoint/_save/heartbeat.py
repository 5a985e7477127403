"""Heartbeats: objects by which the ranks of a long save show that they are alive.

    every rank:  <save id>/rank-00001.beat, rewritten every `heartbeat_seconds`, not before the
                 first of these has passed: a short save writes none
    observers:   the listing of manifests, which they poll anyway, has the generations of beats

No clocks of machines are compared. A rank is gone when an observer, by its own monotonic clock, has
seen no new generation for 2.5 heartbeats: at 10 s, an observer that polls (at most 1 s apart)
notices 26 s after the last beat; the coordinator, while it uploads itself and polls every 5 s,
after 30 s; another rank that uploads and polls every 10 s, after 40 s. A beat that fails is
repeated after 0.3 heartbeats, so that the 25 s allow one failed beat and four repetitions.
Only time in which the observer could poll counts: a service that is unavailable, or an observer
that is suspended, does not make a rank seem dead. The ranks agree on a save by a collective and
write heartbeats from then on, so that slow staging or a queue of earlier saves is not taken for the
death of a rank. The cost is one request for each heartbeat and save under way, from the tenth
second on.
"""

from __future__ import annotations

import asyncio
import logging
from typing import TYPE_CHECKING, Final

from aioflux.errors import AiofluxError, StorageError, TransientError

if TYPE_CHECKING:
    from collections.abc import Collection, Hashable, Mapping

    from aioflux.store import Store

__all__ = ["Heartbeat", "HeartbeatMonitor", "heartbeat_key"]

_log = logging.getLogger("aioflux")

_PATIENCE: Final = 2.5
"""Heartbeats that are missed before a rank is gone."""
_REPETITION: Final = 0.3
"""Time to the repetition of a heartbeat that failed, in heartbeats."""
_MAX_CREDIT: Final = 1.0
"""Most heartbeats that one poll counts for: observers poll more often, unless suspended."""
_END_SECONDS: Final = 5.0
"""Time for the removal of what was written."""


def heartbeat_key(save_id: str, rank: int, number: int = 0) -> str:
    """Return the key of a rank's heartbeat, below the checkpoint's prefix.

    Args:
        save_id: The save.
        rank: The rank.
        number: Above 0 if the service does not let objects be overwritten.
    """
    return f"{save_id}/rank-{rank:05d}{f'.{number}' if number else ''}.beat"


class Heartbeat:
    """Writes the heartbeats of one rank in one save, on the running event loop, until its `end`.

    If objects cannot be overwritten (a retention policy, a role without delete), each heartbeat has
    another key.
    """

    def __init__(
        self,
        store: Store,
        prefix: str,
        save_id: str,
        rank: int,
        *,
        every_seconds: float,
        is_late: bool = False,
    ) -> None:
        """Start: now if `is_late`, because an earlier upload of the save died."""
        self._store = store
        self._prefix = prefix
        self._save_id = save_id
        self._rank = rank
        self._every_seconds = every_seconds
        self._keys: list[str] = []
        """Keys that may have been written."""
        self._number = 0
        self._is_over = asyncio.Event()
        self._task = asyncio.get_running_loop().create_task(self._run(is_late=is_late))

    def cancel(self) -> None:
        """Stop and remove nothing; `aioflux clean` finds what was written."""
        self._task.cancel()

    async def end(self) -> None:
        """Stop and remove what was written; what stays is logged."""
        self._is_over.set()
        _, running = await asyncio.wait((self._task,), timeout=_END_SECONDS / 5)
        if running:
            self._task.cancel()
            await asyncio.wait(running)
        if not self._keys:
            return
        try:
            async with asyncio.timeout(_END_SECONDS):
                errors = (await self._store.delete_many(self._keys)).errors
        except (AiofluxError, OSError) as exc:
            _log.warning("heartbeats stay, `aioflux clean` removes them: %r", exc)
        else:
            for error in errors.values():
                _log.warning("a heartbeat stays, `aioflux clean` removes it: %s", error)

    async def _run(self, *, is_late: bool) -> None:
        count = 0
        pause = 0.0 if is_late else self._every_seconds
        while not await self._is_over_within(pause):
            count += 1
            is_written = await self._beat(b"%d" % count)
            pause = self._every_seconds * (1.0 if is_written else _REPETITION)

    async def _is_over_within(self, seconds: float) -> bool:
        try:
            async with asyncio.timeout(seconds):
                await self._is_over.wait()
        except TimeoutError:
            return self._is_over.is_set()
        return True

    async def _beat(self, data: bytes) -> bool:
        """Write one heartbeat, and return whether it was."""
        key = self._prefix + heartbeat_key(self._save_id, self._rank, self._number)
        if key not in self._keys:
            self._keys.append(key)
        try:
            async with asyncio.timeout(self._every_seconds):
                await self._store.put(key, data)  # the data, too, differs: so does the ETag
        except (AiofluxError, OSError) as exc:
            _log.warning("%s%s: a heartbeat could not be written: %r", self._store.uri, key, exc)
            if isinstance(exc, StorageError) and not isinstance(exc, TransientError):
                self._number += 1
            return False
        return True


class HeartbeatMonitor:
    """Finds the ranks that have been silent for too long, for one observer. No I/O."""

    def __init__(self, every_seconds: float) -> None:
        self._patience_seconds = _PATIENCE * every_seconds
        self._max_credit_seconds = _MAX_CREDIT * every_seconds
        self._last = float("-inf")
        self._last_signs: dict[int, tuple[Hashable, float]] = {}

    def observe(
        self, signs: Mapping[int, Hashable], awaited: Collection[int], now: float
    ) -> dict[int, float]:
        """Note the result of a poll.

        Args:
            signs: A value of each rank that each heartbeat changes; ranks without objects may be
                missing.
            awaited: The ranks to watch.
            now: Time of the poll, by a monotonic clock, in seconds.

        Returns:
            The ranks that are gone, with the seconds of their silence.
        """
        credit = min(now - self._last, self._max_credit_seconds) if self._last_signs else 0.0
        self._last = now
        seen, self._last_signs = self._last_signs, {}
        for rank in awaited:
            sign = signs.get(rank)
            before, silent = seen.get(rank, (sign, -credit))
            self._last_signs[rank] = (sign, silent + credit if sign == before else 0.0)
        return {
            rank: silent
            for rank, (_, silent) in sorted(self._last_signs.items())
            if silent >= self._patience_seconds
        }

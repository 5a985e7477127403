"""Heartbeats: objects by which the ranks of a long save show that they are alive.

    each rank:   rewrites <save id>/rank-00001.beat every `heartbeat_seconds`; the first heartbeat
                 is written after one interval, so that a short save writes none
    observers:   the other ranks; they poll the listing of manifests, which includes heartbeats

A rank is silent if an observer, by its own monotonic clock, has seen no new generation for 2.5
intervals. Clocks of different machines are never compared. With an interval of 10 s, and less than
120 ranks (see `request_rates`):

    an observer that waits for manifests polls at least every 1 s, and notices a death within 26 s
    the coordinator polls every 5 s during its upload, and notices a death within 30 s
    another rank polls every 10 s during its upload, and notices a death within 40 s

A heartbeat that fails is retried after 0.3 intervals: the 25 s allow a failed heartbeat and four
retries. Of a time in which an observer could not poll, only one interval counts, so that an outage
of the service or a suspended observer does not make a rank silent. The heartbeats begin when the
ranks have agreed on the save, so that slow staging or a queue of earlier saves does not make a rank
silent either.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Collection, Mapping
from contextlib import suppress
from typing import TYPE_CHECKING, Final

from aioflux.checkpoint._save.request_rates import first_heartbeat_delay
from aioflux.errors import AiofluxError, StorageError, TransientError

if TYPE_CHECKING:
    from aioflux.store import Store

_log = logging.getLogger("aioflux")

_SILENT_INTERVALS: Final = 2.5
"""Intervals without a new heartbeat after which a rank is silent."""
_RETRY_INTERVALS: Final = 0.3
"""Intervals until a failed heartbeat is retried."""
_DELETE_SECONDS: Final = 5.0
"""Timeout of the delete of heartbeats at the end of a save."""


def heartbeat_key(save_id: str, rank: int, number: int = 0) -> str:
    """Return the key of a heartbeat below the checkpoint's prefix.

    `number` is above 0 if objects cannot be overwritten.
    """
    return f"{save_id}/rank-{rank:05d}{f'.{number}' if number else ''}.beat"


class Heartbeat:
    """Writer of the heartbeats of one rank in one save, on the running event loop.

    If objects cannot be overwritten, because of a retention policy or a role without the permission
    to delete, each heartbeat is written to a new key.
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
        """Start the heartbeats.

        The first heartbeat is written after `first_heartbeat_delay`. If `is_late`, it is written at
        once: an earlier uploader process of the save died, and its heartbeats have stopped.
        """
        self._store = store
        self._prefix = prefix
        self._save_id = save_id
        self._rank = rank
        self._every_seconds = every_seconds
        self._keys: list[str] = []
        """Keys that this writer may have written."""
        self._number = 0
        self._stopping = asyncio.Event()
        pause = 0.0 if is_late else first_heartbeat_delay(rank, every_seconds)
        self._task = asyncio.get_running_loop().create_task(self._run(pause))

    def cancel(self) -> None:
        """Stop without deleting the heartbeats, which `aioflux clean` deletes."""
        self._task.cancel()

    async def stop(self) -> None:
        """Stop, and delete the heartbeats; errors are logged."""
        self._stopping.set()
        _, running = await asyncio.wait((self._task,), timeout=_DELETE_SECONDS / 5)
        if running:
            self._task.cancel()
            await asyncio.wait(running)
        if not self._keys:
            return
        try:
            async with asyncio.timeout(_DELETE_SECONDS):
                result = await self._store.delete_many(self._keys)
        except (AiofluxError, OSError) as exc:
            _log.warning("heartbeats could not be deleted; `aioflux clean` deletes them: %r", exc)
        else:
            for error in result.errors.values():
                _log.warning(
                    "a heartbeat could not be deleted; `aioflux clean` deletes it: %s", error
                )

    async def _run(self, pause: float) -> None:
        count = 0
        while not await self._is_stopping_after(pause):
            count += 1
            is_written = await self._write(b"%d" % count)
            pause = self._every_seconds * (1.0 if is_written else _RETRY_INTERVALS)

    async def _is_stopping_after(self, seconds: float) -> bool:
        """Wait, and return whether `stop` was called meanwhile."""
        with suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self._stopping.wait()
        return self._stopping.is_set()

    async def _write(self, data: bytes) -> bool:
        """Write one heartbeat, and return whether the write succeeded."""
        key = self._prefix + heartbeat_key(self._save_id, self._rank, self._number)
        if key not in self._keys:
            self._keys.append(key)
        try:
            async with asyncio.timeout(self._every_seconds):
                await self._store.put(key, data)  # new data, so that the ETag changes, too
        except (AiofluxError, OSError) as exc:
            _log.warning("%s%s: a heartbeat could not be written: %r", self._store.uri, key, exc)
            if isinstance(exc, StorageError) and not isinstance(exc, TransientError):
                self._number += 1
            return False
        return True


class HeartbeatMonitor:
    """Detection of silent ranks by one observer, without I/O."""

    def __init__(self, every_seconds: float) -> None:
        self._every_seconds = every_seconds
        self._last_poll = float("-inf")
        self._ranks: dict[int, tuple[object, float]] = {}
        """Value of each watched rank, and the seconds since the value changed."""

    def observe(
        self, generations: Mapping[int, object], awaited: Collection[int], now: float
    ) -> dict[int, float]:
        """Record the result of a poll, and return the silent ranks with the seconds of silence.

        Args:
            generations: A value for each rank that changes with each heartbeat.
            awaited: The ranks to watch.
            now: Time of the poll, by a monotonic clock, in seconds.
        """
        # An observer polls once per interval. A longer time means that it was suspended, or could
        # not poll, and does not count.
        counted = min(now - self._last_poll, self._every_seconds) if self._ranks else 0.0
        self._last_poll = now
        last_ranks, self._ranks = self._ranks, {}
        for rank in awaited:
            current = generations.get(rank)
            last, seconds = last_ranks.get(rank, (current, -counted))
            self._ranks[rank] = (current, seconds + counted if current == last else 0.0)
        return {
            rank: seconds
            for rank, (_, seconds) in sorted(self._ranks.items())
            if seconds >= _SILENT_INTERVALS * self._every_seconds
        }

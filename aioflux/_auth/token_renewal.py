"""Access tokens that are renewed before they expire, one renewal at a time."""

from __future__ import annotations

import asyncio
import time
from abc import ABC, abstractmethod
from typing import TYPE_CHECKING

from aioflux._auth.credentials_function import WAIT, Wait

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["RenewedToken"]

_EARLY_SECONDS = 240.0
"""A token is renewed in the background this long before it expires. The metadata server of Google
itself gives out the same token until about 4 minutes before its end
(cloud.google.com/compute/docs/access/authenticate-workloads)."""

_AGAIN_SECONDS = 10.0
"""Time between two attempts to renew a token that is still valid."""


class RenewedToken(ABC):
    """A token with an end; a subclass knows where the next one comes from."""

    def __init__(self, *, clock: Callable[[], float] = time.time) -> None:
        """Take the clock, which tells Unix time in seconds."""
        self._clock = clock
        self._value: str | None = None
        self._renew_at = 0.0
        self._expires_at = 0.0
        self._renewal: asyncio.Task[None] | None = None
        self._is_refused = False

    @abstractmethod
    def _refresh(self) -> tuple[str, float]:
        """Find a token and when it ends, in seconds of Unix time. Runs in a thread."""

    async def _refreshed(self) -> tuple[str, float]:
        return await asyncio.to_thread(self._refresh)

    def ready(self) -> str | Wait | None:
        """Return the token, or `WAIT` where it has to be found or renewed first."""
        return self._value if self._clock() < self._renew_at else WAIT

    async def get(self) -> str | None:
        """Return a token that is valid now.

        Raises:
            CredentialsError: No credentials were found, or they cannot be refreshed.
            TransientError: They could not be refreshed this time.
        """
        now = self._clock()
        if now < self._renew_at:
            return self._value
        if self._renewal is None or self._renewal.done():
            self._renewal = asyncio.create_task(self._renew())
            # Where the old token is still valid, a renewal that fails is tried again in a while,
            # and its error raised once the token has ended.
            self._renew_at = min(now + _AGAIN_SECONDS, self._expires_at)
            self._renewal.add_done_callback(lambda task: task.cancelled() or task.exception())
        if now >= self._expires_at:
            await asyncio.shield(self._renewal)
        return self._value

    def refuse(self, value: str) -> None:
        """Take note that the service refused a token: the next `get` waits for another one.

        Of many requests that were refused with one token, the first makes for one renewal; what
        they say of a token that has been replaced since is old news.
        """
        if value == self._value:
            self._is_refused = True
            self._renew_at = self._expires_at = 0.0

    async def close(self) -> None:
        """Stop a renewal that is under way."""
        if self._renewal is not None and not self._renewal.done():
            self._renewal.cancel()
            await asyncio.gather(self._renewal, return_exceptions=True)

    async def _renew(self) -> None:
        value, expiry = await self._refreshed()
        self._value = value
        self._is_refused = False
        self._expires_at = expiry
        remaining = expiry - self._clock()
        self._renew_at = expiry - min(_EARLY_SECONDS, remaining / 2)

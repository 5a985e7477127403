"""Access tokens: none, from the caller's function, or renewed before they expire.

A token source has `get_nowait`, `get`, `invalidate` and `close`.
"""

from __future__ import annotations

import asyncio
import enum
import inspect
import math
import re
import time
from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Any, Final

from aioflux._concurrency.single_flight import SingleFlight
from aioflux.errors import CredentialsError

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

__all__ = [
    "CALL_SECONDS",
    "NOT_READY",
    "AnonymousToken",
    "NotReady",
    "ProvidedToken",
    "RenewedToken",
    "call_provider",
]

CALL_SECONDS: Final = 5.0
"""Seconds for which the result of the caller's credentials function is reused; its expiry is not
known. A slow function may cache its own result for longer."""
_TOKEN: Final = re.compile(r"[!-~]+")

_RENEW_SECONDS: Final = 240.0
"""A token is renewed in the background this long before it expires. The metadata server of Google
itself returns the same token until about 4 minutes before its end
(cloud.google.com/compute/docs/access/authenticate-workloads)."""
_RETRY_SECONDS: Final = 10.0
"""Time between two attempts to renew a token that is still valid."""


class NotReady(enum.Enum):
    """The type of `NOT_READY`."""

    NOT_READY = "not ready"


NOT_READY: Final = NotReady.NOT_READY
"""Returned by `get_nowait` if `await get()` has to find or renew the credentials first."""


class AnonymousToken:
    """No credentials: for emulators and public buckets."""

    def get_nowait(self) -> str | NotReady | None:
        """Return None: no token."""
        return None

    async def get(self) -> str | None:
        """Return None: no token."""
        return None

    def invalidate(self, token: str) -> None:
        """Do nothing: there is no token."""

    async def close(self) -> None:
        """Do nothing."""


class ProvidedToken:
    """Tokens of the caller's function; each is used for `CALL_SECONDS`, or until a 401."""

    def __init__(
        self,
        provider: Callable[[], str | Awaitable[str]],
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Initialize; `clock` returns seconds, from any start."""
        self._provider = provider
        self._clock = clock
        self._token = ""
        self._call_at = -math.inf
        self._calls: SingleFlight[None] = SingleFlight()

    def get_nowait(self) -> str | NotReady | None:
        """Return the token, or `NOT_READY` if the function has to be called first."""
        return self._token if self._clock() < self._call_at else NOT_READY

    async def get(self) -> str | None:
        """Return the token; call the function if there is none in use.

        Raises:
            CredentialsError: The token cannot be sent.
        """
        if self._clock() >= self._call_at:
            await self._calls.run(self._call)
        return self._token

    async def _call(self) -> None:
        token = await call_provider(self._provider)
        if not isinstance(token, str) or _TOKEN.fullmatch(token) is None:
            kind = "empty text" if token == "" else f"a {type(token).__name__} that cannot be sent"
            raise CredentialsError(
                f"the function given as credentials= returned {kind}; an access token is text "
                "of visible characters, with no space or line end around it"
            )
        self._token, self._call_at = token, self._clock() + CALL_SECONDS

    def invalidate(self, token: str) -> None:
        """Stop using a token that the service rejected; the next `get` calls the function."""
        if token == self._token:
            self._call_at = -math.inf

    async def close(self) -> None:
        """Cancel a running call."""
        await self._calls.aclose()


class RenewedToken(ABC):
    """A token that expires; subclasses implement how it is renewed."""

    def __init__(self, *, clock: Callable[[], float] = time.time) -> None:
        """Initialize; `clock` returns Unix time, in seconds."""
        self._clock = clock
        self._token: str | None = None
        self._renew_at = 0.0
        self._expires_at = 0.0
        self._renewal: SingleFlight[None] = SingleFlight()
        self._is_rejected = False

    @abstractmethod
    async def _refresh(self) -> tuple[str, float]:
        """Return a new token and its expiry, in seconds of Unix time."""

    def get_nowait(self) -> str | NotReady | None:
        """Return the token, or `NOT_READY` if it has to be found or renewed first."""
        return self._token if self._clock() < self._renew_at else NOT_READY

    async def get(self) -> str | None:
        """Return a token that is valid now.

        Raises:
            CredentialsError: No credentials were found, or they cannot be refreshed.
            TransientError: They could not be refreshed this time.
        """
        now = self._clock()
        if now < self._renew_at:
            return self._token
        if not self._renewal.is_running:
            self._renewal.start(self._renew)
            # While the old token is valid, a failed renewal is repeated later; its error is raised
            # only once the token has expired.
            self._renew_at = min(now + _RETRY_SECONDS, self._expires_at)
        if now >= self._expires_at:
            await self._renewal.run(self._renew)
        return self._token

    def invalidate(self, token: str) -> None:
        """Stop using a token that the service rejected; the next `get` waits for another one.

        Many requests may be rejected with one token: the first starts a renewal. A token that was
        replaced since is ignored.
        """
        if token == self._token:
            self._is_rejected = True
            self._renew_at = self._expires_at = 0.0

    async def close(self) -> None:
        """Cancel a running renewal."""
        await self._renewal.aclose()

    async def _renew(self) -> None:
        token, expires_at = await self._refresh()
        self._token = token
        self._is_rejected = False
        self._expires_at = expires_at
        remaining = expires_at - self._clock()
        self._renew_at = expires_at - min(_RENEW_SECONDS, remaining / 2)


async def call_provider(provider: Callable[[], Any]) -> Any:
    """Call the caller's function for credentials, and await its result if it is awaitable.

    A coroutine function is called on the loop; any other may block, and is called in a thread.

    Raises:
        RuntimeError: It raised StopIteration, which no future can hold.
    """

    def call() -> Any:
        try:
            return provider()
        except StopIteration as exc:
            raise RuntimeError("the function given as credentials= raised StopIteration") from exc

    if inspect.iscoroutinefunction(provider):
        return await provider()
    result = await asyncio.to_thread(call)
    return await result if inspect.isawaitable(result) else result

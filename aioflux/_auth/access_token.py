"""Sources of access tokens: anonymous, a function of the caller, or tokens that are renewed.

Each source has the methods `get_nowait`, `get`, `invalidate` and `close`.
"""

from __future__ import annotations

import asyncio
import enum
import inspect
import math
import random
import re
import time
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable
from typing import Any, Final, TypeAlias

from aioflux._concurrency.single_flight import SingleFlight
from aioflux.errors import CredentialsError

CALL_SECONDS: Final = 5.0
"""Time for which a token of the caller's function is reused, in seconds. It is short, because the
expiry of the token is not known. A slow function can itself cache its token for longer."""
_TOKEN: Final = re.compile(r"[!-~]+")

_RENEW_SECONDS: Final = 240.0
"""Longest time between the renewal of a token and its expiry, in seconds. An earlier renewal would
be useless, because Google's metadata server returns the same token until about 4 minutes before its
expiry (cloud.google.com/compute/docs/access/authenticate-workloads)."""
_RETRY_SECONDS: Final = 10.0
"""Longest time between two attempts to renew a token that is still valid, in seconds."""
_jitter: Final = random.SystemRandom().random  # the caller may have seeded the module `random`


def renewal_time(expires_at: float, now: float, fraction: float) -> float:
    """Return the time at which a token received at `now` is renewed, in seconds.

    Ranks whose tokens expire together renew them within two minutes; `fraction` is random.
    """
    return expires_at - min(_RENEW_SECONDS, (expires_at - now) / 2) * (1 - fraction / 2)


Identity: TypeAlias = tuple[str, float | None]
"""Source and owner of credentials, without any secret; and their expiry as Unix time, in seconds,
or None if it is not known."""


class NotReady(enum.Enum):
    """The type of `NOT_READY`."""

    NOT_READY = "not ready"


NOT_READY: Final = NotReady.NOT_READY
"""Result of `get_nowait` if the caller must `await get()`, which may request a token first."""


class AnonymousToken:
    """A token source without a token, for emulators and public buckets."""

    def get_nowait(self) -> str | NotReady | None:
        """Return None."""
        return None

    async def get(self) -> str | None:
        """Return None."""
        return None

    async def identity(self) -> Identity:
        """Return the identity."""
        return "anonymous", None

    def invalidate(self, token: str) -> None:
        """Do nothing."""

    async def close(self) -> None:
        """Do nothing."""


class ProvidedToken:
    """Tokens of a function of the caller. Each token is used for `CALL_SECONDS`, or until a 401."""

    def __init__(
        self,
        provider: Callable[[], str | Awaitable[str]],
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Initialize without calling the function; `clock` is a monotonic clock, in seconds."""
        self._provider = provider
        self._clock = clock
        self._token = ""
        self._next_call_at = -math.inf
        self._calls: SingleFlight[None] = SingleFlight()

    def get_nowait(self) -> str | NotReady | None:
        """Return the token, or `NOT_READY` if the function must be called first."""
        return self._token if self._clock() < self._next_call_at else NOT_READY

    async def get(self) -> str | None:
        """Return the token; call the function if the token is too old or was rejected.

        Raises:
            CredentialsError: The function returned a value that is not a token.
        """
        if self._clock() >= self._next_call_at:
            await self._calls.run(self._call)
        return self._token

    async def identity(self) -> Identity:
        """Return the identity."""
        return "the function given as credentials=", None

    async def _call(self) -> None:
        token = await call_provider(self._provider)
        if not isinstance(token, str) or _TOKEN.fullmatch(token) is None:
            kind = "an empty string" if token == "" else f"an invalid {type(token).__name__}"
            raise CredentialsError(
                f"the function given as credentials= returned {kind}; an access token is text of "
                "visible ASCII characters, with no space or line end around it"
            )
        self._token, self._next_call_at = token, self._clock() + CALL_SECONDS

    def invalidate(self, token: str) -> None:
        """Stop using a token that the service rejected; the next `get` calls the function."""
        if token == self._token:
            self._next_call_at = -math.inf

    async def close(self) -> None:
        """Cancel a running call of the function."""
        await self._calls.aclose()


class RenewedToken(ABC):
    """A token that is renewed before it expires. Subclasses implement the renewal."""

    def __init__(self, *, clock: Callable[[], float] = time.time) -> None:
        """Initialize without a token; `clock` returns Unix time, in seconds."""
        self._clock = clock
        self._token: str | None = None
        self._renew_at = 0.0
        self._expires_at = 0.0
        self._renewal: SingleFlight[None] = SingleFlight()
        self._is_rejected = False

    @abstractmethod
    async def _refresh(self) -> tuple[str, float]:
        """Return a new token, and its expiry as Unix time in seconds."""

    def get_nowait(self) -> str | NotReady | None:
        """Return the token, or `NOT_READY` if there is none yet, or its renewal is due."""
        return self._token if self._clock() < self._renew_at else NOT_READY

    async def get(self) -> str | None:
        """Return a valid token.

        Raises:
            CredentialsError: No credentials were found, or they cannot be refreshed.
            TransientError: The credentials could not be refreshed now; another attempt may succeed.
        """
        now = self._clock()
        if now < self._renew_at:
            return self._token
        if not self._renewal.is_running:
            self._renewal.start(self._renew)
            # While the old token is valid, a failed renewal is repeated later, and its error is
            # dropped. Errors are raised only after the token has expired or was rejected.
            pause = _RETRY_SECONDS * (1 - _jitter() / 2)
            self._renew_at = min(now + pause, self._expires_at)
        if now >= self._expires_at:
            await self._renewal.run(self._renew)
        return self._token

    async def identity(self) -> Identity:
        """Return the identity of the credentials. Raises the errors of `get`."""
        await self.get()
        return self._describe(), self._expires_at

    @abstractmethod
    def _describe(self) -> str:
        """Return source and owner of the credentials that `_refresh` has used."""

    def invalidate(self, token: str) -> None:
        """Stop using a token that the service rejected; the next `get` waits for a new token.

        Many concurrent requests may be rejected with the same token. A call for a token that was
        already replaced has no effect.
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
        self._renew_at = renewal_time(expires_at, self._clock(), _jitter())


async def call_provider(provider: Callable[[], Any]) -> Any:
    """Call the caller's credentials function, and await its result if it is awaitable.

    A coroutine function is called on the event loop. Other functions may block, and are called in a
    thread.

    Raises:
        RuntimeError: The function raised StopIteration, which asyncio cannot set on a future.
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

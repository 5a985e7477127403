"""Access tokens that a caller's function gives, and none at all."""

from __future__ import annotations

import asyncio
import enum
import inspect
import math
import re
import time
from typing import TYPE_CHECKING, Any, Final

from aioflux._errors import CredentialsError

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

__all__ = ["ASK_SECONDS", "WAIT", "AnonymousToken", "ProvidedToken", "Wait", "call_provider"]

ASK_SECONDS: Final = 5.0
"""Time after which a function for credentials is called again, in seconds: when its result expires
is not known. A function that is slow may keep its result for longer."""
_TOKEN = re.compile(r"[!-~]+")


class Wait(enum.Enum):
    """The one answer of `ready` that is no token."""

    WAIT = "wait"


WAIT: Final = Wait.WAIT
"""There is no token at once: `await get()`."""


class AnonymousToken:
    """Sends no credentials: emulators and public buckets."""

    def ready(self) -> str | Wait | None:
        """Return None: no token."""
        return None

    async def get(self) -> str | None:
        """Return None: no token."""
        return None

    def refuse(self, value: str) -> None:
        """Do nothing: there is no token to refuse."""

    async def close(self) -> None:
        """Do nothing."""


class ProvidedToken:
    """Tokens that the caller's function gives; each is used for `ASK_SECONDS`, or until a 401."""

    def __init__(
        self,
        provider: Callable[[], str | Awaitable[str]],
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Take the function and a clock, in seconds from any beginning."""
        self._provider = provider
        self._clock = clock
        self._value = ""
        self._ask_at = -math.inf
        self._lock = asyncio.Lock()

    def ready(self) -> str | Wait | None:
        """Return the token, or `WAIT` if the function is to be called first."""
        return self._value if self._clock() < self._ask_at else WAIT

    async def get(self) -> str | None:
        """Return the token; call the function if there is none in use.

        Raises:
            CredentialsError: It is not one that can be sent.
        """
        async with self._lock:  # of many requests that need a token the first calls the function
            if self._clock() < self._ask_at:
                return self._value
            token = await call_provider(self._provider)
            if not isinstance(token, str) or _TOKEN.fullmatch(token) is None:
                kind = (
                    "empty text" if token == "" else f"a {type(token).__name__} that cannot be sent"
                )
                raise CredentialsError(
                    f"the function given as credentials= returned {kind}; an access token is text "
                    "of visible characters, with no space or line end around it"
                )
            self._value, self._ask_at = token, self._clock() + ASK_SECONDS
            return token

    def refuse(self, value: str) -> None:
        """Take note that the service rejected a token: the function is called for the next one."""
        if value == self._value:
            self._ask_at = -math.inf

    async def close(self) -> None:
        """Do nothing."""


async def call_provider(provider: Callable[[], Any]) -> Any:
    """Call a function of the caller's for credentials, off the event loop, and await its result.

    A coroutine function is called on the loop. Another may block, as one does that asks a server,
    and is called in a thread.

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
    given = await asyncio.to_thread(call)
    return await given if inspect.isawaitable(given) else given

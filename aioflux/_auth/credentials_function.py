"""Access tokens that a caller's function gives, and none at all."""

from __future__ import annotations

import asyncio
import enum
import inspect
import math
import re
import time
from typing import TYPE_CHECKING, Any, Final

from aioflux.errors import CredentialsError

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

__all__ = [
    "ASK_SECONDS",
    "WAIT",
    "AnonymousToken",
    "ProvidedToken",
    "SharedCall",
    "Wait",
    "call_provider",
]

ASK_SECONDS: Final = 5.0
"""Time after which a function for credentials is called again, in seconds: when its result expires
is not known. A function that is slow may keep its result for longer."""
_TOKEN = re.compile(r"[!-~]+")


class Wait(enum.Enum):
    """The one answer of `ready` that is no token."""

    WAIT = "wait"


WAIT: Final = Wait.WAIT
"""There is no token at once: `await get()`."""


class SharedCall:
    """Calls of one coroutine function: a caller joins the call that is under way, if there is one.

    All of its callers get its result or its error. One that is cancelled does not end it.
    """

    def __init__(self, function: Callable[[], Awaitable[None]]) -> None:
        """Take the function."""
        self._function = function
        self._task: asyncio.Task[BaseException | None] | None = None

    async def run(self) -> None:
        """Call the function, or join the call that is under way; raise what it raises."""
        if self._task is None or self._task.done():
            self._task = asyncio.create_task(self._outcome())
        error = await asyncio.shield(self._task)
        if error is not None:
            raise error

    async def close(self) -> None:
        """Cancel the call that is under way."""
        if self._task is not None and not self._task.done():
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    async def _outcome(self) -> BaseException | None:
        try:
            await self._function()
        except asyncio.CancelledError:
            raise
        except BaseException as exc:  # a SystemExit raised in a task would end the loop
            return exc
        return None


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
        self._call = SharedCall(self._ask)

    def ready(self) -> str | Wait | None:
        """Return the token, or `WAIT` if the function is to be called first."""
        return self._value if self._clock() < self._ask_at else WAIT

    async def get(self) -> str | None:
        """Return the token; call the function if there is none in use.

        Raises:
            CredentialsError: It is not one that can be sent.
        """
        if self._clock() >= self._ask_at:
            await self._call.run()
        return self._value

    async def _ask(self) -> None:
        token = await call_provider(self._provider)
        if not isinstance(token, str) or _TOKEN.fullmatch(token) is None:
            kind = "empty text" if token == "" else f"a {type(token).__name__} that cannot be sent"
            raise CredentialsError(
                f"the function given as credentials= returned {kind}; an access token is text "
                "of visible characters, with no space or line end around it"
            )
        self._value, self._ask_at = token, self._clock() + ASK_SECONDS

    def refuse(self, value: str) -> None:
        """Take note that the service rejected a token: the function is called for the next one."""
        if value == self._value:
            self._ask_at = -math.inf

    async def close(self) -> None:
        """Cancel a call that is under way."""
        await self._call.close()


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

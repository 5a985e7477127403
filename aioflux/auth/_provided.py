"""Access tokens that a caller's function gives, and none at all."""

from __future__ import annotations

import asyncio
import enum
import inspect
import re
from typing import TYPE_CHECKING, Final

from aioflux._errors import CredentialsError

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

__all__ = ["WAIT", "AnonymousToken", "ProvidedToken", "Wait"]

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
    """Asks the caller's function for a token, each time one is needed; the function caches."""

    def __init__(self, provider: Callable[[], str | Awaitable[str]]) -> None:
        self._provider = provider
        self._is_awaited = inspect.iscoroutinefunction(provider)
        self._checked = ""

    def ready(self) -> str | Wait | None:
        """Return the provider's token, or `WAIT` where `get` has to await or refuse it."""
        if self._is_awaited:
            return WAIT
        try:
            token: object = self._provider()
        except (Exception, SystemExit, asyncio.CancelledError):
            # `get` asks again, and whoever awaits it is told; here it may be the loop's own turn,
            # which some of these would end.
            return WAIT
        if isinstance(token, str) and (token == self._checked or _TOKEN.fullmatch(token)):
            self._checked = token
            return token
        if inspect.isawaitable(token):
            self._is_awaited = True
            if inspect.iscoroutine(token):
                token.close()
        return WAIT

    async def get(self) -> str | None:
        """Return the provider's token.

        Raises:
            CredentialsError: It is not one that can be sent.
        """
        token: object = self._provider()
        if inspect.isawaitable(token):
            token = await token
        if not isinstance(token, str) or _TOKEN.fullmatch(token) is None:
            kind = "empty text" if token == "" else f"a {type(token).__name__} that cannot be sent"
            raise CredentialsError(
                f"the function given as credentials= returned {kind}; an access token is text of "
                "visible characters, with no space or line end around it"
            )
        return token

    def refuse(self, value: str) -> None:
        """Do nothing: the provider is asked again in any case."""

    async def close(self) -> None:
        """Do nothing."""

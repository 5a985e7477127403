"""Google credentials: found and refreshed by google-auth, handed out as bearer tokens."""

from __future__ import annotations

import asyncio
import enum
import inspect
import re
import time
from datetime import UTC
from typing import TYPE_CHECKING, Any, Final

from aioflux._errors import CredentialsError, TransientError

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

__all__ = [
    "WAIT",
    "AnonymousToken",
    "GoogleToken",
    "ProvidedToken",
    "Wait",
    "anonymous_credentials",
    "open_token",
]

_TOKEN = re.compile(r"[!-~]+")

SCOPES = ("https://www.googleapis.com/auth/devstorage.full_control",)

_EARLY_SECONDS = 240.0
"""A token is renewed in the background this long before it expires. The metadata server itself
gives out the same token until about 4 minutes before its end
(cloud.google.com/compute/docs/access/authenticate-workloads)."""

_AGAIN_SECONDS = 10.0
"""Time between two attempts to renew a token that is still valid."""

_HOW_TO_SIGN_IN = (
    "run 'gcloud auth application-default login', set GOOGLE_APPLICATION_CREDENTIALS to a key "
    "file, or pass credentials=; for a public bucket pass "
    "google.auth.credentials.AnonymousCredentials()"
)


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


class GoogleToken:
    """A token of google-auth credentials, renewed before it expires, one renewal at a time.

    It has the two methods that gcloud-aio-storage calls on its own token class, so that one object
    serves both planes.
    """

    def __init__(self, credentials: Any = None, *, clock: Callable[[], float] = time.time) -> None:
        """Take credentials, or find the default ones on first use.

        Args:
            credentials: google-auth credentials.
            clock: Unix time, in seconds.
        """
        self._credentials = credentials
        self._clock = clock
        self._value: str | None = None
        self._renew_at = 0.0
        self._expires_at = 0.0
        self._renewal: asyncio.Task[None] | None = None
        self._is_refused = False

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
        value, expiry = await asyncio.to_thread(self._refresh)
        self._value = value
        self._is_refused = False
        self._expires_at = expiry
        remaining = expiry - self._clock()
        self._renew_at = expiry - min(_EARLY_SECONDS, remaining / 2)

    def _refresh(self) -> tuple[str, float]:
        import google.auth
        from google.auth import exceptions
        from google.auth.transport.requests import Request

        try:
            if self._credentials is None:
                self._credentials, _ = google.auth.default(scopes=SCOPES)
            # The caller's token is used first, and for ever where it has no end: it may be one
            # that cannot be refreshed.
            is_first_or_endless = self._value is None or self._credentials.expiry is None
            is_usable = is_first_or_endless and not self._is_refused
            if not (is_usable and self._credentials.valid):
                self._credentials.refresh(Request())
        except exceptions.DefaultCredentialsError as exc:
            raise CredentialsError(
                f"no Google credentials were found ({_first_sentence(exc)}): {_HOW_TO_SIGN_IN}"
            ) from exc
        except exceptions.GoogleAuthError as exc:
            if _may_pass(exc):
                raise TransientError(
                    f"Google credentials could not be refreshed this time ({type(exc).__name__}): "
                    "the token endpoint did not answer"
                ) from exc
            raise CredentialsError(
                f"Google credentials could not be refreshed ({type(exc).__name__}): "
                f"{_HOW_TO_SIGN_IN}"
            ) from exc
        expiry = self._credentials.expiry
        # google-auth keeps naive times in UTC. Credentials without an end are asked again after an
        # hour.
        end = expiry.replace(tzinfo=UTC).timestamp() if expiry else self._clock() + 3600.0
        return self._credentials.token, end


def _first_sentence(error: Exception) -> str:
    """Return what google-auth says is wrong, such as the name of a key file that is not there."""
    text = " ".join(str(error).split())
    return text.partition(". ")[0].rstrip(".")[:200] or type(error).__name__


def _may_pass(exc: BaseException | None) -> bool:
    """Whether a refresh failed on the network or in the token endpoint, not on the credentials."""
    from google.auth import exceptions

    # Some kinds of credentials tell of a lost connection as the cause of a RefreshError.
    while isinstance(exc, exceptions.GoogleAuthError):
        if isinstance(exc, exceptions.TransportError) or exc.retryable:
            return True
        exc = exc.__cause__
    return False


def anonymous_credentials() -> Any:
    """Return credentials that send none: for public buckets."""
    from google.auth.credentials import AnonymousCredentials

    return AnonymousCredentials()  # type: ignore[no-untyped-call]


def open_token(credentials: Any, *, emulator: bool) -> AnonymousToken | ProvidedToken | GoogleToken:
    """Choose where tokens come from.

    Args:
        credentials: google-auth credentials, a function that returns a token (or an awaitable of
            one), or None for Application Default Credentials.
        emulator: The endpoint is an emulator, which is asked without credentials unless some are
            given.

    Raises:
        TypeError: `credentials` is none of these.
    """
    if credentials is None:
        return AnonymousToken() if emulator else GoogleToken()
    import google.auth.credentials as google_credentials

    if isinstance(credentials, google_credentials.AnonymousCredentials):
        return AnonymousToken()
    if isinstance(credentials, google_credentials.Credentials):
        if isinstance(credentials, google_credentials.Scoped) and credentials.requires_scopes:
            credentials = credentials.with_scopes(SCOPES)  # type: ignore[no-untyped-call]
        return GoogleToken(credentials)
    if callable(credentials):
        return ProvidedToken(credentials)
    raise TypeError(
        "credentials must be google-auth credentials or a function that returns a token, not "
        f"{type(credentials).__name__}"
    )

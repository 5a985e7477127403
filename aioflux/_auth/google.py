"""Google credentials: found and refreshed by google-auth, used as bearer tokens."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping
from datetime import UTC
from typing import TYPE_CHECKING, Any

from aioflux._auth.access_token import AnonymousToken, ProvidedToken, RenewedToken
from aioflux.errors import CredentialsError, TransientError
from aioflux.options import ANONYMOUS

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = [
    "AnonymousToken",
    "GoogleToken",
    "anonymous_credentials",
    "open_token",
]

SCOPES = ("https://www.googleapis.com/auth/devstorage.full_control",)

_HOW_TO_SIGN_IN = (
    "run 'gcloud auth application-default login', set GOOGLE_APPLICATION_CREDENTIALS to a key "
    "file, or pass credentials=; for a public bucket pass "
    "google.auth.credentials.AnonymousCredentials()"
)


class GoogleToken(RenewedToken):
    """The access token of google-auth credentials.

    It has the two methods that gcloud-aio-storage calls on its own token class, so that one object
    authorizes the requests of both.
    """

    def __init__(self, credentials: Any = None, *, clock: Callable[[], float] = time.time) -> None:
        """Keep google-auth credentials; None finds the default ones on first use."""
        super().__init__(clock=clock)
        self._credentials = credentials

    async def _refresh(self) -> tuple[str, float]:
        return await asyncio.to_thread(self._refresh_blocking)

    def _refresh_blocking(self) -> tuple[str, float]:
        import google.auth
        from google.auth import exceptions
        from google.auth.transport.requests import Request

        try:
            if self._credentials is None:
                self._credentials, _ = google.auth.default(scopes=SCOPES)
            # The caller's token is used first, and always if it has no expiry: it may be one that
            # cannot be refreshed.
            is_first_or_endless = self._token is None or self._credentials.expiry is None
            is_usable = is_first_or_endless and not self._is_rejected
            if not (is_usable and self._credentials.valid):
                self._credentials.refresh(Request())
        except exceptions.DefaultCredentialsError as exc:
            raise CredentialsError(
                f"no Google credentials were found ({_first_sentence(exc)}): {_HOW_TO_SIGN_IN}"
            ) from exc
        except exceptions.GoogleAuthError as exc:
            if _is_transient(exc):
                raise TransientError(
                    f"Google credentials could not be refreshed this time ({type(exc).__name__}): "
                    "the token endpoint did not respond"
                ) from exc
            raise CredentialsError(
                f"Google credentials could not be refreshed ({type(exc).__name__}): "
                f"{_HOW_TO_SIGN_IN}"
            ) from exc
        expiry = self._credentials.expiry
        # google-auth keeps naive times in UTC. Credentials without an expiry are read again in an
        # hour.
        expires_at = expiry.replace(tzinfo=UTC).timestamp() if expiry else self._clock() + 3600.0
        return self._credentials.token, expires_at


def _first_sentence(error: Exception) -> str:
    """Return the first sentence of google-auth's error, such as the name of a missing key file."""
    text = " ".join(str(error).split())
    return text.partition(". ")[0].rstrip(".")[:200] or type(error).__name__


def _is_transient(exc: BaseException | None) -> bool:
    """Return whether a refresh failed because of the network or the token endpoint."""
    from google.auth import exceptions

    # Some credentials report a lost connection as the cause of a RefreshError.
    while isinstance(exc, exceptions.GoogleAuthError):
        if isinstance(exc, exceptions.TransportError) or exc.retryable:
            return True
        exc = exc.__cause__
    return False


def anonymous_credentials() -> Any:
    """Return credentials that send no token: for public buckets."""
    from google.auth.credentials import AnonymousCredentials

    return AnonymousCredentials()  # type: ignore[no-untyped-call]


def open_token(credentials: Any, *, emulator: bool) -> AnonymousToken | ProvidedToken | GoogleToken:
    """Return the token source for the caller's credentials.

    Args:
        credentials: google-auth credentials, the content of a JSON key file as a mapping, a
            function that returns a token (or an awaitable of one), "anonymous", or None for
            Application Default Credentials.
        emulator: The endpoint is an emulator, which needs no credentials.

    Raises:
        CredentialsError: The mapping is not the content of a key file.
        TypeError: `credentials` is none of these.
    """
    if credentials is None:
        return AnonymousToken() if emulator else GoogleToken()
    if isinstance(credentials, str) and credentials == ANONYMOUS:
        return AnonymousToken()
    if isinstance(credentials, Mapping):
        return GoogleToken(_credentials_of_key_file(credentials))
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
        "credentials must be google-auth credentials, the content of a key file as a mapping, "
        f"{ANONYMOUS!r}, or a function that returns a token, not {type(credentials).__name__}"
    )


def _credentials_of_key_file(info: Mapping[str, Any]) -> Any:
    """Return google-auth credentials for the content of a JSON key file."""
    from google.oauth2 import credentials as user
    from google.oauth2 import service_account

    kind = info.get("type")
    try:
        if kind == "service_account":
            return service_account.Credentials.from_service_account_info(  # type: ignore[no-untyped-call]
                info, scopes=SCOPES
            )
        if kind == "authorized_user" or "refresh_token" in info:
            return user.Credentials.from_authorized_user_info(info)  # type: ignore[no-untyped-call]
    except ValueError:
        # Not `from` it: the traceback must not contain the key.
        raise CredentialsError(
            "the mapping given as credentials= is not the content of a whole key file of Google "
            "Cloud; pass what json.load returns of it"
        ) from None
    raise CredentialsError(
        "the mapping given as credentials= is neither of a service account nor of a user; for "
        "other kinds set GOOGLE_APPLICATION_CREDENTIALS to the file, or pass google-auth "
        "credentials"
    )

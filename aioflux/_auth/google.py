"""Google credentials, from which google-auth makes access tokens."""

from __future__ import annotations

import asyncio
import json
import os
import re
import time
from collections.abc import Callable, Mapping
from datetime import UTC
from typing import Any

from aioflux._auth.access_token import AnonymousToken, ProvidedToken, RenewedToken
from aioflux._auth.sigv4 import presigned_query, presigned_text
from aioflux.errors import CredentialsError, TransientError
from aioflux.options import ANONYMOUS

__all__ = ["NO_PRIVATE_KEY", "AnonymousToken", "GoogleToken", "open_token"]

SCOPES = ("https://www.googleapis.com/auth/devstorage.full_control",)

_OAUTH_CODE = re.compile(r"[a-z_]{1,40}")
_HOW_TO_SIGN_IN = (
    "run 'gcloud auth application-default login', set GOOGLE_APPLICATION_CREDENTIALS to a key "
    f'file, or pass credentials=; for a public bucket pass credentials="{ANONYMOUS}"'
)

NO_PRIVATE_KEY = (
    "has no private key to sign with: pass the key file of a service account as credentials=, or "
    "google.auth.impersonated_credentials.Credentials, which sign with the IAM API"
)


class GoogleToken(RenewedToken):
    """Access token of google-auth credentials."""

    def __init__(self, credentials: Any = None, *, clock: Callable[[], float] = time.time) -> None:
        """Send no request yet. `credentials` of None means Application Default Credentials."""
        super().__init__(clock=clock)
        self._credentials = credentials
        self._project: str | None = None

    async def project(self) -> str:
        """Return the project of the environment or of the credentials; empty if there is none."""
        credentials = await asyncio.to_thread(self._load)
        return self._project or getattr(credentials, "project_id", None) or ""

    async def _refresh(self) -> tuple[str, float]:
        return await asyncio.to_thread(self._refresh_blocking)

    def _load(self) -> Any:
        """Return the credentials; find Application Default Credentials if there are none yet."""
        import google.auth
        from google.auth import exceptions

        if self._credentials is None:
            try:
                self._credentials, self._project = google.auth.default(scopes=SCOPES)
            except exceptions.DefaultCredentialsError as exc:
                raise CredentialsError(
                    f"no Google credentials were found ({_first_sentence(exc)}): {_HOW_TO_SIGN_IN}"
                ) from exc
        return self._credentials

    def _describe(self) -> str:
        # google-auth 2.30 lacks `get_cred_info`.
        info: dict[str, str] = getattr(self._credentials, "get_cred_info", dict)() or {}
        source = info.get("credential_source") or type(self._credentials).__name__
        owner = info.get("principal") or getattr(self._credentials, "service_account_email", "")
        return f"{source}, of {owner}" if owner else source

    async def presign(
        self, method: bytes, path: bytes, query: bytes, host: bytes, *, seconds: int, now: float
    ) -> bytes:
        """Return the query of a signed url (V4); arguments as in `Signer.presign` of `sigv4`.

        Raises:
            CredentialsError: No credentials were found, or they cannot sign.
        """
        return await asyncio.to_thread(
            self._presign_blocking, method, path, query, host, seconds, now
        )

    def _presign_blocking(
        self, method: bytes, path: bytes, query: bytes, host: bytes, seconds: int, now: float
    ) -> bytes:
        from google.auth.credentials import Signing

        algorithm = b"GOOG4-RSA-SHA256"
        timestamp = time.strftime("%Y%m%dT%H%M%SZ", time.gmtime(now)).encode()
        scope = timestamp[:8] + b"/auto/storage/goog4_request"
        credentials = self._load()
        if not isinstance(credentials, Signing):
            raise CredentialsError(f"{type(credentials).__name__} {NO_PRIVATE_KEY}")
        try:
            credential = b"%b/%b" % (credentials.signer_email.encode(), scope)
            added = presigned_query(b"X-Goog", algorithm, credential, timestamp, seconds)
            query = b"%b&%b" % (added, query) if query else added
            text = presigned_text(algorithm, timestamp, scope, method, path, query, host)
            signature: bytes = credentials.sign_bytes(text)  # type: ignore[no-untyped-call]
        except Exception as exc:  # of google-auth, or of requests
            kind = type(exc).__name__
        else:
            return b"%b&X-Goog-Signature=%b" % (query, signature.hex().encode())
        # Not raised in the `except` block, as in `_refresh_blocking`.
        raise CredentialsError(
            f"the Google credentials could not sign ({kind}); impersonated credentials need the "
            "role 'Service Account Token Creator' on the service account"
        )

    def _refresh_blocking(self) -> tuple[str, float]:
        from google.auth import exceptions
        from google.auth.transport.requests import Request

        error: CredentialsError | TransientError | None = None
        try:
            self._load()
            # The token in the caller's credentials is used first. One without an expiry is used
            # until the service rejects it: such credentials may be unable to refresh it.
            is_first_or_endless = self._token is None or self._credentials.expiry is None
            is_usable = is_first_or_endless and not self._is_rejected
            if not (is_usable and self._credentials.valid):
                self._credentials.refresh(Request())
        except exceptions.GoogleAuthError as exc:
            error = _refresh_error(exc)
        if error is not None:
            # Not raised in the `except` block: the error of google-auth, which quotes the response
            # of the token endpoint, would become the `__context__` of this one. The response may
            # repeat the request, with a signed assertion or a refresh token.
            raise error
        expiry = self._credentials.expiry
        # google-auth returns naive times in UTC. Credentials without an expiry are read again after
        # one hour.
        expires_at = expiry.replace(tzinfo=UTC).timestamp() if expiry else self._clock() + 3600.0
        return self._credentials.token, expires_at


def _first_sentence(error: Exception) -> str:
    """Return the first sentence of an error, up to 200 characters: it may name a missing file."""
    text = " ".join(str(error).split())
    return text.partition(". ")[0].rstrip(".")[:200] or type(error).__name__


def _refresh_error(exc: Any) -> CredentialsError | TransientError:
    """Return the error for a failed refresh, with the error code of OAuth (RFC 6749, 5.2)."""
    kind = type(exc).__name__
    if _is_transient(exc):
        return TransientError(
            f"Google credentials could not be refreshed this time ({kind}): the request to the "
            "token endpoint failed"
        )
    code = next((arg["error"] for arg in exc.args if isinstance(arg, dict) and "error" in arg), "")
    if _OAUTH_CODE.fullmatch(str(code)):
        kind = f"{kind}: {code}"
    return CredentialsError(
        f"Google credentials could not be refreshed ({kind}): {_HOW_TO_SIGN_IN}"
    )


def _is_transient(exc: BaseException | None) -> bool:
    """Return whether a refresh failed because of the network or the token endpoint."""
    from google.auth import exceptions

    # Some credentials report a lost connection as the cause of a RefreshError.
    while isinstance(exc, exceptions.GoogleAuthError):
        if isinstance(exc, exceptions.TransportError) or exc.retryable:
            return True
        exc = exc.__cause__
    return False


def open_token(credentials: Any, *, emulator: bool) -> AnonymousToken | ProvidedToken | GoogleToken:
    """Return the token source for the caller's credentials.

    Args:
        credentials: google-auth credentials, the path of a JSON key file, its content as a mapping,
            a function that returns an access token (or an awaitable of one), "anonymous", or None
            for Application Default Credentials.
        emulator: Whether the endpoint is an emulator. Then None means no credentials.

    Raises:
        CredentialsError: The mapping is not the key file of a service account or a user.
        TypeError: `credentials` has a type that is not listed above.
    """
    if credentials is None:
        return AnonymousToken() if emulator else GoogleToken()
    if isinstance(credentials, str) and credentials == ANONYMOUS:
        return AnonymousToken()
    if isinstance(credentials, str | os.PathLike):
        credentials = _read_key_file(credentials)
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
        "credentials must be google-auth credentials, a key file as a path or a mapping, "
        f"{ANONYMOUS!r}, or a function that returns a token, not {type(credentials).__name__}"
    )


def _read_key_file(path: str | os.PathLike[str]) -> Mapping[str, Any]:
    """Return the content of a JSON key file."""
    try:
        with open(path, encoding="utf-8") as file:
            content = json.load(file)
        if isinstance(content, Mapping):
            return content
        reason = "its JSON is not an object"
    except OSError as exc:
        reason = exc.strerror or "it cannot be read"
    except ValueError:
        reason = "it is not JSON"
    # Without the text, which may be a token or a key, and not a path.
    raise CredentialsError(
        f"the text given as credentials= is neither {ANONYMOUS!r} nor the path of a key file: "
        f"{reason}"
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
        # `from None`: the traceback must not contain the key.
        raise CredentialsError(
            "the mapping given as credentials= is not the whole content of a key file of Google "
            "Cloud; pass the result of json.load of the file"
        ) from None
    raise CredentialsError(
        "the mapping given as credentials= is neither the key file of a service account nor that "
        "of a user; for other kinds set GOOGLE_APPLICATION_CREDENTIALS to the file, or pass "
        "google-auth credentials"
    )

"""Azure credentials: account keys (Shared Key signatures), SAS tokens and access tokens.

The Azure SDK is imported only to find an access token; keys and SAS tokens work without it.
Source of the signature: learn.microsoft.com/rest/api/storageservices/authorize-with-shared-key.
Tests compare signatures with those of azure-storage-blob.
"""

from __future__ import annotations

import asyncio
import binascii
import inspect
import re
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from email.utils import formatdate
from typing import Any, NoReturn, TypeAlias
from urllib.parse import parse_qs, quote, urlsplit

from aioflux._auth.access_token import AnonymousToken, Identity, ProvidedToken, RenewedToken
from aioflux._auth.redaction import redact
from aioflux._auth.sigv4 import KeyedHash
from aioflux.errors import CredentialsError, TransientError
from aioflux.options import ANONYMOUS

__all__ = [
    "ANONYMOUS",
    "AzureAccess",
    "AzureToken",
    "SharedKey",
    "is_sas",
    "open_access",
    "parse_connection_string",
    "string_to_sign",
]

SCOPE = "https://storage.azure.com/.default"
DEVELOPMENT_ACCOUNT = "devstoreaccount1"
_DEVELOPMENT_KEY = (
    "Eby8vdM02xNOcqFlqUwJPLlmEtlCDXJ1OUzFT50uSRZ6IFsuFq2UVErCz4I6tq/K1SZFPTOtr/KBHBeksoGMGw=="
)
"""Account key of the development account. It is published, and the same in every emulator
(learn.microsoft.com/azure/storage/common/storage-connect-azurite)."""

_SIGNED = (
    b"content-encoding",
    b"content-language",
    b"content-length",
    b"content-md5",
    b"content-type",
    b"date",
    b"if-modified-since",
    b"if-match",
    b"if-none-match",
    b"if-unmodified-since",
    b"range",
)
_ACCOUNT = re.compile(r"[A-Za-z0-9_-]{1,63}")
"""Names of accounts, which are part of the host name. Other characters would allow a uri to send
the credentials to any host. Azure allows lower-case letters and digits, emulators allow more."""
_SAS = re.compile(r"[!-~]+")
_HOW_TO_SIGN_IN = (
    "run 'az login', set AZURE_STORAGE_CONNECTION_STRING, or pass an account key, a SAS token, a "
    "connection string or a credential of azure-identity as credentials=; for a public container "
    f'pass credentials="{ANONYMOUS}"'
)

Source: TypeAlias = "AnonymousToken | ProvidedToken | AzureToken"


def is_sas(text: str) -> bool:
    """Return whether a text is a SAS token: a query string with a `sig` parameter."""
    return "sig" in parse_qs(text.removeprefix("?"))


def string_to_sign(
    account: str,
    method: bytes,
    path: bytes,
    query: Mapping[str, str],
    headers: Iterable[tuple[bytes, bytes]],
    *,
    num_bytes: int,
) -> bytes:
    """Return the text that an account key signs.

    Args:
        account: Name of the account.
        method: HTTP method.
        path: Path, percent-encoded as it is sent.
        query: Query parameters, not percent-encoded.
        headers: All headers except Host and Content-Length.
        num_bytes: Length of the body, in bytes.
    """
    fields = {name.lower(): value for name, value in headers}
    fields[b"content-length"] = b"%d" % num_bytes if num_bytes else b""
    lines = [method]
    lines += [fields.get(name, b"") for name in _SIGNED]
    azure_names = [name for name in fields if name.startswith(b"x-ms-")]
    lines += [b"%b:%b" % (name, fields[name]) for name in sorted(azure_names, key=_sort_key)]
    lines.append(b"/%b%b" % (account.encode(), path))
    lines += [f"{name.lower()}:{query[name]}".encode() for name in sorted(query)]
    return b"\n".join(lines)


def _sort_key(name: bytes) -> bytes:
    """Return the sort key of a header: the service ignores `-`, and sorts `_` before letters."""
    return name.replace(b"-", b"").replace(b"_", b" ")


class SharedKey:
    """Signer with the key of a storage account. Its repr omits the key; it cannot be pickled."""

    def __init__(self, account: str, key: str, *, clock: Callable[[], float] = time.time) -> None:
        """Decode a key in the form that the portal shows; `clock` returns Unix time, in seconds.

        Raises:
            CredentialsError: The key is not base64.
        """
        try:
            secret = binascii.a2b_base64(key, strict_mode=True)
        except ValueError:
            # `from None`: the traceback must not contain the key.
            raise CredentialsError(
                f"the key of the storage account {account!r} is not base64; copy it whole, as the "
                "portal shows it under 'Access keys'"
            ) from None
        self._key = KeyedHash(secret)
        self._account = account
        self._prefix = f"SharedKey {account}:".encode()
        self._clock = clock
        self._second = 0
        self._date = b""

    def sign(
        self,
        method: bytes,
        path: bytes,
        query: Mapping[str, str],
        headers: Sequence[tuple[bytes, bytes]],
        *,
        num_bytes: int = 0,
    ) -> list[tuple[bytes, bytes]]:
        """Return the headers `x-ms-date` and Authorization of a request that is sent now.

        Arguments as in `string_to_sign`.
        """
        second = int(self._clock())
        if second != self._second:
            self._second, self._date = second, formatdate(second, usegmt=True).encode()
        dated = (b"x-ms-date", self._date)
        text = string_to_sign(
            self._account, method, path, query, (*headers, dated), num_bytes=num_bytes
        )
        signature = binascii.b2a_base64(self._key.sign(text).digest(), newline=False)
        return [dated, (b"Authorization", self._prefix + signature)]

    def sas(
        self, name: str, permissions: str, *, version: str, expires_at: float, is_https: bool
    ) -> str:
        """Return a SAS token for one blob (a service SAS).

        Source: learn.microsoft.com/rest/api/storageservices/create-service-sas.

        Args:
            name: Name of the blob, behind its container and a slash.
            permissions: Letters of the permissions, in the order of the service: `rcwd`.
            version: Version of the API, 2020-12-06 or later.
            expires_at: Unix time at which the token expires, in seconds.
            is_https: Whether the service rejects the token in requests without TLS.
        """
        expiry = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(expires_at))
        protocol = "https" if is_https else ""
        resource = f"/blob/{self._account}/{name}"
        fields = [permissions, "", expiry, resource, "", "", protocol, version, "b", *[""] * 7]
        signature = self._key.sign("\n".join(fields).encode()).digest()
        query = {"se": expiry, "sp": permissions, "spr": protocol, "sv": version, "sr": "b"}
        query["sig"] = binascii.b2a_base64(signature, newline=False).decode()
        return "&".join(f"{name}={quote(value)}" for name, value in query.items() if value)

    def __repr__(self) -> str:
        return f"<SharedKey of {self._account}>"

    def __reduce__(self) -> NoReturn:
        raise TypeError(f"{self!r} holds credentials and cannot be pickled")


class AzureToken(RenewedToken):
    """Access token of an azure-identity credential, or of an object with the same `get_token`."""

    def __init__(self, credential: Any = None, *, clock: Callable[[], float] = time.time) -> None:
        """Initialize without requesting a token.

        Args:
            credential: Object with the method `get_token(scope)`, which may be a coroutine
                function. None for DefaultAzureCredential.
            clock: Returns Unix time, in seconds.
        """
        super().__init__(clock=clock)
        self._credential = credential

    async def _refresh(self) -> tuple[str, float]:
        try:
            if inspect.iscoroutinefunction(getattr(self._credential, "get_token", None)):
                token = await self._credential.get_token(SCOPE)
            else:
                token = await asyncio.to_thread(self._get_token_blocking)
        except Exception as exc:
            if (error := _map_error(exc)) is None:
                raise
        else:
            return token.token, float(token.expires_on)
        # Not raised in the `except` block: the error of the Azure SDK, which quotes the response of
        # the token endpoint, would become the `__context__` of this one.
        raise error

    def _describe(self) -> str:
        return type(self._credential).__name__

    def _get_token_blocking(self) -> Any:
        if self._credential is None:
            self._credential = _default_credential()
        return self._credential.get_token(SCOPE)


def _default_credential() -> Any:
    try:
        from azure.identity import DefaultAzureCredential
    except ImportError as exc:
        from aioflux._values.distribution import pip_install

        raise CredentialsError(
            "azure-identity, which finds the default credentials, is not installed: run "
            f"{pip_install('azure')}, or set AZURE_STORAGE_CONNECTION_STRING, or pass an account "
            "key, a SAS token or a connection string as credentials=; for a public container pass "
            f'credentials="{ANONYMOUS}"'
        ) from exc
    return DefaultAzureCredential()


def _map_error(error: Exception) -> Exception | None:
    """Return the error to raise for an error of the Azure SDK; None for other errors."""
    try:
        from azure.core import exceptions
    except ImportError:
        return None
    name = type(error).__name__
    if isinstance(error, exceptions.ClientAuthenticationError):
        # Only the first line: each kind of credential explains its failure in further lines.
        reason = redact(str(error).strip().partition("\n")[0].rstrip(".:"))[:200]
        return CredentialsError(
            f"Azure returned no access token ({name}: {reason}): {_HOW_TO_SIGN_IN}"
        )
    if isinstance(error, exceptions.AzureError):
        return TransientError(
            f"Azure returned no access token this time ({name}): the request to the token endpoint "
            "failed"
        )
    return None


@dataclass(slots=True)
class AzureAccess:
    """Authorization of requests to one account: a key, a SAS token, an access token, or none."""

    account: str
    """Name of the storage account."""
    key: SharedKey | None = field(default=None, repr=False)
    """Signer of each request, or None."""
    sas: str = field(default="", repr=False)
    """SAS token: query string that is added to each request, without a leading `?`; or empty."""
    token: Source = field(default_factory=AnonymousToken, repr=False)
    """Source of the bearer token; anonymous by default."""
    endpoint_url: str = ""
    """Endpoint of the account's blobs, if the credentials contain it; otherwise empty."""
    source: str = "credentials="
    """Variable that contains key or SAS token, or the argument."""

    async def identity(self) -> Identity:
        """Return the identity of the credentials. Raises the errors of a token source."""
        if self.key is not None:
            return f"account key of {self.source}", None
        if not self.sas:
            return await self.token.identity()
        expiry = parse_qs(self.sas).get("se", ["the end of its access policy"])[0]
        return f"SAS token of {self.source}, valid until {expiry}", None

    def __reduce__(self) -> NoReturn:
        raise TypeError(f"{self!r} holds credentials and cannot be pickled")


def parse_connection_string(text: str) -> dict[str, str]:
    """Return the settings of a connection string, by name in lower case.

    Raises:
        CredentialsError: A part of the text has no `=`.
    """
    settings: dict[str, str] = {}
    for part in filter(None, text.strip().split(";")):
        name, separator, value = part.partition("=")
        if not separator:
            raise CredentialsError(
                "the connection string has a part without '='; it is name=value;name=value, as the "
                "portal shows it under 'Access keys'"
            )
        settings[name.strip().lower()] = value.strip()
    return settings


def _access_of_connection_string(account: str, text: str) -> AzureAccess:
    settings = parse_connection_string(text)
    key, sas = settings.get("accountkey", ""), settings.get("sharedaccesssignature", "")
    name = _account_of_connection_string(settings)
    endpoint = settings.get("blobendpoint", "")
    if settings.get("usedevelopmentstorage", "").lower() == "true":
        name, key = DEVELOPMENT_ACCOUNT, _DEVELOPMENT_KEY
        endpoint = f"http://127.0.0.1:10000/{name}"
    if name and name != account:
        raise CredentialsError(
            f"the connection string belongs to the storage account {name!r}, not to {account!r}"
        )
    if not endpoint and (suffix := settings.get("endpointsuffix")):
        protocol = settings.get("defaultendpointsprotocol", "https")
        endpoint = f"{protocol}://{account}.blob.{suffix}"
    return AzureAccess(
        account,
        key=SharedKey(account, key) if key else None,
        sas="" if key or not sas else _checked_sas(sas),
        endpoint_url=endpoint,
    )


def _account_of_connection_string(settings: Mapping[str, str]) -> str:
    """Return the account of a connection string; empty if the string does not contain it.

    A connection string with a SAS token has no account name. Its endpoint contains the account in
    the host name, or in the path for emulators; a custom domain does not contain the account.
    """
    if name := settings.get("accountname", ""):
        return name
    parts = urlsplit(settings.get("blobendpoint", ""))
    label, _, rest = (parts.hostname or "").partition(".")
    if not rest or rest.replace(".", "").isdigit():
        return parts.path.strip("/")
    is_blob_host = rest.startswith("blob.") or ".blob." in rest
    return label.removesuffix("-secondary") if is_blob_host else ""


def _checked_sas(text: str) -> str:
    """Return a SAS token without surrounding whitespace and without a leading `?`.

    Raises:
        CredentialsError: The token contains a character that a url must not contain.
    """
    token = text.strip().removeprefix("?")
    if _SAS.fullmatch(token) is None:
        raise CredentialsError(
            "the SAS token cannot be sent: it has spaces, line ends or other characters that no "
            "url accepts; copy it again, percent-encoded as the portal shows it"
        )
    return token


def open_access(
    account: str, credentials: Any, *, is_http: bool, environ: Mapping[str, str]
) -> AzureAccess:
    """Return the authorization of requests to an account.

    Environment:
        AZURE_STORAGE_CONNECTION_STRING: Connection string; ignored if it is for another account.
        AZURE_STORAGE_ACCOUNT: Account of the two variables below, which are ignored for other
            accounts.
        AZURE_STORAGE_KEY, AZURE_STORAGE_SAS_TOKEN: Account key, else SAS token.

    Args:
        account: Name of the storage account.
        credentials: One of these:

            * A text: an account key, a SAS token, a connection string, or `ANONYMOUS`.
            * A credential of azure-identity, an AzureNamedKeyCredential or an AzureSasCredential.
            * A function that returns an access token or a SAS token, or an awaitable of one.
            * None: the credentials in the environment, else azure-identity's
              DefaultAzureCredential.
        is_http: Whether the endpoint has no TLS. DefaultAzureCredential is then replaced by the
            published key for the development account, and by no credentials for other accounts.
        environ: The environment variables.

    Raises:
        CredentialsError: The credentials are invalid, or belong to another account.
        TypeError: `credentials` has a type that is not listed above.
        ValueError: `account` is not a valid name.
    """
    if _ACCOUNT.fullmatch(account) is None:
        raise ValueError(
            f"{account!r} is not a valid name of a storage account; write "
            "az://account/container/prefix, and pass a custom endpoint as endpoint_url="
        )
    if credentials is None:
        return _access_of_environment(account, environ) or _default_access(account, is_http=is_http)
    if isinstance(credentials, str):
        return _access_of_text(account, credentials)
    named = getattr(credentials, "named_key", None)
    if named is not None:
        name, key = named
        if name != account:
            raise CredentialsError(f"the key belongs to the account {name!r}, not to {account!r}")
        return AzureAccess(account, key=SharedKey(account, key))
    if isinstance(signature := getattr(credentials, "signature", None), str):
        return AzureAccess(account, sas=_checked_sas(signature))
    if hasattr(credentials, "get_token"):
        return AzureAccess(account, token=AzureToken(credentials))
    if callable(credentials):
        return AzureAccess(account, token=ProvidedToken(credentials))
    raise TypeError(
        "credentials must be text (an account key, a SAS token or a connection string), a "
        "credential of azure-identity, or a function that returns a token, not "
        f"{type(credentials).__name__}"
    )


def _access_of_text(account: str, text: str) -> AzureAccess:
    text = text.strip()  # a text read from a file may end with a newline
    if text == ANONYMOUS:
        return AzureAccess(account)
    if ";" in text or text.lower().startswith("usedevelopmentstorage="):
        return _access_of_connection_string(account, text)
    if is_sas(text):
        return AzureAccess(account, sas=_checked_sas(text))
    return AzureAccess(account, key=SharedKey(account, text))


def _access_of_environment(account: str, environ: Mapping[str, str]) -> AzureAccess | None:
    text = environ.get("AZURE_STORAGE_CONNECTION_STRING", "")
    if text:
        settings = parse_connection_string(text)
        is_development = "usedevelopmentstorage" in settings
        name = DEVELOPMENT_ACCOUNT if is_development else _account_of_connection_string(settings)
        if name in {"", account}:
            access = _access_of_connection_string(account, text)
            return replace(access, source="AZURE_STORAGE_CONNECTION_STRING")
    if environ.get("AZURE_STORAGE_ACCOUNT", "") != account:
        return None
    if key := environ.get("AZURE_STORAGE_KEY", "").strip():
        return AzureAccess(account, key=SharedKey(account, key), source="AZURE_STORAGE_KEY")
    if sas := environ.get("AZURE_STORAGE_SAS_TOKEN", ""):
        return AzureAccess(account, sas=_checked_sas(sas), source="AZURE_STORAGE_SAS_TOKEN")
    return None


def _default_access(account: str, *, is_http: bool) -> AzureAccess:
    if not is_http:
        return AzureAccess(account, token=AzureToken())
    if account == DEVELOPMENT_ACCOUNT:
        key = SharedKey(account, _DEVELOPMENT_KEY)
        return AzureAccess(account, key=key, source="the emulators, which is published")
    return AzureAccess(account)

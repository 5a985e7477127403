"""AWS keys and settings, from the environment, from botocore or from a function of the caller.

botocore runs in a thread. Only this module imports it, and not before the first request to `s3://`
needs keys or settings from it. Keys in environment variables are read without it. The text of
botocore's errors may contain secrets, so messages here contain only the class of such an error.
"""

from __future__ import annotations

import asyncio
import copy
import functools
import importlib.util
import os
import random
import time
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, TypeVar

from aioflux._auth.access_token import CALL_SECONDS, NOT_READY, Identity, NotReady, call_provider
from aioflux._auth.sigv4 import Keys
from aioflux._concurrency.fork_safe_lock import ForkSafeLock
from aioflux._concurrency.single_flight import SingleFlight
from aioflux.errors import CredentialsError, TransientError

if TYPE_CHECKING:
    from aioflux.options import S3Access

__all__ = ["NOT_READY", "AWSSource", "Settings"]

T = TypeVar("T")

_RENEW_SECONDS: Final = 15 * 60
"""Longest time between the renewal of keys and their expiry, in seconds; the shortest is half."""
_UNUSABLE_SECONDS: Final = 60
"""Keys that expire within this time, in seconds, are not used."""
_CHECK_SECONDS: Final = 5.0
"""Time for which keys of botocore are used without another check of their expiry, in seconds."""

_HOW_TO_SIGN_IN: Final = (
    "run 'aws configure' or 'aws sso login', set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY or "
    "AWS_PROFILE, or pass credentials=; for a public bucket pass "
    "credentials=aioflux.S3Access(anonymous=True)"
)
_lock: Final = ForkSafeLock()  # of sessions of the caller, which are not thread-safe
_TRANSIENT_ERRORS: Final = frozenset(
    {
        "ConnectTimeoutError",
        "ConnectionClosedError",
        "ConnectionError",
        "EndpointConnectionError",
        "HTTPClientError",
        "MetadataRetrievalError",
        "ReadTimeoutError",
    }
)
"""Errors of botocore after which another attempt may succeed."""


@dataclass(frozen=True, slots=True)
class Settings:
    """Settings from the environment and the profile, without the keys.

    A setting that neither of them has is empty or False.
    """

    region: str = ""
    endpoint_url: str = ""
    addressing: str = ""
    use_fips: bool = False
    use_dualstack: bool = False
    ca_bundle: str = ""


class AWSSource:
    """Source of the keys and settings of one store.

    Attributes:
        is_anonymous: Whether no keys are used, so that requests are not signed.
    """

    def __init__(self, access: S3Access, *, clock: Callable[[], float] = time.monotonic) -> None:
        """Initialize without reading keys or settings; `clock` is a monotonic clock, in seconds.

        Raises:
            TypeError: `access.credentials` has a type that is not supported.
        """
        self.is_anonymous = access.anonymous
        self._access = access
        self._clock = clock
        self._session: Any = None
        self._credentials: Any = None
        self._provider: Callable[[], Any] | None = None
        self._keys: Keys | None = None
        self._check_at = 0.0
        self._renew_seconds = _RENEW_SECONDS * (1 - random.SystemRandom().random() / 2)
        self._is_rejected = False
        self._renewal: SingleFlight[None] = SingleFlight()
        credentials = access.credentials
        if credentials is None:
            pass
        elif hasattr(credentials, "get_frozen_credentials"):
            self._credentials = credentials
        elif hasattr(credentials, "get_credentials"):
            # A session of boto3 contains a session of botocore.
            self._session = getattr(credentials, "_session", credentials)
        elif callable(credentials):
            self._provider = credentials
        else:
            raise TypeError(
                "credentials must be aioflux.S3Access, botocore credentials, a session of botocore "
                "or boto3, or a function that returns credentials, not "
                f"{type(credentials).__name__}"
            )

    def __repr__(self) -> str:
        return f"<{type(self).__name__}>"

    async def settings(self) -> Settings:
        """Read the settings from the environment and the profile.

        Raises:
            CredentialsError: The profile does not exist or cannot be read, or botocore is needed
                and not installed.
            ValueError: The profile names a `services` section that does not exist.
        """
        is_given = (
            self.is_anonymous
            or self._access.credentials is not None
            or self._keys_of_environment() is not None
        )
        if is_given and self._session is None and not has_profiles():
            return _settings_of_environment()
        return await asyncio.to_thread(self._with_lock, self._find_settings)

    def get_nowait(self) -> Keys | NotReady | None:
        """Return the keys; None if the source is anonymous, `NOT_READY` if `get` must be called."""
        if self._clock() < self._check_at:
            return self._keys
        return None if self.is_anonymous else NOT_READY

    async def get(self) -> Keys | None:
        """Return valid keys, or None if the source is anonymous.

        Raises:
            CredentialsError: No valid credentials were found, or they cannot be refreshed.
            TransientError: The credentials could not be found or refreshed now; another attempt may
                succeed.
        """
        if self.is_anonymous:
            return None
        now = self._clock()
        if now < self._check_at:
            return self._keys
        if self._provider is not None:
            await self._renewal.run(self._call_provider)
            return self._keys
        is_usable = self._keys is not None and not self._is_rejected
        if is_usable and not self._expires_within(self._renew_seconds):
            self._check_at = now + _CHECK_SECONDS
            return self._keys
        self._renewal.start(self._renew)
        if is_usable and not self._expires_within(_UNUSABLE_SECONDS):
            # The old keys are still valid: do not wait for the new keys.
            self._check_at = now + _CHECK_SECONDS
            return self._keys
        await self._renewal.run(self._renew)
        return self._keys

    async def identity(self) -> Identity:
        """Return the identity of the keys. Raises the errors of `get`."""
        keys = await self.get()
        if keys is None:
            return "anonymous", None
        source, key = "AWS_ACCESS_KEY_ID", keys.access_key
        if self._provider is not None:
            source = "the function given as credentials="
        elif self._credentials is not None:
            profile = self._access.profile or os.environ.get("AWS_PROFILE") or "default"
            method = getattr(self._credentials, "method", "credentials=")
            source = f"{method} of botocore, profile {profile}"
        owner = f"{key[:4]}...{key[-4:]}" if len(key) >= 16 else "..."  # AWS has 16 or more
        # botocore has no public name for the expiry of temporary keys.
        expiry = getattr(self._credentials, "_expiry_time", None)
        return f"{source}, key {owner}", expiry and expiry.timestamp()

    def invalidate(self, keys: Keys) -> None:
        """Stop using keys that the service rejected as expired; the next `get` renews them."""
        if keys is self._keys:
            self._is_rejected = True
            self._check_at = 0.0

    async def close(self) -> None:
        """Cancel a running renewal."""
        await self._renewal.aclose()

    def _expires_within(self, seconds: float) -> bool:
        refresh_needed = getattr(self._credentials, "refresh_needed", None)
        return bool(refresh_needed(refresh_in=seconds)) if refresh_needed is not None else False

    async def _call_provider(self) -> None:
        assert self._provider is not None
        returned = await call_provider(self._provider)
        if hasattr(returned, "get_frozen_credentials"):
            returned = await asyncio.to_thread(returned.get_frozen_credentials)
        keys = _as_keys(returned)
        if keys is None:
            raise CredentialsError(
                f"the function given as credentials= returned a {type(returned).__name__}; it must "
                "return botocore credentials or (access_key, secret_key[, token])"
            )
        if self._keys is None or keys != self._keys:
            self._keys = keys
        self._check_at = self._clock() + CALL_SECONDS

    async def _renew(self) -> None:
        keys = self._keys_of_environment() or await asyncio.to_thread(
            self._with_lock, self._find_keys
        )
        if self._keys is None or self._is_rejected or keys != self._keys:
            self._keys = keys
        self._is_rejected = False
        self._check_at = self._clock() + _CHECK_SECONDS

    def _keys_of_environment(self) -> Keys | None:
        """Return the keys of environment variables, if botocore would use them without a profile.

        botocore takes 70 ms of CPU time to import.

        Environment:
            AWS_ACCESS_KEY_ID, AWS_SECRET_ACCESS_KEY, AWS_SESSION_TOKEN: The keys.
            AWS_PROFILE, AWS_DEFAULT_PROFILE, AWS_CREDENTIAL_EXPIRATION: If one is set, botocore
                finds the keys.

        Raises:
            CredentialsError: The access key or the token cannot be sent in a header.
        """
        get = os.environ.get
        names = ("AWS_PROFILE", "AWS_DEFAULT_PROFILE", "AWS_CREDENTIAL_EXPIRATION")
        if self._access.credentials or self._access.profile or any(map(get, names)):
            return None
        token = get("AWS_SECURITY_TOKEN") or get("AWS_SESSION_TOKEN")  # as botocore
        return _as_keys((get("AWS_ACCESS_KEY_ID"), get("AWS_SECRET_ACCESS_KEY"), token))

    def _open_session(self) -> Any:
        if self._session is None:
            try:
                import botocore.session  # type: ignore[import-untyped]
            except ImportError as exc:
                from aioflux._values.distribution import pip_install

                raise CredentialsError(
                    f"s3:// needs botocore to find credentials: {pip_install('s3')}"
                ) from exc
            self._session = botocore.session.Session(
                profile=self._access.profile or None,
                event_hooks=copy.copy(_builtin_handlers()),
                include_builtin_handlers=False,
            )
        return self._session

    def _with_lock(self, find: Callable[[], T]) -> T:
        with _lock.current if self._access.credentials is not None else nullcontext():
            return find()

    def _find_settings(self) -> Settings:
        environment = _settings_of_environment()
        session = self._open_session()
        try:
            profile = session.get_scoped_config()
            services = session.full_config.get("services", {})
            get = session.get_config_variable
            region, ca_bundle = get("region"), get("ca_bundle")
            use_fips, use_dualstack = get("use_fips_endpoint"), get("use_dualstack_endpoint")
            is_ignored = get("ignore_configured_endpoint_urls")
        except Exception as exc:
            if self._access.profile or os.environ.get("AWS_PROFILE"):
                raise CredentialsError(
                    f"the AWS profile could not be read ({type(exc).__name__}): check AWS_PROFILE, "
                    "or S3Access(profile=...), and ~/.aws/config"
                ) from None
            raise CredentialsError(
                f"the AWS profiles could not be read ({type(exc).__name__}): check ~/.aws/config "
                "and ~/.aws/credentials, or the files in AWS_CONFIG_FILE and "
                "AWS_SHARED_CREDENTIALS_FILE"
            ) from None
        s3_section = _section(profile, "s3")
        style = s3_section.get("addressing_style", "")
        endpoint_url = environment.endpoint_url or _service_endpoint(profile, services)
        return Settings(
            region=environment.region or region or "",
            endpoint_url="" if is_ignored else endpoint_url or profile.get("endpoint_url", ""),
            addressing=style if style in {"path", "virtual"} else "",
            use_fips=bool(use_fips),
            use_dualstack=bool(use_dualstack)
            or _is_true(s3_section.get("use_dualstack_endpoint", "")),
            ca_bundle=ca_bundle or "",
        )

    def _find_keys(self) -> Keys:
        try:
            if self._credentials is None:
                self._credentials = self._open_session().get_credentials()
            elif self._is_rejected and self._access.credentials is None:
                # The file or the environment may contain new keys.
                self._session = None
                self._credentials = self._open_session().get_credentials()
            frozen = None
            if self._credentials is not None:
                frozen = self._credentials.get_frozen_credentials()
        except CredentialsError:
            raise
        except Exception as exc:
            names = {each.__name__ for each in type(exc).__mro__}
            if names & _TRANSIENT_ERRORS:
                raise TransientError(
                    f"AWS credentials could not be found or refreshed this time "
                    f"({type(exc).__name__}): their provider did not respond"
                ) from None
            # `from None`: the text of `exc` may contain output of a process, a file or a service.
            raise CredentialsError(
                f"AWS credentials could not be found or refreshed ({type(exc).__name__}): "
                f"{_HOW_TO_SIGN_IN}"
            ) from None
        keys = _as_keys(frozen)
        if keys is None:
            raise CredentialsError(f"no AWS credentials were found: {_HOW_TO_SIGN_IN}")
        return keys


@functools.cache
def _builtin_handlers() -> Any:
    """Return the built-in event handlers of botocore, which contain no keys and no settings.

    Without this function each new session would register the 120 handlers again. That takes 9 of
    the 10 ms in which a session is created. Each session uses a copy, to which it may add handlers.
    """
    import botocore.hooks  # type: ignore[import-untyped]
    import botocore.session

    handlers = botocore.hooks.HierarchicalEmitter()
    botocore.session.Session(event_hooks=handlers)
    return handlers


def _as_keys(credentials: Any) -> Keys | None:
    """Return the keys of a tuple, a list or a credentials object; None if it has no keys.

    Raises:
        CredentialsError: The access key or the token cannot be sent in a header.
    """
    if isinstance(credentials, (tuple, list)) and 2 <= len(credentials) <= 3:
        texts = [*credentials, None][:3]
    else:
        texts = [getattr(credentials, name, None) for name in ("access_key", "secret_key", "token")]
    access_key, secret_key, token = texts
    is_text = isinstance(access_key, str) and isinstance(secret_key, str)
    if not is_text or not access_key or not secret_key or not isinstance(token or "", str):
        return None
    for text in (access_key, token or ""):
        if not text.isascii() or any(not " " < char <= "~" for char in text):
            raise CredentialsError(
                "the AWS access key or session token cannot be sent: it has a space, a line end or "
                "another character that no key contains; copy it again"
            )
    return Keys(access_key, secret_key, token or "")


def _settings_of_environment() -> Settings:
    """Return the settings from environment variables.

    Environment:
        AWS_REGION, AWS_DEFAULT_REGION: Region.
        AWS_ENDPOINT_URL_S3, AWS_ENDPOINT_URL: Url of the endpoint.
        AWS_IGNORE_CONFIGURED_ENDPOINT_URLS: If true, the endpoint is not read.
        AWS_USE_FIPS_ENDPOINT, AWS_USE_DUALSTACK_ENDPOINT: If true, this variant of the endpoint of
            AWS is used.
        AWS_CA_BUNDLE: File with the certificates of trusted authorities.
    """
    get = os.environ.get
    is_ignored = _is_true(get("AWS_IGNORE_CONFIGURED_ENDPOINT_URLS", ""))
    endpoint_url = get("AWS_ENDPOINT_URL_S3") or get("AWS_ENDPOINT_URL") or ""
    return Settings(
        region=get("AWS_REGION") or get("AWS_DEFAULT_REGION") or "",
        endpoint_url="" if is_ignored else endpoint_url,
        use_fips=_is_true(get("AWS_USE_FIPS_ENDPOINT", "")),
        use_dualstack=_is_true(get("AWS_USE_DUALSTACK_ENDPOINT", "")),
        ca_bundle=get("AWS_CA_BUNDLE", ""),
    )


def _is_true(text: str) -> bool:
    """Return whether botocore reads a text as true."""
    return text.lower() == "true"


def has_profiles() -> bool:
    """Return whether a file of profiles exists, and botocore is installed to read it."""
    get = os.environ.get
    paths = (
        get("AWS_CONFIG_FILE") or "~/.aws/config",
        get("AWS_SHARED_CREDENTIALS_FILE") or "~/.aws/credentials",
    )
    has_files = any(os.path.exists(os.path.expanduser(path)) for path in paths)
    return has_files and importlib.util.find_spec("botocore") is not None


def _section(profile: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    """Return a nested section of a profile; empty if it does not exist."""
    section = profile.get(name)
    return section if isinstance(section, dict) else {}


def _service_endpoint(profile: Mapping[str, Any], services: Mapping[str, Any]) -> str:
    """Return the S3 endpoint of the `services` section of a profile; empty if it has none.

    Raises:
        ValueError: The profile names a section that does not exist.
    """
    name = profile.get("services")
    if name is None:
        return ""
    if name not in services:
        raise ValueError(
            f"the AWS profile names services = {name!r}, but ~/.aws/config has no section "
            f"[services {name}]"
        )
    endpoint_url: str = _section(services[name], "s3").get("endpoint_url", "")
    return endpoint_url

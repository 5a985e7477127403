"""Sender of the requests to one bucket of S3: endpoint, access keys, headers, signature.

A request is sent again if the bucket is in another region, if the access keys have expired, or if
the local clock is wrong; S3 rejects such a request before it changes an object.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final

from aioflux._auth.aws import NOT_READY, AWSSource, Settings
from aioflux._auth.redaction import add_secret
from aioflux._auth.sigv4 import EMPTY_HASH, UNSIGNED, Signer, canonical_query
from aioflux._http import FixedHeaders, TransportError, default_context, open_pool
from aioflux._services.responses import PLAIN, Failure, RequestKind
from aioflux._services.s3.endpoint import (
    DEFAULT_REGION,
    endpoint_of,
    region_from_response,
)
from aioflux._services.s3.wire import (
    EXPIRED_CODES,
    SKEWED_CODE,
    generation_from_head,
    service_error,
)
from aioflux._services.sender import (
    USER_AGENT,
    AuthorizedRequest,
    ErrorResponse,
    Sender,
    as_read_error,
    hash_body,
    hide_proxy_credentials,
    resolve_credentials,
)
from aioflux._services.xml_reader import parse_fields
from aioflux._values.uri import check_endpoint
from aioflux.errors import CredentialsError, TransientError

if TYPE_CHECKING:
    import ssl

    from aioflux._http import Origin, Pool, Response
    from aioflux._services.base import ServiceConfig
    from aioflux._services.s3.endpoint import Endpoint
    from aioflux.errors import StorageError
    from aioflux.options import S3Access

_UNSIGNED_HEADERS: Final = FixedHeaders([USER_AGENT])
"""The headers of every request that are not signed."""
_REQUESTER_PAYS: Final = (b"x-amz-request-payer", b"requester")
_MIN_SKEW_SECONDS: Final = 60.0
"""Smallest change of the measured clock skew that justifies another send."""


class S3Sender(Sender):
    """Sender of the requests to one bucket.

    Attributes:
        is_guarded: Whether requests use TLS. Before the first request it is False, unless an
            `endpoint_url` with https was passed.
        endpoint: Endpoint of the bucket; None before the first request.
    """

    _max_sends = 4  # one, and one more for each of the three reasons in the module docstring

    def __init__(
        self,
        config: ServiceConfig,
        access: S3Access,
        *,
        uri: Callable[[str], str],
        on_endpoint: Callable[[], None],
    ) -> None:
        """Initialize; the first request reads the settings of the environment and the profile.

        Args:
            config: Settings that all services have.
            access: Settings that only S3 has.
            uri: Returns the uri of a key, for error messages.
            on_endpoint: Called when the endpoint is found.
        """
        super().__init__(uri)
        self._config = config
        self._bucket = config.location.bucket
        self._access = access
        # Headers of every request to an object; signed if the requests are.
        self._signed_headers = (_REQUESTER_PAYS,) if access.requester_pays else ()
        # Empty for AWS. `_find_endpoint` sets it if the environment or the profile has an endpoint.
        self._endpoint_url = check_endpoint(config.endpoint_url) if config.endpoint_url else ""
        self.endpoint: Endpoint | None = None
        self.is_guarded = self._endpoint_url.startswith("https://")
        self._on_endpoint = on_endpoint
        self._credentials = self._source = AWSSource(access)
        self._signer: Signer | None = None
        self._skew_seconds = 0.0
        self._endpoint_lock: asyncio.Lock | None = None
        self._addressing: str = access.addressing
        self._settings = Settings()
        self._is_closed = False

    async def _authorize(
        self,
        method: bytes,
        target: bytes,
        headers: Sequence[tuple[bytes, bytes]],
        body: Any,
        action: str,
        key: str,
        kind: RequestKind,
    ) -> AuthorizedRequest:
        payload = EMPTY_HASH
        endpoint = self.endpoint or await self._open_endpoint(action, key)
        if body is not None and not self._access.anonymous:
            payload = (
                UNSIGNED
                if endpoint.origin.scheme == "https"
                else (await hash_body("sha256", body)).hex().encode()
            )
        signer = self._signer
        if signer is None or signer.keys is not self._source.get_nowait():
            signer = await self._find_signer(endpoint, action, key)
        return self._sign_request(method, target, headers, payload, endpoint, signer)

    def authorize_nowait(
        self, target: bytes, headers: Sequence[tuple[bytes, bytes]]
    ) -> AuthorizedRequest | None:
        keys, endpoint, signer = self._source.get_nowait(), self.endpoint, self._signer
        if keys is NOT_READY or endpoint is None:
            return None
        if (signer.keys if signer is not None else None) is not keys:
            return None
        return self._sign_request(b"GET", target, headers, EMPTY_HASH, endpoint, signer)

    def _sign_request(
        self,
        method: bytes,
        target: bytes,
        headers: Sequence[tuple[bytes, bytes]],
        payload: bytes,
        endpoint: Endpoint,
        signer: Signer | None,
    ) -> AuthorizedRequest:
        """Return a request, signed if there is a signer; `target` is relative to the bucket."""
        path, _, query = target.partition(b"?")
        path = full_target = endpoint.root + path or b"/"
        if query:
            query = canonical_query(query)
            full_target = b"%b?%b" % (path, query)
        if self._signed_headers:
            headers = (*headers, *self._signed_headers)
        if signer is not None:
            headers = signer.sign(method, path, query, headers, payload)
        return endpoint.origin, full_target, headers, _UNSIGNED_HEADERS, (endpoint, signer)

    def should_resend(
        self, response: Response, credentials: tuple[Endpoint, Signer | None]
    ) -> bool:
        endpoint, signer = credentials
        fields = _fields(response)
        code = fields.get("Code", "")
        region = region_from_response(response.headers, fields)
        if region and region != endpoint.region and response.status in {301, 307, 400, 403}:
            self._set_region(region)
            return True
        if signer is None:
            return False
        if code in EXPIRED_CODES:
            self._source.invalidate(signer.keys)
            return True
        if code == SKEWED_CODE:
            skew = _clock_skew(response.headers.get(b"date", b"").decode("latin-1"))
            if skew is not None and abs(skew - signer.skew_seconds) > _MIN_SKEW_SECONDS:
                self._skew_seconds = skew
                self._signer = None
                return True
        return False

    def _generation_of(self, headers: Mapping[bytes, bytes]) -> str:
        return generation_from_head(headers)

    def _parse_error(self, response: ErrorResponse) -> tuple[str, str]:
        fields = _fields(response)
        return fields.get("Code", ""), fields.get("Message", "")

    def _service_error(self, failure: Failure) -> StorageError:
        return service_error(failure)

    async def presign(
        self, method: bytes, path: bytes, key: str, *, seconds: int, now: float
    ) -> str:
        """Return a presigned url; arguments as in `Signer.presign`, `path` below the bucket."""
        action = "sign a url of"
        *_, (endpoint, signer) = await self._authorize(method, path, (), None, action, key, PLAIN)
        if signer is None:
            raise CredentialsError(
                f"could not {action} {self._uri(key)}: the store was opened with anonymous "
                "credentials; pass credentials that have keys"
            )
        # S3 reads this header from the query of a presigned url.
        query = b"%b=%b" % _REQUESTER_PAYS if self._access.requester_pays else b""
        path = endpoint.root + path
        query = signer.presign(method, path, query, seconds=seconds, now=now)
        return f"{endpoint.origin.url}{path.decode()}?{query.decode()}"

    async def endpoint_url(self) -> str:
        """Return the url of the endpoint; empty for AWS. Sends no request."""
        if self.endpoint is None and not self._endpoint_url:
            settings = await resolve_credentials(
                self._source.settings(), "find the endpoint of", self._uri("")
            )
            return str(settings.endpoint_url)
        return self._endpoint_url

    async def open_server(self) -> tuple[Origin, Pool]:
        endpoint = self.endpoint or await self._open_endpoint("find the endpoint of", "")
        assert self.pool is not None
        return endpoint.origin, self.pool

    async def aclose(self) -> None:
        self._is_closed = True
        if self.pool is not None:
            await self.pool.aclose()
        await self._source.close()

    async def _open_endpoint(self, action: str, key: str) -> Endpoint:
        """Find the endpoint of the bucket, once."""
        if self._endpoint_lock is None:
            self._endpoint_lock = asyncio.Lock()
        async with self._endpoint_lock:
            if self.endpoint is None:
                if self._is_closed:
                    raise self.transport_error(RuntimeError(), action, key)
                self.endpoint = await self._find_endpoint(action, key)
                self.is_guarded = self.endpoint.origin.scheme == "https"
                self._on_endpoint()
        return self.endpoint

    async def _find_endpoint(self, action: str, key: str) -> Endpoint:
        settings = self._settings = await resolve_credentials(
            self._source.settings(), action, self._uri(key)
        )
        endpoint_url = self._endpoint_url
        if not endpoint_url and settings.endpoint_url:
            endpoint_url = self._endpoint_url = check_endpoint(settings.endpoint_url)
        region = self._access.region or settings.region
        if self._access.addressing == "auto" and settings.addressing:
            self._addressing = settings.addressing
        else:
            self._addressing = self._access.addressing
        is_region_unknown = not region and not endpoint_url
        endpoint = self.endpoint_in(region or DEFAULT_REGION)
        if self.pool is None:
            config = self._config
            pool = open_pool(
                endpoint.origin,
                max_idle=config.max_idle,
                timeouts=config.timeouts,
                ssl_context=config.ssl_context or _context_of(settings.ca_bundle),
            )
            self.pool = hide_proxy_credentials(pool)
        return (
            self.endpoint_in(await self._find_region(endpoint, action, key))
            if is_region_unknown
            else endpoint
        )

    def endpoint_in(self, region: str) -> Endpoint:
        """Return the endpoint of the bucket in a region."""
        return endpoint_of(
            self._bucket,
            region=region,
            endpoint_url=self._endpoint_url,
            addressing=self._addressing,
            use_fips=self._settings.use_fips,
            use_dualstack=self._settings.use_dualstack,
        )

    async def _find_region(self, endpoint: Endpoint, action: str, key: str) -> str:
        """Return the region of the bucket, from a request to AWS without credentials.

        If the response names no region, this is the default region.
        """
        assert self.pool is not None
        try:
            response = await self.pool.request(
                endpoint.origin, b"HEAD", endpoint.root + b"/", [], fixed=_UNSIGNED_HEADERS
            )
        except (RuntimeError, TransportError) as exc:
            raise as_read_error(self.transport_error(exc, action, key)) from exc
        region = region_from_response(response.headers, {})
        if region:
            return region
        if response.status == 404:
            raise service_error(Failure(404, action, self._uri(key), "NoSuchBucket"))
        error = as_read_error(self.response_error(response, action, key))
        if isinstance(error, TransientError) or response.status >= 500:
            raise error
        return DEFAULT_REGION

    def _set_region(self, region: str) -> None:
        """Send requests to another region from now on."""
        self.endpoint = self.endpoint_in(region)
        self._signer = None

    async def _find_signer(self, endpoint: Endpoint, action: str, key: str) -> Signer | None:
        """Return the signer of the current keys; None if requests are not signed."""
        keys = self._source.get_nowait()
        if keys is NOT_READY:
            keys = await resolve_credentials(self._source.get(), action, self._uri(key))
        if keys is None:
            return None
        signer = self._signer
        if signer is None or signer.keys is not keys:
            add_secret(keys.secret_key)
            add_secret(keys.token)
            signer = Signer(
                keys,
                region=endpoint.region,
                host=endpoint.origin.authority,
                skew_seconds=self._skew_seconds,
            )
            # `_set_region` may have replaced the endpoint during the await.
            if endpoint is self.endpoint:
                self._signer = signer
        return signer


def _context_of(ca_bundle: str) -> ssl.SSLContext | None:
    """Return TLS settings with the certificate authorities of a file; None without a file."""
    if not ca_bundle:
        return None
    try:
        return default_context(ca_bundle)
    except OSError as exc:  # or its subclass ssl.SSLError
        raise ValueError(
            f"AWS_CA_BUNDLE, or ca_bundle of the profile, names {ca_bundle!r}, but it could not be "
            f"read as certificates: {exc}"
        ) from exc


def _fields(response: ErrorResponse) -> Mapping[str, str]:
    try:
        return parse_fields(response.body)
    except ValueError:
        return {}


def _clock_skew(date: str) -> float | None:
    """Return the seconds that a date is ahead of the local clock; None if it is malformed."""
    from email.utils import parsedate_to_datetime

    try:
        return parsedate_to_datetime(date).timestamp() - time.time()
    except (ValueError, TypeError, OverflowError):
        return None

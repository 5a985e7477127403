"""Sending requests to one bucket of S3: where it is, with which keys, and asked again where told.

Some refusals tell how to ask better: the bucket lives in another region, the keys have ended, the
clock is wrong. The request is then sent again, once for each; it was not carried out before.
"""

from __future__ import annotations

import asyncio
import email.utils
import hashlib
import time
from typing import TYPE_CHECKING, Any, Final

from aioflux._auth.aws import NOT_READY, AWSSource, Settings
from aioflux._auth.sigv4 import EMPTY_HASH, UNSIGNED, Signer, canonical_query
from aioflux._http import FixedHeaders, TransportError, default_context, open_pool
from aioflux._services import xml_multipart as multipart
from aioflux._services.open import checked_endpoint
from aioflux._services.s3.endpoint import DEFAULT_REGION, discovery_site, region_told, site_of
from aioflux._services.s3.errors import EXPIRED_CODES, SKEWED_CODE, refusal
from aioflux._services.s3.read import generation_of_head
from aioflux._services.sender import USER_AGENT, Answer, Call, Sender, Terms, as_read
from aioflux.errors import CredentialsError, TransientError

if TYPE_CHECKING:
    import ssl
    from collections.abc import Callable, Mapping, Sequence

    from aioflux._http import Response
    from aioflux._services.s3.endpoint import Site
    from aioflux.errors import StorageError
    from aioflux.options import S3Access, Timeouts

__all__ = ["S3Sender"]

_FIXED: Final = FixedHeaders([USER_AGENT])
_HASHED_AT_ONCE_BYTES: Final = 256 * 1024
"""Bodies up to this size are hashed on the event loop: 0.2 ms."""
_MIN_SKEW_SECONDS: Final = 60.0


class S3Sender(Sender):
    """Requests to one bucket.

    Attributes:
        is_guarded: Requests go over TLS.
        site: Where the bucket is asked; None before the first request.
    """

    _num_sends = 4

    def __init__(
        self,
        bucket: str,
        *,
        uri: Callable[[str], str],
        access: S3Access,
        endpoint_url: str,
        timeouts: Timeouts,
        max_connections: int,
        ssl_context: ssl.SSLContext | None,
        note_site: Callable[[], None],
    ) -> None:
        super().__init__(uri)
        self.site: Site | None = None
        # A profile may tell another endpoint.
        self.is_guarded = endpoint_url.startswith("https://")
        self._note_site = note_site
        self._bucket = bucket
        self._access = access
        self._endpoint_url = endpoint_url
        self._source = AWSSource(access)
        self._timeouts = timeouts
        self._max_connections = max_connections
        self._ssl_context = ssl_context
        self._signer: Signer | None = None
        self._skew_seconds = 0.0
        self._opening: asyncio.Lock | None = None
        self._addressing = access.addressing
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
        terms: Terms,
    ) -> Call:
        payload = EMPTY_HASH
        site = self.site or await self._open(action, key)
        if body is not None and not self._access.anonymous:
            payload = UNSIGNED if site.origin.scheme == "https" else await _hash(body)
        signer = self._signer
        if signer is None or signer.keys is not self._source.get_nowait():
            signer = await self._find_signer(site, action, key)
        return _call(method, target, headers, payload, site, signer)

    def _authorize_nowait(
        self, target: bytes, headers: Sequence[tuple[bytes, bytes]]
    ) -> Call | None:
        keys, site, signer = self._source.get_nowait(), self.site, self._signer
        if keys is NOT_READY or site is None:
            return None
        if (signer.keys if signer is not None else None) is not keys:
            return None
        return _call(b"GET", target, headers, EMPTY_HASH, site, signer)

    def learn(self, response: Response, signer: tuple[Site, Signer | None]) -> bool:
        site, keys = signer
        fields = _fields(response)
        code = fields.get("Code", "")
        region = region_told(response.headers, fields)
        if region and region != site.region and response.status in {301, 307, 400, 403}:
            self._move(region)
            return True
        if keys is None:
            return False
        if code in EXPIRED_CODES:
            self._source.invalidate(keys.keys)
            return True
        if code == SKEWED_CODE:
            told = response.headers.get(b"date", b"").decode("latin-1")
            skew = _seconds_ahead(told)
            if skew is not None and abs(skew - keys.skew_seconds) > _MIN_SKEW_SECONDS:
                self._skew_seconds = skew
                self._signer = None
                return True
        return False

    def _generation_of(self, headers: Mapping[bytes, bytes]) -> str:
        return generation_of_head(headers)

    def _refusal(
        self, response: Answer, terms: Terms, *, action: str, uri: str, retry_after: str | None
    ) -> StorageError:
        fields = _fields(response)
        return refusal(
            response.status,
            action=action,
            uri=uri,
            code=fields.get("Code", ""),
            detail=fields.get("Message", ""),
            retry_after=retry_after,
            generation=terms.generation,
            is_conditional=terms.is_conditional,
            is_completion=terms.is_completion,
        )

    async def endpoint(self) -> str:
        """Return the url of the endpoint, empty if it is that of AWS. Sends nothing."""
        if self.site is None and not self._endpoint_url:
            told = await self._named(self._source.settings(), "look at", "")
            return str(told.endpoint_url)
        return self._endpoint_url

    async def aclose(self) -> None:
        self._is_closed = True
        if self._pool is not None:
            await self._pool.aclose()
        await self._source.close()

    async def _open(self, action: str, key: str) -> Site:
        """Find out where the bucket is asked, once."""
        if self._opening is None:
            self._opening = asyncio.Lock()
        async with self._opening:
            if self.site is None:
                if self._is_closed:
                    raise self.failed(RuntimeError(), action, key)
                self.site = await self._find_site(action, key)
                self.is_guarded = self.site.origin.scheme == "https"
                self._note_site()
        return self.site

    async def _find_site(self, action: str, key: str) -> Site:
        told = self._settings = await self._named(self._source.settings(), action, key)
        endpoint_url = self._endpoint_url
        if not endpoint_url and told.endpoint_url:
            endpoint_url = self._endpoint_url = checked_endpoint(told.endpoint_url)
        region = self._access.region or told.region
        if self._access.addressing == "auto" and told.addressing:
            self._addressing = told.addressing
        else:
            self._addressing = self._access.addressing
        is_unknown = not region and not endpoint_url
        if is_unknown:
            site = discovery_site(
                self._bucket, use_fips=told.use_fips, use_dualstack=told.use_dualstack
            )
        else:
            site = self._site_in(region or DEFAULT_REGION)
        if self._pool is None:
            self._pool = open_pool(
                site.origin,
                max_connections=self._max_connections,
                timeouts=self._timeouts,
                ssl_context=self._ssl_context or _context_of(told.ca_bundle),
            )
        return self._site_in(await self._discover(site, action, key)) if is_unknown else site

    def _site_in(self, region: str) -> Site:
        return site_of(
            self._bucket,
            region=region,
            endpoint_url=self._endpoint_url,
            addressing=self._addressing,
            use_fips=self._settings.use_fips,
            use_dualstack=self._settings.use_dualstack,
        )

    async def _discover(self, site: Site, action: str, key: str) -> str:
        """Ask AWS for the region of the bucket; it tells everybody."""
        assert self._pool is not None
        try:
            response = await self._pool.request(
                site.origin, b"HEAD", site.root + b"/", [], fixed=_FIXED
            )
        except (RuntimeError, TransportError) as exc:
            raise as_read(self.failed(exc, action, key)) from exc
        region = region_told(response.headers, {})
        if region:
            return region
        if response.status == 404:
            raise refusal(404, action=action, uri=self._uri(key), code="NoSuchBucket")
        error = as_read(self.refused(response, action, key))
        if isinstance(error, TransientError) or response.status >= 500:
            raise error
        return DEFAULT_REGION

    def _move(self, region: str) -> None:
        """Ask in another region from now on."""
        self.site = self._site_in(region)
        self._signer = None

    async def _find_signer(self, site: Site, action: str, key: str) -> Signer | None:
        """Return what signs with the keys that are valid now; None where nothing is signed."""
        keys = self._source.get_nowait()
        if keys is NOT_READY:
            keys = await self._named(self._source.get(), action, key)
        assert keys is not NOT_READY
        if keys is None:
            return None
        signer = self._signer
        if signer is None or signer.keys is not keys:
            signer = Signer(
                keys,
                region=site.region,
                host=site.origin.authority,
                requester_pays=self._access.requester_pays,
                skew_seconds=self._skew_seconds,
            )
            if site is self.site:  # else the bucket was found elsewhere meanwhile
                self._signer = signer
        return signer

    async def _named(self, found: Any, action: str, key: str) -> Any:
        """Await something of credentials; its failure names what needed them."""
        uri = self._uri(key)
        try:
            return await found
        except CredentialsError as exc:
            raise CredentialsError(f"could not {action} {uri}: {exc.message}") from exc
        except TransientError as exc:
            raise TransientError(f"could not {action} {uri}: {exc.message}", uri=uri) from exc


def _context_of(ca_bundle: str) -> ssl.SSLContext | None:
    """Return TLS settings that trust the authorities of a file; None if there is no file.

    Raises:
        ValueError: It cannot be read.
    """
    if not ca_bundle:
        return None
    try:
        return default_context(ca_bundle)
    except OSError as exc:  # ssl.SSLError is one
        raise ValueError(
            f"AWS_CA_BUNDLE, or ca_bundle of the profile, names {ca_bundle!r}, which cannot be "
            f"read as certificates: {exc}"
        ) from exc


def _call(
    method: bytes,
    target: bytes,
    headers: Sequence[tuple[bytes, bytes]],
    payload: bytes,
    site: Site,
    signer: Signer | None,
) -> Call:
    """Return a request as it is sent, signed unless there are no keys."""
    whole = _whole(site, target)
    if signer is not None:
        headers = signer.sign(method, whole, headers, payload)
    return site.origin, whole, headers, _FIXED, (site, signer)


def _whole(site: Site, target: bytes) -> bytes:
    """Return path and query below the server, of those below the bucket, as they are signed."""
    path, _, query = target.partition(b"?")
    path = site.root + path or b"/"
    return b"%b?%b" % (path, canonical_query(query)) if query else path


def _fields(response: Answer) -> Mapping[str, str]:
    try:
        return multipart.parse_fields(response.body)
    except ValueError:
        return {}


async def _hash(body: Any) -> bytes:
    """Hash a body, in a thread where that takes long."""
    pieces = body if isinstance(body, (list, tuple)) else (body,)

    def run() -> bytes:
        digest = hashlib.sha256()
        for piece in pieces:
            digest.update(piece)
        return digest.hexdigest().encode()

    size = sum(memoryview(piece).nbytes for piece in pieces)
    return run() if size <= _HASHED_AT_ONCE_BYTES else await asyncio.to_thread(run)


def _seconds_ahead(date: str) -> float | None:
    """Return what the clock that wrote a date is ahead of ours, or None where it is no date."""
    try:
        return email.utils.parsedate_to_datetime(date).timestamp() - time.time()
    except (ValueError, TypeError, OverflowError):
        return None

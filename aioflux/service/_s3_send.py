"""Sending requests to one bucket of S3: where it is, with which keys, and asked again where told.

Some refusals tell how to ask better: the bucket lives in another region, the keys have ended, the
clock is wrong. The request is then sent again, once for each; it was not carried out before.
"""

from __future__ import annotations

import asyncio
import email.utils
import hashlib
import time
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from aioflux._errors import CredentialsError, StorageError, TransientError
from aioflux.auth._aws import WAIT, AWSSource
from aioflux.auth._sigv4 import EMPTY_HASH, UNSIGNED, Signer
from aioflux.http import (
    CertificateError,
    FixedHeaders,
    ProtocolError,
    TransportError,
    open_pool,
)
from aioflux.service import _multipart as multipart
from aioflux.service._s3_errors import EXPIRED_CODES, SKEWED_CODE, refusal
from aioflux.service._s3_read import generation_of_head
from aioflux.service._s3_site import DEFAULT_REGION, discovery_site, region_told, site_of

if TYPE_CHECKING:
    import ssl
    from collections.abc import Callable, Mapping, Sequence

    from aioflux._access import S3Access
    from aioflux._policy import Timeouts
    from aioflux.http import Connection, RequestPool, Response, Waiter
    from aioflux.service._s3_site import Site
    from aioflux.service._s3_wire import Pin

__all__ = ["Asked", "Sender"]

_FIXED: Final = FixedHeaders([(b"User-Agent", b"aioflux")])
_MAX_ANSWER_BYTES: Final = 64 * 1024 * 1024
"""Longest answer that is not an object."""
_HASHED_AT_ONCE_BYTES: Final = 256 * 1024
"""Bodies up to this size are hashed on the event loop: 0.2 ms."""
_MAX_SENDS: Final = 4
_MIN_SKEW_SECONDS: Final = 60.0


class Asked(NamedTuple):
    """What a request was, as far as its errors depend on it."""

    action: str
    """What is asked, as a verb; errors say it."""
    uri: Callable[[], str]
    """Of what."""
    is_pinned: bool = False
    """A read that is pinned to one content."""
    is_conditional: bool = False
    """A write under a condition."""
    is_completion: bool = False
    """The completion of an upload."""


class Sender:
    """Requests to one bucket.

    Attributes:
        is_guarded: Requests go over TLS.
        site: Where the bucket is asked; None before the first request.
    """

    def __init__(
        self,
        bucket: str,
        *,
        access: S3Access,
        endpoint_url: str,
        timeouts: Timeouts,
        max_connections: int,
        ssl_context: ssl.SSLContext | None,
    ) -> None:
        self.site: Site | None = None
        self.is_guarded = not endpoint_url.startswith("http://")
        self._bucket = bucket
        self._access = access
        self._endpoint_url = endpoint_url
        self._source = AWSSource(access)
        self._timeouts = timeouts
        self._max_connections = max_connections
        self._ssl_context = ssl_context
        self._pool: RequestPool | None = None
        self._signer: Signer | None = None
        self._skew_seconds = 0.0
        self._opening: asyncio.Lock | None = None
        self._addressing = access.addressing
        self._under_way: dict[Connection, tuple[Site, Signer | None]] = {}
        self._is_closed = False

    async def send(
        self,
        method: bytes,
        path: bytes,
        asked: Asked,
        *,
        query: bytes = b"",
        headers: Sequence[tuple[bytes, bytes]] = (),
        body: Any = None,
        into: Any = None,
        max_body_bytes: int | None = _MAX_ANSWER_BYTES,
        accept: int = 0,
        head_seconds: float | None = None,
    ) -> Response:
        """Send one request and return its answer.

        Args:
            method: Method.
            path: Path below the bucket, percent-encoded: empty, or with a slash before it.
            asked: What it is, for errors.
            query: Query, percent-encoded.
            headers: Headers of this request alone; all are signed.
            body: See `Pool.request`, as for `into`, `max_body_bytes` and `head_seconds`.
            into: Where the answer goes.
            max_body_bytes: Longest answer that is taken.
            accept: A status beside 2xx that is an answer.
            head_seconds: Time for the answer to begin.

        Raises:
            StorageError: There is no answer, or it is a refusal.
        """
        payload = EMPTY_HASH
        site = self.site or await self._open(asked)
        if body is not None and not self._access.anonymous:
            payload = UNSIGNED if site.origin.scheme == "https" else await _hash(body)
        for _ in range(_MAX_SENDS):
            target = _target(site, path, query)
            signer = await self._signer_now(site, asked)
            pool = self._pool
            assert pool is not None
            try:
                response = await pool.request(
                    site.origin,
                    method,
                    target,
                    headers if signer is None else signer.sign(method, target, headers, payload),
                    body=body,
                    into=into,
                    max_body_bytes=max_body_bytes,
                    head_seconds=head_seconds,
                    fixed=_FIXED,
                )
            except (RuntimeError, TransportError) as exc:
                raise self.failed(exc, asked) from exc
            if 200 <= response.status < 300 or response.status == accept:
                return response
            if not self.mend(response, site, signer):
                break
            site = self.site or site
        raise self.refused(response, asked)

    def begin(
        self, path: bytes, query: bytes, pin: Pin, byte_range: bytes, *, end: int, waiter: Waiter
    ) -> Connection | None:
        """Begin a GET without a task; None where that cannot be done at once."""
        keys, site, signer = self._source.ready(), self.site, self._signer
        if keys is WAIT or site is None or self._pool is None:
            return None
        if (signer.keys if signer is not None else None) is not keys:
            return None
        target = _target(site, path, query)
        etag = pin.quoted
        if signer is not None:
            lines = signer.read_lines(target, byte_range=byte_range, etag=etag)
        else:
            lines = b"x-amz-checksum-mode: ENABLED\r\n%b%b" % (
                b"If-Match: %b\r\n" % etag if etag else b"",
                b"Range: %b\r\n" % byte_range if byte_range else b"",
            )
        exchange = self._pool.start(
            site.origin, target, _FIXED.encoded + lines, waiter, into=bytes, max_body_bytes=end
        )
        if exchange is not None:
            # The bucket may turn out to be elsewhere before the answer is here.
            self._under_way[exchange] = site, signer
        return exchange

    def end(self, exchange: Connection) -> tuple[Site, Signer | None]:
        """Take back what `begin` gave out, and return where it was asked, and who signed."""
        assert self._pool is not None
        site, signer = self._under_way.pop(exchange)
        self._pool.end(site.origin, exchange)
        return site, signer

    def mend(self, response: Response, site: Site, signer: Signer | None) -> bool:
        """Learn from a refusal how to ask better, and tell whether there is something to learn.

        Args:
            response: The refusal.
            site: Where it was asked.
            signer: Who signed.
        """
        fields = _fields(response)
        code = fields.get("Code", "")
        region = region_told(response.headers, fields)
        if region and region != site.region and response.status in {301, 307, 400, 403}:
            self._move(region)
            return True
        if signer is None:
            return False
        if code in EXPIRED_CODES:
            self._source.refuse(signer.keys)
            return True
        if code == SKEWED_CODE:
            told = response.headers.get(b"date", b"").decode("latin-1")
            skew = _seconds_ahead(told)
            if skew is not None and abs(skew - signer.skew_seconds) > _MIN_SKEW_SECONDS:
                self._skew_seconds = skew
                self._signer = None
                return True
        return False

    def failed(self, exc: Exception, asked: Asked) -> StorageError:
        """Return our error for one of the data plane; the one place where they are mapped."""
        uri = asked.uri()
        if not isinstance(exc, TransportError):
            return StorageError(f"could not {asked.action} {uri}: the store was closed", uri=uri)
        message = f"could not {asked.action} {uri}: {exc}"
        if isinstance(exc, (ProtocolError, CertificateError)):
            return StorageError(message, uri=uri)
        generation = ""
        if exc.head is not None:
            generation = generation_of_head(exc.head.headers)
        return TransientError(
            message,
            uri=uri,
            num_bytes_received=exc.num_bytes_received,
            generation=generation,
            maybe_done=exc.request_sent,
        )

    def refused(self, response: Response, asked: Asked) -> StorageError:
        """Return our error for an answer that is no success."""
        fields = _fields(response)
        retry_after = response.headers.get(b"retry-after")
        return refusal(
            response.status,
            action=asked.action,
            uri=asked.uri(),
            code=fields.get("Code", ""),
            detail=fields.get("Message", ""),
            retry_after=retry_after.decode("latin-1") if retry_after else None,
            is_pinned=asked.is_pinned,
            is_conditional=asked.is_conditional,
            is_completion=asked.is_completion,
        )

    async def aclose(self) -> None:
        """Close connections."""
        self._is_closed = True
        if self._pool is not None:
            await self._pool.aclose()
        await self._source.close()

    async def _open(self, asked: Asked) -> Site:
        """Find out where the bucket is asked, once."""
        if self._opening is None:
            self._opening = asyncio.Lock()
        async with self._opening:
            if self.site is None:
                if self._is_closed:
                    raise self.failed(RuntimeError(), asked)
                self.site = await self._find_site(asked)
        return self.site

    async def _find_site(self, asked: Asked) -> Site:
        told = await self._named(self._source.settings(), asked)
        endpoint_url = self._endpoint_url or told.endpoint_url
        self.is_guarded = not endpoint_url.startswith("http://")
        self._endpoint_url = endpoint_url
        region = self._access.region or told.region
        if self._access.addressing == "auto" and told.addressing:
            self._addressing = told.addressing
        else:
            self._addressing = self._access.addressing
        is_unknown = not region and not endpoint_url
        site = (
            discovery_site(self._bucket) if is_unknown else self._site_in(region or DEFAULT_REGION)
        )
        if self._pool is None:
            self._pool = open_pool(
                site.origin,
                max_connections=self._max_connections,
                timeouts=self._timeouts,
                ssl_context=self._ssl_context,
            )
        return self._site_in(await self._discover(site, asked)) if is_unknown else site

    def _site_in(self, region: str) -> Site:
        return site_of(
            self._bucket,
            region=region,
            endpoint_url=self._endpoint_url,
            addressing=self._addressing,
        )

    async def _discover(self, site: Site, asked: Asked) -> str:
        """Ask AWS for the region of the bucket; it tells everybody."""
        assert self._pool is not None
        try:
            response = await self._pool.request(
                site.origin, b"HEAD", site.root + b"/", [], fixed=_FIXED
            )
        except (RuntimeError, TransportError) as exc:
            raise self.failed(exc, asked) from exc
        region = region_told(response.headers, {})
        if region:
            return region
        if response.status == 404:
            raise refusal(404, action=asked.action, uri=asked.uri(), code="NoSuchBucket", detail="")
        if response.status >= 500 or response.status == 429:
            raise self.refused(response, asked)
        return DEFAULT_REGION

    def _move(self, region: str) -> None:
        """Ask in another region from now on."""
        self.site = self._site_in(region)
        self._signer = None

    async def _signer_now(self, site: Site, asked: Asked) -> Signer | None:
        keys = self._source.ready()
        if keys is WAIT:
            keys = await self._named(self._source.get(), asked)
        assert keys is not WAIT
        if keys is None:
            return None
        signer = self._signer
        if signer is None or signer.keys is not keys:
            signer = self._signer = Signer(
                keys,
                region=site.region,
                host=site.origin.authority,
                requester_pays=self._access.requester_pays,
                skew_seconds=self._skew_seconds,
            )
        return signer

    async def _named(self, found: Any, asked: Asked) -> Any:
        """Await something of credentials; its failure names what needed them."""
        try:
            return await found
        except CredentialsError as exc:
            raise CredentialsError(
                f"could not {asked.action} {asked.uri()}: {exc.message}"
            ) from exc
        except TransientError as exc:
            uri = asked.uri()
            raise TransientError(f"could not {asked.action} {uri}: {exc.message}", uri=uri) from exc


def _target(site: Site, path: bytes, query: bytes) -> bytes:
    path = site.root + path or b"/"
    return b"%b?%b" % (path, query) if query else path


def _fields(response: Response) -> Mapping[str, str]:
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

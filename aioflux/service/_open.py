"""Which service a uri means, opened on the running loop."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

if TYPE_CHECKING:
    import ssl

    from aioflux._policy import Timeouts
    from aioflux._uri import Location
    from aioflux.service._base import Service

__all__ = ["ServiceConfig", "open_service", "resolve_endpoint"]


@dataclass(frozen=True, kw_only=True, slots=True)
class ServiceConfig:
    """What opens a service, before any socket."""

    location: Location
    """Bucket and prefix; the prefix is empty or ends with a slash."""
    timeouts: Timeouts
    """How long one attempt waits."""
    max_connections: int
    """Connections that the data plane keeps."""
    credentials: Any = None
    """As `open_store` takes them."""
    endpoint_url: str | None = None
    """Another endpoint than the service's own."""
    ssl_context: ssl.SSLContext | None = None
    """TLS settings; None for the system's trust store."""
    verify: bool = True
    """Bytes are compared with checksums, also those that only the service knows of."""


def resolve_endpoint(endpoint_url: str | None) -> tuple[str | None, bool]:
    """Return the endpoint for `gs://`, and whether it is asked without credentials.

    The environment variable STORAGE_EMULATOR_HOST (a url, or host:port) stands in where no endpoint
    is given, as it does for Google's own clients.
    """
    if endpoint_url is not None:
        return endpoint_url, endpoint_url.startswith("http://")
    host = os.environ.get("STORAGE_EMULATOR_HOST", "")
    if not host:
        return None, False
    return (host if "://" in host else f"http://{host}"), True


def open_service(config: ServiceConfig) -> Service:
    """Open the service that the location's scheme names.

    Raises:
        ValueError: The scheme has no service here, or a setting has no effect with it.
    """
    location = config.location
    if location.scheme == "gs":
        return _open_gcs(config)
    if location.scheme == "az":
        return _open_azure(config)
    if location.scheme == "s3":
        return _open_s3(config)
    if config.credentials is not None or config.endpoint_url is not None:
        raise ValueError(f"{location} takes neither credentials nor an endpoint_url")
    if location.scheme == "memory":
        from aioflux.service._memory import MemoryService

        return MemoryService(location.bucket, location.key)
    if location.scheme == "file":
        from aioflux.service._local import LocalService

        return LocalService(location.key)
    raise ValueError(f"{location}: aioflux does not yet speak {location.scheme}://")


def _open_gcs(config: ServiceConfig) -> Service:
    from aioflux.service._gcs import DEFAULT_ENDPOINT, GCSService

    endpoint, emulator = resolve_endpoint(config.endpoint_url)
    if endpoint is not None and urlsplit(endpoint).path not in {"", "/"}:
        raise ValueError(f"endpoint_url {endpoint!r} has a path; give scheme, host and port only")
    return GCSService(
        config.location.bucket,
        config.location.key,
        endpoint_url=endpoint or DEFAULT_ENDPOINT,
        emulator=emulator,
        credentials=config.credentials,
        timeouts=config.timeouts,
        max_connections=config.max_connections,
        ssl_context=config.ssl_context,
    )


def _open_azure(config: ServiceConfig) -> Service:
    from aioflux.service._azure import AzureService

    account, _, container = config.location.bucket.partition("/")
    return AzureService(
        account,
        container,
        config.location.key,
        endpoint_url=config.endpoint_url,
        credentials=config.credentials,
        timeouts=config.timeouts,
        max_connections=config.max_connections,
        verify=config.verify,
        ssl_context=config.ssl_context,
    )


def _open_s3(config: ServiceConfig) -> Service:
    from aioflux._access import S3Access
    from aioflux.service._s3 import S3Service

    environment = os.environ.get("AWS_ENDPOINT_URL_S3") or os.environ.get("AWS_ENDPOINT_URL", "")
    endpoint = config.endpoint_url or environment
    if endpoint and urlsplit(endpoint).path not in {"", "/"}:
        raise ValueError(f"endpoint_url {endpoint!r} has a path; give scheme, host and port only")
    access = config.credentials
    return S3Service(
        config.location.bucket,
        config.location.key,
        access=access if isinstance(access, S3Access) else S3Access(credentials=access),
        endpoint_url=endpoint,
        timeouts=config.timeouts,
        max_connections=config.max_connections,
        ssl_context=config.ssl_context,
        verify=config.verify,
    )

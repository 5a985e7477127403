"""The service of a uri, opened on the running loop."""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from aioflux._values.uri import check_endpoint

if TYPE_CHECKING:
    import ssl

    from aioflux._services.base import Service
    from aioflux._values.uri import Location
    from aioflux.options import Timeouts

__all__ = ["ServiceConfig", "open_service", "resolve_endpoint"]


@dataclass(frozen=True, kw_only=True, slots=True)
class ServiceConfig:
    """Settings with which a service is opened."""

    location: Location
    """Bucket and prefix; the prefix is empty or ends with a slash."""
    timeouts: Timeouts
    """How long one attempt waits."""
    max_connections: int
    """Connections of the data plane, at most."""
    credentials: Any = field(default=None, repr=False)
    """As in `open_store`."""
    endpoint_url: str | None = None
    """Url of another endpoint than the service's own."""
    ssl_context: ssl.SSLContext | None = None
    """TLS settings; None for the system's trust store."""
    verify: bool = True
    """Bytes are compared with checksums, those of the service's own kinds included."""


def resolve_endpoint(endpoint_url: str | None) -> tuple[str | None, bool]:
    """Return the endpoint for `gs://`, and whether requests to it have no credentials.

    The environment variable STORAGE_EMULATOR_HOST (a url, or host:port) is the default, as it is
    for Google's own clients.
    """
    if endpoint_url is not None:
        return endpoint_url, endpoint_url.strip().lower().startswith("http://")
    host = os.environ.get("STORAGE_EMULATOR_HOST", "")
    if not host:
        return None, False
    return (host if "://" in host else f"http://{host}"), True


def open_service(config: ServiceConfig) -> Service:
    """Open the service of a location's scheme.

    Raises:
        ValueError: The scheme is not supported, or a setting has no effect with it.
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
        from aioflux._services.memory import MemoryService

        return MemoryService(location.bucket, location.key)
    if location.scheme == "file":
        from aioflux._services.local.service import LocalService

        return LocalService(location.key)
    raise ValueError(f"{location}: unsupported scheme {location.scheme}://")


def _open_gcs(config: ServiceConfig) -> Service:
    from aioflux._services.gcs.service import DEFAULT_ENDPOINT, GCSService

    endpoint, emulator = resolve_endpoint(config.endpoint_url)
    endpoint = None if endpoint is None else check_endpoint(endpoint)
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
    from aioflux._services.azure.service import AzureService

    account, _, container = config.location.bucket.partition("/")
    endpoint = config.endpoint_url
    return AzureService(
        account,
        container,
        config.location.key,
        endpoint_url=check_endpoint(endpoint, may_have_path=True) if endpoint else None,
        credentials=config.credentials,
        timeouts=config.timeouts,
        max_connections=config.max_connections,
        verify=config.verify,
        ssl_context=config.ssl_context,
    )


def _open_s3(config: ServiceConfig) -> Service:
    from aioflux._services.s3.service import S3Service
    from aioflux.options import S3Access

    # Settings of the environment and the profile are read with the first request.
    endpoint = check_endpoint(config.endpoint_url) if config.endpoint_url else ""
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

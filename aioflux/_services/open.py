"""Choice of the service for a location, by the scheme of its uri."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from aioflux.options import as_s3_access

if TYPE_CHECKING:
    from aioflux._services.base import Service, ServiceConfig
    from aioflux._values.uri import Location


def check_credentials(location: Location, credentials: Any) -> None:
    """Raise the error that the service would raise for these credentials; sends no request."""
    if credentials is None:
        return
    if location.scheme == "gs":
        from aioflux._auth.google import open_token

        open_token(credentials, emulator=False)
    elif location.scheme == "s3":
        from aioflux._auth.aws import AWSSource

        AWSSource(as_s3_access(credentials))
    elif location.scheme == "az":
        from aioflux._auth.azure import open_access

        open_access(location.bucket.partition("/")[0], credentials, is_http=False, environ={})


def open_service(config: ServiceConfig) -> Service:
    """Open the service for the scheme of `config.location`, on the running event loop.

    Raises:
        ValueError: The scheme is not supported.
    """
    location = config.location
    if location.scheme == "gs":
        from aioflux._services.gcs.service import GCSService

        return GCSService(config)
    if location.scheme == "s3":
        from aioflux._services.s3.service import S3Service

        return S3Service(config)
    if location.scheme == "az":
        from aioflux._services.azure.service import AzureService

        return AzureService(config)
    if location.scheme == "memory":
        from aioflux._services.memory import MemoryService

        return MemoryService(location.bucket, location.key)
    if location.scheme == "file":
        from aioflux._services.local.service import LocalService

        return LocalService(location.key)
    raise ValueError(f"{location}: unsupported scheme {location.scheme}://")

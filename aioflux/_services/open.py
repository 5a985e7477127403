"""Choice of the service for a location, by the scheme of its uri."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from aioflux._services.base import Service, ServiceConfig

__all__ = ["open_service"]


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

"""Choice of the service for a location, by the scheme of its uri."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any, Final

from aioflux.options import as_gcs_access, as_s3_access

if TYPE_CHECKING:
    from aioflux._services.base import Service, ServiceConfig
    from aioflux._values.uri import Location

_HOSTS: Final = {
    "gs": ("storage.googleapis.com", "STORAGE_EMULATOR_HOST"),
    # The host in requests also has the bucket and the region, and NO_PROXY may name it.
    "s3": ("s3.amazonaws.com", "AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL", "NO_PROXY", "no_proxy"),
    "az": ("{account}.blob.core.windows.net", "AZURE_STORAGE_CONNECTION_STRING"),
}
"""Host of each service, and the variables with which requests may go to another host."""


def check_credentials(location: Location, credentials: Any) -> None:
    """Raise the error that the service would raise for these credentials; sends no request."""
    if credentials is None:
        return
    if location.scheme == "gs":
        from aioflux._auth.google import open_token

        open_token(as_gcs_access(credentials).credentials, emulator=False)
    elif location.scheme == "s3":
        from aioflux._auth.aws import AWSSource

        AWSSource(as_s3_access(credentials))
    elif location.scheme == "az":
        from aioflux._auth.azure import open_access

        open_access(location.bucket.partition("/")[0], credentials, is_http=False, environ={})


def check_proxy(location: Location, credentials: Any, endpoint_url: str | None) -> None:
    """Raise the error that the service would raise for the proxy in the environment.

    Nothing is checked if the endpoint is not known before the first request, because it may be that
    of a connection string, of a profile or of the environment.

    Raises:
        ValueError: The environment names an invalid proxy.
    """
    if location.scheme not in _HOSTS or not any(
        name.lower().endswith("_proxy") for name in os.environ
    ):
        return
    from aioflux._auth.aws import has_profiles
    from aioflux._http import Origin, proxy_for

    if endpoint_url is None:
        host, *variables = _HOSTS[location.scheme]
        is_connection_string = isinstance(credentials, str) and ";" in credentials
        is_profile = location.scheme == "s3" and has_profiles()
        if any(map(os.environ.get, variables)) or is_connection_string or is_profile:
            return
        endpoint_url = f"https://{host.format(account=location.bucket.partition('/')[0])}"
    try:
        origin = Origin.from_url(endpoint_url.strip())
    except ValueError:  # the service raises it with more advice
        return
    proxy_for(origin)


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

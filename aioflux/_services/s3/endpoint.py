"""Endpoints of S3: host, region, and whether the bucket is in the path. No I/O."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING
from urllib.parse import quote, urlsplit

from aioflux._http import Origin

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = [
    "DEFAULT_REGION",
    "Endpoint",
    "endpoint_of",
    "is_amazon",
    "region_from_response",
]

DEFAULT_REGION = "us-east-1"
"""Default region of servers at an `endpoint_url`, and the one that returns the regions of buckets
on AWS."""

_HOST_NAME = re.compile(r"[a-z0-9][a-z0-9-]{1,61}[a-z0-9]")
"""Buckets whose name is one label of a host: with a dot in it, no certificate would cover it."""
_REGION = re.compile(r"[a-z0-9-]{3,40}")
_EXPRESS = "--x-s3"


@dataclass(frozen=True, slots=True)
class Endpoint:
    """Address of one bucket."""

    origin: Origin
    """The server."""
    root: bytes
    """Path of the bucket; empty if its name is in the host."""
    region: str
    """Region that requests are signed for."""


def is_amazon(endpoint_url: str) -> bool:
    """Return whether a url is one of AWS; an empty url is."""
    host = urlsplit(endpoint_url).hostname or ""
    suffixes = (".amazonaws.com", ".amazonaws.com.cn", ".amazonaws.eu")
    return not endpoint_url or f".{host}".endswith(suffixes)


def endpoint_of(
    bucket: str,
    *,
    region: str,
    endpoint_url: str = "",
    addressing: str = "auto",
    use_fips: bool = False,
    use_dualstack: bool = False,
) -> Endpoint:
    """Return the endpoint of a bucket.

    Args:
        bucket: Its name.
        region: Its region.
        endpoint_url: Url of another server than AWS, without a path; empty for AWS.
        addressing: "path", "virtual", or "auto".
        use_fips: Use a FIPS 140 endpoint of AWS; without effect at another server.
        use_dualstack: Use an endpoint of AWS with IPv6; without effect at another server.

    Raises:
        ValueError: The name, the region or the url is not valid.
    """
    if _REGION.fullmatch(region) is None:
        raise ValueError(f"{region!r} is not the name of a region, such as 'eu-central-1'")
    if bucket.endswith(_EXPRESS):
        raise ValueError(
            f"s3://{bucket} is a directory bucket (S3 Express One Zone), which is not supported: "
            "its listings are not sorted, and its requests are signed in another way"
        )
    can_be_host = _HOST_NAME.fullmatch(bucket) is not None
    if addressing == "virtual" and not can_be_host:
        raise ValueError(
            f"the name of s3://{bucket} cannot be a part of a host name; use addressing='path'"
        )
    if not endpoint_url:
        is_china = region.startswith("cn-")
        if use_fips and is_china:
            raise ValueError(
                f"AWS_USE_FIPS_ENDPOINT, or use_fips_endpoint of the profile, is set, but {region} "
                "has no FIPS endpoints"
            )
        suffix = "amazonaws.com.cn" if is_china else "amazonaws.com"
        host = ("s3-fips" if use_fips else "s3") + (".dualstack" if use_dualstack else "")
        endpoint_url = f"https://{host}.{region}.{suffix}"
    if addressing == "auto":
        addressing = "virtual" if is_amazon(endpoint_url) and can_be_host else "path"
    origin = Origin.from_url(endpoint_url)
    if addressing == "virtual":
        origin = Origin(origin.scheme, f"{bucket}.{origin.host}", origin.port)
        return Endpoint(origin, b"", region)
    return Endpoint(origin, f"/{quote(bucket, safe='')}".encode(), region)


def region_from_response(headers: Mapping[bytes, bytes], fields: Mapping[str, str]) -> str:
    """Return the region of the bucket from an error response; empty if it has none."""
    region = headers.get(b"x-amz-bucket-region", b"").decode("latin-1") or fields.get("Region", "")
    return region if _REGION.fullmatch(region) else ""

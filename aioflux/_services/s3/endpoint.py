"""Endpoints of S3: server, region, and the bucket in the host name or in the path. No I/O."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from urllib.parse import quote, urlsplit

from aioflux._http import Origin

DEFAULT_REGION = "us-east-1"
"""Region if none is set: for servers at an `endpoint_url`, and on AWS for the request that finds
the region of a bucket."""

_HOST_NAME = re.compile(r"[a-z0-9][a-z0-9-]{1,61}[a-z0-9]")
"""Bucket names that can be part of a host name. Names with a dot cannot: the wildcard certificate
of AWS covers only one label."""
_REGION = re.compile(r"[a-z0-9-]{3,40}")
_EXPRESS = "--x-s3"


@dataclass(frozen=True, slots=True)
class Endpoint:
    """Address of one bucket."""

    origin: Origin
    """Scheme, host and port of the server."""
    root: bytes
    """Path of the bucket; empty if the host name contains the bucket."""
    region: str
    """Region in the signature of requests."""


def is_amazon(endpoint_url: str) -> bool:
    """Return whether an endpoint is of AWS; an empty url means AWS."""
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
        bucket: Name of the bucket; empty for requests to the account.
        region: Region of the bucket.
        endpoint_url: Url of a server, without a path; empty for AWS.
        addressing: "path" or "virtual": the bucket in the path or in the host name. "auto": in the
            host name if it is one of AWS and the bucket can be part of it.
        use_fips: Use a FIPS 140 endpoint of AWS; no effect with an `endpoint_url`.
        use_dualstack: Use an endpoint of AWS with IPv6; no effect with an `endpoint_url`.

    Raises:
        ValueError: The bucket, the region or the url is not valid, or AWS has no such endpoint.
    """
    if _REGION.fullmatch(region) is None:
        raise ValueError(f"{region!r} is not the name of a region, such as 'eu-central-1'")
    if bucket.endswith(_EXPRESS):
        raise ValueError(
            f"s3://{bucket} is a directory bucket (S3 Express One Zone), which is not supported: "
            "its listings are not sorted, and its requests have another signature"
        )
    can_be_host = _HOST_NAME.fullmatch(bucket) is not None
    if not bucket:
        addressing = "path"
    if addressing == "virtual" and not can_be_host:
        raise ValueError(
            f"the name of s3://{bucket} cannot be part of a host name; use addressing='path'"
        )
    if not endpoint_url:
        is_china = region.startswith("cn-")
        if use_fips and is_china:
            raise ValueError(
                f"AWS_USE_FIPS_ENDPOINT, or use_fips_endpoint of the profile, is set, but {region} "
                "has no FIPS endpoint; unset it"
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
    root = f"/{quote(bucket, safe='')}" if bucket else ""
    return Endpoint(origin, root.encode(), region)


def region_from_response(headers: Mapping[bytes, bytes], fields: Mapping[str, str]) -> str:
    """Return the region of the bucket from a response; empty if the response has no region."""
    region = headers.get(b"x-amz-bucket-region", b"").decode("latin-1") or fields.get("Region", "")
    return region if _REGION.fullmatch(region) else ""

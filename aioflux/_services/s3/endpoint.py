"""Where a bucket of S3 is asked: host, region, and whether the bucket stands in the path. Pure."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING
from urllib.parse import quote, urlsplit

from aioflux._http import Origin

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = ["DEFAULT_REGION", "Site", "discovery_site", "is_amazon", "region_told", "site_of"]

DEFAULT_REGION = "us-east-1"
"""What servers at an endpoint of one's own call their region, and where buckets of AWS are asked
for theirs."""

_HOST_NAME = re.compile(r"[a-z0-9][a-z0-9-]{1,61}[a-z0-9]")
"""Buckets whose name is one label of a host: with a dot in it, no certificate would cover it."""
_REGION = re.compile(r"[a-z0-9-]{3,40}")
_EXPRESS = "--x-s3"


@dataclass(frozen=True, slots=True)
class Site:
    """How the objects of one bucket are addressed."""

    origin: Origin
    """The server."""
    root: bytes
    """Path of the bucket: empty where its name stands in the host."""
    region: str
    """Region that requests are signed for."""
    is_aws: bool
    """It is a host of AWS, which may say that the bucket lives in another region."""


def is_amazon(endpoint_url: str) -> bool:
    """Return whether a url, empty for none, is that of AWS itself."""
    host = urlsplit(endpoint_url).hostname or ""
    suffixes = (".amazonaws.com", ".amazonaws.com.cn", ".amazonaws.eu")
    return not endpoint_url or f".{host}".endswith(suffixes)


def site_of(
    bucket: str,
    *,
    region: str,
    endpoint_url: str = "",
    addressing: str = "auto",
    use_fips: bool = False,
    use_dualstack: bool = False,
) -> Site:
    """Return where a bucket is asked.

    Args:
        bucket: Its name.
        region: Its region.
        endpoint_url: Url of another server than AWS, without a path; empty for AWS.
        addressing: "path", "virtual", or "auto".
        use_fips: Ask a FIPS 140 endpoint of AWS; without effect at another server.
        use_dualstack: Ask an endpoint of AWS that has IPv6; without effect at another server.

    Raises:
        ValueError: The name, the region or the url is none.
    """
    if _REGION.fullmatch(region) is None:
        raise ValueError(f"{region!r} is no name of a region, such as 'eu-central-1'")
    if bucket.endswith(_EXPRESS):
        raise ValueError(
            f"s3://{bucket} is a directory bucket (S3 Express One Zone), which aioflux does not "
            "speak to: its listings are not sorted, and its sessions are signed in another way"
        )
    can_be_host = _HOST_NAME.fullmatch(bucket) is not None
    if addressing == "virtual" and not can_be_host:
        raise ValueError(
            f"the name of s3://{bucket} cannot stand in that of a host; take addressing='path'"
        )
    is_aws = not endpoint_url
    if is_aws:
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
        return Site(origin, b"", region, is_aws)
    return Site(origin, f"/{quote(bucket, safe='')}".encode(), region, is_aws)


def discovery_site(bucket: str, *, use_fips: bool = False, use_dualstack: bool = False) -> Site:
    """Return where AWS is asked for the region of a bucket, by name, without a signature."""
    return site_of(bucket, region=DEFAULT_REGION, use_fips=use_fips, use_dualstack=use_dualstack)


def region_told(headers: Mapping[bytes, bytes], fields: Mapping[str, str]) -> str:
    """Return the region that a refusal says the bucket is in; empty where it tells none.

    Args:
        headers: Headers of the answer, names in lower case.
        fields: Fields of its XML.
    """
    told = headers.get(b"x-amz-bucket-region", b"").decode("latin-1") or fields.get("Region", "")
    return told if _REGION.fullmatch(told) else ""

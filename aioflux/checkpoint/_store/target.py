"""Which store and which key the uri of one object means."""

from __future__ import annotations

from aioflux._values.uri import Location, parse_uri

__all__ = ["split_uri"]


def split_uri(uri: str) -> tuple[str, str]:
    """Return the uri of the store that an object is in, and its key there.

    Raises:
        ValueError: The uri names no object.
    """
    location = parse_uri(uri)
    prefix, slash, key = location.key.rpartition("/")
    if not key:
        raise ValueError(
            f"{uri!r} names no object; write all of it, such as {location.scheme}://bucket/model.pt"
        )
    return str(Location(location.scheme, location.bucket, prefix + slash)), key

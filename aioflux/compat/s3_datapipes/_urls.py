"""Urls of objects as the pipes hand them on, and the store and key that each means. Pure."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple, Self

from aioflux._values.uri import Location, parse_uri

if TYPE_CHECKING:
    from aioflux._values.meta import ObjectMeta

__all__ = ["ListedUrl", "Place", "place_of"]


class ListedUrl(str):
    """The url of an object that was listed: a string, which knows what the listing told.

    Who loads it needs no request for the object's size, and reads the generation that was listed.
    It stays what it is through shuffles, filters, batches and processes.
    """

    __slots__ = ("meta",)

    meta: ObjectMeta
    """What the listing told; its key is relative to the bucket."""

    def __new__(cls, meta: ObjectMeta) -> Self:
        """Make the url of an object."""
        url = super().__new__(cls, meta.uri)
        url.meta = meta
        return url

    def __reduce__(self) -> tuple[type[ListedUrl], tuple[ObjectMeta]]:
        return ListedUrl, (self.meta,)


class Place(NamedTuple):
    """A bucket, as a store is opened on it, and a key or a prefix in it."""

    root: str
    """Uri of the store."""
    key: str
    """Key or prefix below it."""


def place_of(url: str) -> Place:
    """Return the place of an object, or of a prefix.

    A bucket is one store, so that its objects share connections and limits.

    Raises:
        TypeError: It is no string.
        ValueError: It is no uri that aioflux can open.
    """
    location = parse_uri(url)
    root = Location(location.scheme, location.bucket, "/" if location.scheme == "file" else "")
    return Place(str(root), location.key.removeprefix(root.key))

"""Urls of objects between the pipes, and the store and key of each. Pure."""

from __future__ import annotations

from typing import TYPE_CHECKING, Self

if TYPE_CHECKING:
    from aioflux._values.meta import ObjectMeta

__all__ = ["ListedUrl"]


class ListedUrl(str):
    """The url of an object that was listed: a string with the metadata of the object.

    A loader needs no request for the object's size, and reads the generation that was listed. The
    metadata survives shuffles, filters, batches and processes.
    """

    __slots__ = ("meta",)

    meta: ObjectMeta
    """Metadata, as listed; its key is relative to the bucket."""

    def __new__(cls, meta: ObjectMeta) -> Self:
        """Make the url of an object."""
        url = super().__new__(cls, meta.uri)
        url.meta = meta
        return url

    def __reduce__(self) -> tuple[type[ListedUrl], tuple[ObjectMeta]]:
        return ListedUrl, (self.meta,)

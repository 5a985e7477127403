"""From the stored bytes of an object to what a dataset hands out."""

from __future__ import annotations

import gzip
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable

    from aioflux._values.meta import ObjectMeta

__all__ = ["data_format_default", "formatted"]


def data_format_default(data: bytes) -> bytes:
    """Return the bytes as they are."""
    return data


def formatted(meta: ObjectMeta, data: bytes, data_format_fn: Callable[[bytes], Any]) -> Any:
    """Return what a `data_format_fn` makes of the bytes of an object.

    It is given what Google's client would give it: decompressed where stored with
    `Content-Encoding: gzip`. An exception on the way takes a note that names the object.
    """
    try:
        return data_format_fn(gzip.decompress(data) if meta.content_encoding == "gzip" else data)
    except Exception as exc:
        exc.add_note(f"while formatting {meta.uri}")
        raise

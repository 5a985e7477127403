"""Pages of a listing, rendered before the measurement, so that only parsing is measured."""

from __future__ import annotations

from binascii import b2a_base64
from functools import lru_cache
from typing import TYPE_CHECKING

from perf.work import set_key, set_prefix

if TYPE_CHECKING:
    from perf.work import Work

__all__ = ["PAGE_SIZE", "pages"]

PAGE_SIZE = 5000
"""Objects on a page: the maximum that the service returns."""
_FIRST_GENERATION = 1_700_000_000_000_000


def pages(work: Work) -> tuple[bytes, ...]:
    """Return the pages of a set in the JSON API's format, with the fields that aioflux requests.

    Names, generations, etags, checksums and times differ between objects. Content type and storage
    class are the same, as in a set that one program wrote.
    """
    return _rendered(work.size_bytes, work.num_objects)


@lru_cache(maxsize=1)
def _rendered(size_bytes: int, count: int) -> tuple[bytes, ...]:
    starts = range(0, count, PAGE_SIZE)
    return tuple(_page(size_bytes, count, start).encode() for start in starts)


def _page(size_bytes: int, count: int, start: int) -> str:
    end = min(start + PAGE_SIZE, count)
    prefix = set_prefix(size_bytes, count)
    items = ",".join([_item(prefix, size_bytes, index) for index in range(start, end)])
    token = f'"nextPageToken":"{set_key(size_bytes, count, end)}",' if end < count else ""
    return f'{{"kind":"storage#objects",{token}"items":[{items}]}}'


def _item(prefix: str, size_bytes: int, index: int) -> str:
    # Formatted without the json module, which is slow for a million items in each sample.
    crc32c = b2a_base64((index * 2_654_435_761 % 2**32).to_bytes(4, "big"), newline=False).decode()
    return (
        f'{{"name":"{prefix}{index:07d}.bin","generation":"{_FIRST_GENERATION + index}",'
        f'"contentType":"application/octet-stream","storageClass":"STANDARD","size":"{size_bytes}",'
        f'"crc32c":"{crc32c}","etag":"CJ{index:09}EDEAE=",'
        f'"updated":"2026-01-01T00:{index // 60 % 60:02}:{index % 60:02}.{index % 1000:03}Z"}}'
    )

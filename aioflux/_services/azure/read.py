"""Whether an answer to a read is what was asked for: rules over status and headers, no I/O."""

from __future__ import annotations

from typing import TYPE_CHECKING

from aioflux._services import headers as _headers
from aioflux._services.azure.wire import etag_of

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = ["is_whole", "object_size", "range_header", "size_past_the_end"]


def range_header(start: int, end: int | None) -> tuple[bytes, bytes]:
    """Write the header that asks for the bytes `[start, end)`; None means the end of the object."""
    return b"x-ms-range", _headers.byte_range(start, end)


def is_whole(
    status: int, headers: Mapping[bytes, bytes], num_bytes: int, *, end: int, generation: str
) -> bool:
    """Tell whether an answer to a read of `[0, end)` is a whole object, beyond any doubt.

    It is what most answers are, found with less work than `object_size` does, which takes all that
    are taken here. The arguments are as there.
    """
    told = headers.get(b"etag")
    return (
        status == 206
        and 0 < num_bytes <= end
        and headers.get(b"content-range") == b"bytes 0-%d/%d" % (num_bytes - 1, num_bytes)
        and told is not None
        and told not in {b"", b'""'}
        and (not generation or told == b'"%b"' % generation.encode())
    )


def object_size(
    status: int,
    headers: Mapping[bytes, bytes],
    num_bytes: int,
    *,
    start: int,
    end: int | None,
    generation: str,
) -> int:
    """Return the size of the whole object that an answer to a read belongs to, in bytes.

    Takes what `size_from_response` takes, and the generation that was asked for.

    Raises:
        ValueError: The answer is another than the one that was asked for; says how.
    """
    if (
        not start
        and end is not None
        and is_whole(status, headers, num_bytes, end=end, generation=generation)
    ):
        return num_bytes
    told = etag_of(headers)
    if not told or b"x-ms-request-id" not in headers:
        # Such as the page that a hotel's network sends for every url.
        raise ValueError("the answer tells no ETag or request id: Azure did not send it")
    if generation and told != generation:
        raise ValueError(f"the answer is of generation {told}")
    if status == 206 and not start and end is None:
        raise ValueError("a part came where the whole was asked for")
    return _headers.size_from_response(status, headers, num_bytes, start=start, end=end)


def size_past_the_end(headers: Mapping[bytes, bytes], *, start: int) -> int | None:
    """Return the size of the object that an answer without bytes tells, or None if it tells none.

    Args:
        headers: Headers of the answer, names in lower case.
        start: First byte that was asked for: an object that is longer has it.
    """
    part = _headers.parse_content_range(headers)
    if part is None:
        return _headers.size_from_unsatisfied(headers, start=start)
    first, last, size = part
    # An emulator answers 206 with no bytes where the first one asked for is the end.
    return size if first == last + 1 and size <= start else None

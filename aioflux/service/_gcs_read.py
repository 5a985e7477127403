"""Whether an answer to a read is what was asked for: rules over status and headers, no I/O.

An answer that could be other bytes than those asked for is refused, whatever the reason: a service
that ignores ranges, a proxy that compresses, a cache that knows no generations. Ranges have no
checksum of their own, so that nothing later would find it.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = ["is_whole", "object_size", "range_headers", "size_past_the_end"]

_CONTENT_RANGE = re.compile(rb"bytes ([0-9]{1,18})-([0-9]{1,18})/([0-9]{1,18})", re.IGNORECASE)
_UNSATISFIED = re.compile(rb"bytes \*/([0-9]{1,18})", re.IGNORECASE)


def is_whole(
    status: int, headers: Mapping[bytes, bytes], num_bytes: int, *, end: int, generation: str
) -> bool:
    """Tell whether an answer to a read of `[0, end)` is a whole object, beyond any doubt.

    It is what most answers are, found with less work than `object_size` does, which takes all that
    are taken here. The arguments are as there.
    """
    get = headers.get
    told = get(b"x-goog-generation")
    return (
        status == 206
        and 0 < num_bytes <= end
        and get(b"content-range") == b"bytes 0-%d/%d" % (num_bytes - 1, num_bytes)
        and told is not None
        and told != b""
        and (not generation or told == generation.encode())
        and b"content-encoding" not in headers
        and get(b"x-goog-stored-content-encoding", b"identity") == b"identity"
    )


def range_headers(start: int, end: int | None) -> tuple[tuple[bytes, bytes]]:
    """Write the header that asks for the bytes `[start, end)`; None means the end of the object."""
    asked = b"bytes=%d-" % start if end is None else b"bytes=%d-%d" % (start, end - 1)
    return ((b"Range", asked),)


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

    Args:
        status: Status of the answer, 2xx.
        headers: Its headers, names in lower case.
        num_bytes: Length of its body.
        start: First byte that was asked for.
        end: One past the last byte that was asked for, or None for the end of the object.
        generation: Generation that was asked for; empty for any.

    Raises:
        ValueError: The answer is another than the one that was asked for; says how.
    """
    _require_stored_bytes(headers)
    told = headers.get(b"x-goog-generation")
    if not told:
        # Such as the page that a hotel's network sends for every url.
        raise ValueError("the answer tells no generation: Cloud Storage did not send it")
    if generation and told != generation.encode():
        raise ValueError(f"the answer is of generation {told.decode('latin-1')}")
    if status == 200:
        return _whole_size(headers, num_bytes, start, end)
    if status != 206:
        raise ValueError(f"HTTP {status} is no answer to a read")
    if not start and end is None:
        raise ValueError("a part came where the whole was asked for")
    return _part_size(headers, num_bytes, start, end)


def _whole_size(headers: Mapping[bytes, bytes], num_bytes: int, start: int, end: int | None) -> int:
    if start or (end is not None and num_bytes > end):
        raise ValueError("the service ignored the range")
    stored = headers.get(b"x-goog-stored-content-length")
    if stored is not None and stored != b"%d" % num_bytes:
        raise ValueError(f"{num_bytes} bytes came of an object of {stored.decode('latin-1')}")
    return num_bytes


def _part_size(headers: Mapping[bytes, bytes], num_bytes: int, start: int, end: int | None) -> int:
    told = headers.get(b"content-range")
    match = _CONTENT_RANGE.fullmatch(told or b"")
    if match is None:
        # Several parts in one body (multipart/byteranges) name theirs inside of it.
        raise ValueError(f"no part of known size is named by its Content-Range {told!r}")
    first, last, size = map(int, match.groups())
    if not start == first <= last < size or last - first + 1 != num_bytes:
        raise ValueError(f"another part came: {num_bytes} bytes, Content-Range {told!r}")
    if end is not None and last >= end:
        raise ValueError(f"more than was asked for came: Content-Range {told!r}")
    return size


def _require_stored_bytes(headers: Mapping[bytes, bytes]) -> None:
    """Refuse a body that was encoded or decoded on its way.

    Raises:
        ValueError: It was.
    """
    coding = headers.get(b"content-encoding")
    stored = headers.get(b"x-goog-stored-content-encoding")
    if coding is None and (stored is None or stored == b"identity"):
        return
    told = _coding(coding)
    # A service that does not say how it stores an object may have it compressed: that is what
    # `Accept-Encoding: gzip` lets it send.
    if told != _coding(stored) if stored is not None else told not in {"", "gzip"}:
        raise ValueError(
            f"the bytes were changed on their way: Content-Encoding {told or 'identity'!r} of an "
            f"object stored as {_coding(stored) or 'identity'!r}"
        )


def _coding(value: bytes | None) -> str:
    text = (value or b"").decode("latin-1").strip().lower()
    return "" if text == "identity" else text


def size_past_the_end(headers: Mapping[bytes, bytes], *, start: int) -> int | None:
    """Return the size of the object that an answer 416 tells, or None where it cannot be believed.

    Args:
        headers: Headers of the answer, names in lower case.
        start: First byte that was asked for: an object that is longer has it.
    """
    match = _UNSATISFIED.fullmatch(headers.get(b"content-range") or b"")
    if match is None or int(match[1]) > start:
        return None
    return int(match[1])

"""Checks of responses to reads, by status and headers. No I/O.

A response that could hold other bytes than the requested ones is rejected, whatever the reason: a
service that ignores ranges, a proxy that compresses, a cache without generations. Ranges have no
checksum of their own, so that nothing later would find it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from aioflux._services.headers import size_from_response

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = ["is_whole", "object_size"]


def is_whole(
    status: int, headers: Mapping[bytes, bytes], num_bytes: int, *, end: int, generation: str
) -> bool:
    """Return whether a response to a read of `[0, end)` is certainly a whole object.

    Most responses are, and this takes less time than `object_size`, which accepts all of them, too.
    Arguments as there.
    """
    get = headers.get
    found = get(b"x-goog-generation")
    return (
        status == 206
        and 0 < num_bytes <= end
        and get(b"content-range") == b"bytes 0-%d/%d" % (num_bytes - 1, num_bytes)
        and found is not None
        and found != b""
        and (not generation or found == generation.encode())
        and b"content-encoding" not in headers
        and get(b"x-goog-stored-content-encoding", b"identity") == b"identity"
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
    """Return the size of the whole object, in bytes, from a response to a read.

    Arguments as `size_from_response`, and the generation of the read.

    Raises:
        ValueError: It is not the response to this read.
    """
    if (
        not start
        and end is not None
        and is_whole(status, headers, num_bytes, end=end, generation=generation)
    ):
        return num_bytes
    _require_stored_bytes(headers)
    found = headers.get(b"x-goog-generation")
    if not found:
        # Such as the login page of a hotel's network.
        raise ValueError("the response has no generation: it is not from Cloud Storage")
    if generation and found != generation.encode():
        raise ValueError(f"the response is of generation {found.decode('latin-1')}")
    if status == 206 and not start and end is None:
        raise ValueError("a range came in place of the whole object")
    size = size_from_response(status, headers, num_bytes, start=start, end=end)
    stored = headers.get(b"x-goog-stored-content-length") if status == 200 else None
    if stored is not None and stored != b"%d" % num_bytes:
        raise ValueError(f"{num_bytes} bytes came of an object of {stored.decode('latin-1')}")
    return size


def _require_stored_bytes(headers: Mapping[bytes, bytes]) -> None:
    """Raise ValueError if a body was encoded or decoded on its way."""
    coding = headers.get(b"content-encoding")
    stored = headers.get(b"x-goog-stored-content-encoding")
    if coding is None and (stored is None or stored == b"identity"):
        return
    received = _coding(coding)
    # Without the header of the stored encoding, the object may be stored compressed, since requests
    # have `Accept-Encoding: gzip`.
    if received != _coding(stored) if stored is not None else received not in {"", "gzip"}:
        raise ValueError(
            f"the bytes were changed on the way: Content-Encoding {received or 'identity'!r} of "
            f"an object stored as {_coding(stored) or 'identity'!r}"
        )


def _coding(value: bytes | None) -> str:
    text = (value or b"").decode("latin-1").strip().lower()
    return "" if text == "identity" else text

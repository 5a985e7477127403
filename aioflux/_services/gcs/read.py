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

    from aioflux._http import Response
    from aioflux._services.base import ReadRequest

__all__ = ["object_size"]


def object_size(request: ReadRequest, response: Response) -> int:
    """Return the size of the whole object, in bytes, from a response to a read.

    Raises:
        ValueError: It is not the response to this read.
    """
    status, headers, num_bytes = response.status, response.headers, response.num_bytes
    generation, start, end = request.generation, request.start, request.end
    get = headers.get
    found = get(b"x-goog-generation")
    if (
        status == 206
        and not start
        and end is not None
        and 0 < num_bytes <= end
        and get(b"content-range") == b"bytes 0-%d/%d" % (num_bytes - 1, num_bytes)
        and found
        and (not generation or found == generation.encode())
        and b"content-encoding" not in headers
        and get(b"x-goog-stored-content-encoding", b"identity") == b"identity"
    ):
        # A whole object, as most are: this takes less time than the checks below, which accept it.
        return num_bytes
    _require_stored_bytes(headers)
    if not found:
        # Such as the login page of a hotel's network.
        raise ValueError("the response has no generation: it is not from Cloud Storage")
    if generation and found != generation.encode():
        raise ValueError(f"the response is of generation {found.decode('latin-1')}")
    if status == 206 and not start and end is None:
        raise ValueError("a range came in place of the whole object")
    size = size_from_response(request, response)
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

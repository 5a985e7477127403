"""Checks of responses to reads of Google Cloud Storage, by status and headers. No I/O.

A response that may contain wrong bytes is rejected, for example if a service ignored the range, a
proxy compressed the body, or a cache ignored the generation. Later checks can rarely detect wrong
bytes of a range: the service returns only the checksum of the whole object.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from aioflux._services.headers import size_from_response

if TYPE_CHECKING:
    from aioflux._http import Response
    from aioflux._services.base import ReadRequest


def object_size(request: ReadRequest, response: Response) -> int:
    """Return the size of the whole object, in bytes, from a response to a read.

    Raises:
        ValueError: The response does not match the request.
    """
    status, headers, num_bytes = response.status, response.headers, response.num_bytes
    generation, start, end = request.generation, request.start, request.end
    get = headers.get
    received = get(b"x-goog-generation")
    length = b"%d" % num_bytes
    if (
        status == 206
        and not start
        and end is not None
        and 0 < num_bytes <= end
        and get(b"content-range") == b"bytes 0-%d/%b" % (num_bytes - 1, length)
        and get(b"x-goog-stored-content-length", length) == length
        and received
        and (not generation or received == generation.encode())
        and b"content-encoding" not in headers
        and get(b"x-goog-stored-content-encoding", b"identity") == b"identity"
    ):
        # Fast path for the most frequent response, a whole object; the checks below accept it, too.
        return num_bytes
    _require_stored_bytes(headers)
    if not received:
        # The response is, for example, the login page of a public network.
        raise ValueError("the response has no generation: it is not from Cloud Storage")
    if generation and received != generation.encode():
        raise ValueError(
            f"the response has generation {received.decode('latin-1')}, not {generation}"
        )
    if status == 206 and not start and end is None:
        raise ValueError("the service returned a range in place of the whole object")
    size = size_from_response(request, response)
    stored = headers.get(b"x-goog-stored-content-length")
    if stored is not None and stored != b"%d" % size:
        # Otherwise a proxy that lowers the size in Content-Range would shorten the object.
        raise ValueError(
            f"the response is of an object of {size} bytes, but the object has "
            f"{stored.decode('latin-1')}"
        )
    return size


def _require_stored_bytes(headers: Mapping[bytes, bytes]) -> None:
    """Raise ValueError if a body was compressed or decompressed on its way."""
    coding = headers.get(b"content-encoding")
    stored = headers.get(b"x-goog-stored-content-encoding")
    if coding is None and (stored is None or stored == b"identity"):
        return
    received = _coding(coding)
    # Without the header of the stored encoding, the object may be stored as gzip, which requests
    # accept by `Accept-Encoding: gzip`.
    if received != _coding(stored) if stored is not None else received not in {"", "gzip"}:
        expected = "'gzip' or 'identity'" if stored is None else repr(_coding(stored) or "identity")
        raise ValueError(
            f"the bytes were changed on the way: the Content-Encoding is {received or 'identity'!r}"
            f", and the object is stored as {expected}"
        )


def _coding(value: bytes | None) -> str:
    text = (value or b"").decode("latin-1").strip().lower()
    return "" if text == "identity" else text

"""Whether an answer to a read is what was asked for: rules over status and headers, no I/O.

An answer that could be other bytes than those asked for is refused, whatever the reason: a service
that ignores ranges, a proxy that compresses, a cache that knows no generations. Ranges have no
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
    _require_stored_bytes(headers)
    told = headers.get(b"x-goog-generation")
    if not told:
        # Such as the page that a hotel's network sends for every url.
        raise ValueError("the answer tells no generation: Cloud Storage did not send it")
    if generation and told != generation.encode():
        raise ValueError(f"the answer is of generation {told.decode('latin-1')}")
    if status == 206 and not start and end is None:
        raise ValueError("a part came where the whole was asked for")
    size = size_from_response(status, headers, num_bytes, start=start, end=end)
    stored = headers.get(b"x-goog-stored-content-length") if status == 200 else None
    if stored is not None and stored != b"%d" % num_bytes:
        raise ValueError(f"{num_bytes} bytes came of an object of {stored.decode('latin-1')}")
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

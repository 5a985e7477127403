"""What a request means before it is sent: rules over values, shared by both clients."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from aioflux._http.codec import encode_fields

if TYPE_CHECKING:
    from collections.abc import Iterable

    from aioflux.options import Timeouts

__all__ = ["BODY_METHODS", "RESENDABLE", "FixedHeaders", "check_headers", "head_seconds_of"]

RESENDABLE: Final = frozenset((b"GET", b"HEAD"))
"""Sent again where a kept-alive connection turns out to be closed.

Not PUT and DELETE, idempotent as they are (RFC 9110, 9.2.2): under a precondition, a second one
that follows a first whose answer was lost is refused, and only the caller, who knows that there
were two, can tell that from a conflict.
"""
BODY_METHODS: Final = frozenset((b"POST", b"PUT", b"PATCH"))
"""Say so where they have no body; for the others no length means no body (RFC 9110, 8.6)."""

_READS: Final = frozenset((b"GET", b"HEAD"))
_OWN_HEADERS: Final = frozenset((b"host", b"content-length", b"transfer-encoding", b"connection"))


def head_seconds_of(method: bytes, timeouts: Timeouts) -> float:
    """Time for a response to begin: reads are answered from what is stored, writes take work."""
    return timeouts.progress_seconds if method in _READS else timeouts.idle_seconds


def check_headers(headers: Iterable[tuple[bytes, bytes]]) -> None:
    """Refuse the headers that the client answers for.

    Raises:
        ValueError: One of them is among `headers`.
    """
    for name, _ in headers:
        if name.lower() in _OWN_HEADERS:
            raise ValueError(f"the header {name!r} is set by the pool")


class FixedHeaders:
    """Headers that many requests have in common, checked and encoded once.

    Attributes:
        items: Names and values, in the order in which they are sent.
        encoded: Their lines.
    """

    __slots__ = ("encoded", "items")

    def __init__(self, items: Iterable[tuple[bytes, bytes]] = ()) -> None:
        """Take the headers.

        Raises:
            ValueError: One is set by the pool, or could end its line early.
        """
        self.items = tuple(items)
        check_headers(self.items)
        self.encoded = encode_fields(self.items)

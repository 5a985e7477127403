"""Responses without a server, for tests of functions that decode responses."""

from __future__ import annotations

from aioflux._http import Headers, Response

__all__ = ["response"]


def response(status: int, headers: dict[bytes, bytes], num_bytes: int) -> Response:
    """Return a response whose body has `num_bytes`, and was received elsewhere."""
    return Response(status, Headers(headers), b"", num_bytes)

"""Page tokens and page sizes of the JSON API.

A token holds the name where the page before ended, not a position, so that it stays right
when names are added or deleted between two pages.
"""

from __future__ import annotations

import base64
import binascii
from typing import TYPE_CHECKING

from aioflux.testing.gcs_server._errors import APIError, invalid
from aioflux.testing.gcs_server._preconditions import integer

if TYPE_CHECKING:
    from collections.abc import Mapping


def encode_token(name: str) -> str:
    """Make a token of the name where a page ended."""
    return base64.urlsafe_b64encode(name.encode()).decode()


def decode_token(token: str) -> str:
    """Return the name in a token.

    Raises:
        APIError: 400, no page ended in this token.
    """
    try:
        return base64.b64decode(token, altchars=b"-_", validate=True).decode()
    except (binascii.Error, ValueError):
        raise invalid(f"Invalid Value: pageToken {token}") from None


def page_size(query: Mapping[str, str], *, default: int, most: int) -> int:
    """Return how many entries a page may have.

    Raises:
        APIError: 400, `maxResults` is no number or negative.
    """
    size = integer(query, "maxResults")
    if size is not None and size < 0:
        raise APIError(400, "invalidParameter", f"Invalid value for maxResults: {size}")
    return min(size or default, most)

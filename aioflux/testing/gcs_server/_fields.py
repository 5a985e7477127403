"""The `fields` parameter: a mask of the parts of a JSON response to send.

A mask is a tree of field names: `items(name,size),prefixes` selects two fields of each item and
all of `prefixes`. `a/b` is short for `a(b)`, and `*` means every name.
"""

from __future__ import annotations

import re
from functools import lru_cache
from typing import TYPE_CHECKING, Any, TypeAlias

from aioflux.testing.gcs_server._errors import APIError
from aioflux.testing.gcs_server._messages import Request, Response, json_response

if TYPE_CHECKING:
    from collections.abc import Mapping

    from aioflux.testing.gcs_server._messages import Headers

Mask: TypeAlias = "Mapping[str, Mask | None]"
"""Field names, each with the mask below it; None selects everything below."""

_TOKEN = re.compile(r"[^,()/]+|[,()/]")
_MAX_DEPTH = 32


@lru_cache(maxsize=256)
def parse_fields(text: str) -> Mask:
    """Parse a `fields` parameter.

    Raises:
        APIError: 400, it is malformed.
    """
    tokens = [token.strip() for token in _TOKEN.findall(text)]
    tokens.reverse()
    mask = _parse_list(tokens, 0)
    if tokens:
        raise _invalid_selection(text)
    return mask


def select(value: Any, mask: Mask | None) -> Any:
    """Return the parts of a JSON value that a mask selects."""
    if mask is None:
        return value
    if isinstance(value, list):
        return [select(item, mask) for item in value]
    if not isinstance(value, dict):
        return value
    everything = "*" in mask
    return {
        name: select(below, mask.get(name, mask.get("*")))
        for name, below in value.items()
        if everything or name in mask
    }


def resource_response(
    request: Request, value: dict[str, Any], *, headers: Headers = ()
) -> Response:
    """Build a response with a resource, or with the parts of it that `fields` selects.

    Raises:
        APIError: 400, `fields` is malformed.
    """
    fields = request.query.get("fields")
    return json_response(select(value, parse_fields(fields)) if fields else value, headers=headers)


def _parse_list(tokens: list[str], depth: int) -> Mask:
    """Parse `item,item,...` off the end of the reversed tokens, up to `)` or their end."""
    mask: dict[str, Mask | None] = {}
    while True:
        name, below = _parse_item(tokens, depth)
        mask[name] = _union(mask[name], below) if name in mask else below
        if not tokens or tokens[-1] != ",":
            return mask
        tokens.pop()


def _parse_item(tokens: list[str], depth: int) -> tuple[str, Mask | None]:
    """Parse `name`, `name/item` or `name(list)`."""
    if not tokens or tokens[-1] in ",()/" or depth > _MAX_DEPTH:
        raise _invalid_selection("".join(reversed(tokens)))
    name = tokens.pop()
    follows = tokens[-1] if tokens else ""
    if follows == "/":
        tokens.pop()
        inner, below = _parse_item(tokens, depth + 1)
        return name, {inner: below}
    if follows == "(":
        tokens.pop()
        below = _parse_list(tokens, depth + 1)
        if not tokens or tokens.pop() != ")":
            raise _invalid_selection(name)
        return name, below
    return name, None


def _union(first: Mask | None, second: Mask | None) -> Mask | None:
    """Return the mask that selects what either of two selects."""
    if first is None or second is None:
        return None
    merged = dict(first)
    for name, below in second.items():
        merged[name] = _union(merged[name], below) if name in merged else below
    return merged


def _invalid_selection(text: str) -> APIError:
    return APIError(400, "invalidParameter", f"Invalid field selection {text}")

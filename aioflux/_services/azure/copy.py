"""Copies in the background, by the service."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from aioflux._services.azure import wire
from aioflux.errors import PreconditionFailedError, TransientError

if TYPE_CHECKING:
    from aioflux._http import Response
    from aioflux._services.azure.sender import AzureSender

__all__ = ["wait_for_copy"]

_POLL_SECONDS = (0.05, 2.0)
"""Interval of polling a copy: first and longest."""


async def wait_for_copy(
    sender: AzureSender, path: bytes, response: Response, *, action: str, key: str, uri: str
) -> Response:
    """Wait until a copy is done, and return the response with its result.

    Args:
        sender: Sends requests.
        path: Path of the copy.
        response: Response to the request for the copy.
        action: Verb for errors.
        key: Key of the copy.
        uri: Its whole uri.

    Raises:
        PreconditionFailedError: Another writer wrote it meanwhile.
        TransientError: It failed.
    """
    seconds, most = _POLL_SECONDS
    copy_id = response.headers.get(b"x-ms-copy-id")
    while (state := response.headers.get(b"x-ms-copy-status")) == b"pending":
        await asyncio.sleep(seconds)
        seconds = min(2 * seconds, most)
        response = await sender.send(b"HEAD", path, action, key)
    if response.headers.get(b"x-ms-copy-id") != copy_id:
        raise PreconditionFailedError(
            f"could not {action} {uri}: another writer wrote it meanwhile", uri=uri
        )
    if state != b"success" or not wire.etag_of(response.headers):
        description = response.headers.get(b"x-ms-copy-status-description", b"").decode("latin-1")
        status = (state or b"without status").decode("latin-1")
        raise TransientError(
            f"could not {action} {uri}: the copy is {status} {description}".rstrip(),
            uri=uri,
            maybe_done=True,
        )
    return response

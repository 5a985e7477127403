"""Deleting many objects of S3 with one request."""

from __future__ import annotations

from typing import TYPE_CHECKING

from aioflux._services.http import DELETE_SECONDS
from aioflux._services.s3 import wire
from aioflux.errors import TransientError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from aioflux._services.s3.sender import S3Sender

__all__ = ["delete_many"]


async def delete_many(
    sender: S3Sender, rows: Sequence[tuple[str, wire.Pin]], *, uri: str
) -> Mapping[str, tuple[str, str]]:
    """Delete objects, and return code and words for each name that could not be deleted.

    Args:
        sender: Asks the service.
        rows: Whole names, which XML can hold, each with the content that is deleted.
        uri: Of what they are, for errors.
    """
    action = "delete objects of"
    body = wire.delete_body(rows)
    response = await sender.send(
        b"POST",
        b"?delete",
        action,
        "",
        headers=[(b"Content-Type", b"application/xml"), wire.digest_header(body)],
        body=body,
        head_seconds=DELETE_SECONDS,
    )
    try:
        return wire.parse_deletions(response.body)
    except ValueError as exc:
        raise TransientError(
            f"could not {action} {uri}: the answer is none ({exc})", uri=uri, maybe_done=True
        ) from exc

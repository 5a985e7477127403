"""Clean-up after dead processes: open multipart uploads, temporary objects and composites.

    list uploads, list objects -> select stale (pure) -> abort, delete (pinned to the generation)

A dead process looks the same as a slow one, so the age decides: an upload that is still in progress
after `older_than_seconds` is aborted too, and its writer fails.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from aioflux._concurrency.fan_out import bounded_map
from aioflux._services.base import Source
from aioflux._transfer.delete import delete_many
from aioflux._transfer.list import list_pages
from aioflux._transfer.temp_keys import COMPOSITE_PREFIX, stale_objects, stale_uploads
from aioflux._values.meta import CleanResult
from aioflux.errors import StorageError

if TYPE_CHECKING:
    from collections.abc import Sequence
    from datetime import datetime

    from aioflux._transfer.session import Session
    from aioflux._values.meta import ObjectMeta, OpenUpload

__all__ = ["clean"]


async def clean(
    session: Session, prefix: str, *, now: datetime, older_than_seconds: float, dry_run: bool
) -> CleanResult:
    """Abort stale uploads and delete stale temporary objects below a prefix.

    There are no uploads below `COMPOSITE_PREFIX`, so cleaning it needs no permission to list them.
    """
    open_uploads: Sequence[OpenUpload] = ()
    if f"/{COMPOSITE_PREFIX}" not in f"/{prefix}":
        open_uploads = await session.call(prefix, lambda _: session.service.list_uploads(prefix))
    uploads = stale_uploads(open_uploads, now=now, older_than_seconds=older_than_seconds)
    uploads.sort(key=lambda upload: (upload.key, upload.upload_id))
    objects: list[ObjectMeta] = []
    async for page in list_pages(session, prefix, with_temporary=True):
        objects += stale_objects(page, now=now, older_than_seconds=older_than_seconds)
    if dry_run:
        return CleanResult(aborted=tuple(uploads), removed=tuple(meta.key for meta in objects))
    errors: dict[str, StorageError] = {}

    async def abort(upload: OpenUpload) -> OpenUpload | None:
        try:
            await session.call(
                upload.key, lambda _: session.service.abort_upload(upload.key, upload.upload_id)
            )
        except StorageError as exc:
            errors[upload.key] = exc
            return None
        return upload

    most = session.options.max_in_flight
    aborted = [upload async for upload in bounded_map(abort, uploads, max_in_flight=most)]
    sources = [Source(key=meta.key, generation=meta.generation) for meta in objects]
    deleted = await delete_many(session, sources, max_in_flight=most)
    return CleanResult(
        aborted=tuple(upload for upload in aborted if upload is not None),
        removed=deleted.deleted,
        errors=errors | dict(deleted.errors),
    )

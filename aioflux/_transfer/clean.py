"""Clean-up after dead processes: open multipart uploads, temporary objects and composites.

    list uploads, list objects -> select stale (pure) -> abort, delete (pinned to the generation)

A dead process looks the same as a slow one, so the age decides: an upload that is still in progress
after `older_than_seconds` is aborted too, and its writer fails. Objects that a manifest lists are
kept, and for readers of the manifest that it may have replaced, those of a manifest that is young.
Manifests are read after the listing, so that a write that commits meanwhile is complete.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from aioflux._concurrency.fan_out import bounded_map
from aioflux._services.base import Source
from aioflux._transfer.delete import delete_many
from aioflux._transfer.get import fetch
from aioflux._transfer.list import list_pages
from aioflux._transfer.temp_keys import (
    COMPOSITE_PREFIX,
    WRITTEN_PREFIX,
    is_temporary,
    stale_objects,
    stale_uploads,
)
from aioflux._values.listing import Listing
from aioflux._values.meta import CleanResult
from aioflux.errors import NotFoundError, StorageError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
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
    metas: list[ObjectMeta] = []
    async for page in list_pages(session, prefix, with_temporary=True):
        metas += (page[index] for index, key in enumerate(page.keys) if is_temporary(key))
    errors: dict[str, StorageError] = {}
    objects: list[ObjectMeta] = []
    stale = stale_objects(metas, now=now, older_than_seconds=older_than_seconds)

    def is_young(time: datetime | None) -> bool:
        return time is not None and (now - time).total_seconds() < older_than_seconds

    for manifest, group in stale.items():
        if manifest is not None:
            unlisted = await _unlisted(session, manifest, group, is_young, errors)
        objects += group if manifest is None else unlisted
    objects.sort(key=lambda meta: meta.key)
    if dry_run:
        removed = tuple(meta.key for meta in objects)
        return CleanResult(aborted=tuple(uploads), removed=removed, errors=errors)

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


async def _unlisted(
    session: Session,
    manifest: str,
    metas: list[ObjectMeta],
    is_young: Callable[[datetime | None], bool],
    errors: dict[str, StorageError],
) -> list[ObjectMeta]:
    """Return the objects that a manifest does not list; none if it is damaged or young."""
    try:
        fetched = await fetch(session, manifest)
        listing = Listing.from_bytes(fetched.data)
    except NotFoundError:
        return metas
    except (ValueError, StorageError) as exc:
        uri = session.service.uri(manifest)
        message = f"kept {len(metas)} objects, since {uri} may list them: {exc}"
        errors[manifest] = StorageError(message, uri=uri)
        return []
    if is_young(fetched.meta().updated):
        return []
    listed = {_name(meta) for meta in listing}
    return [meta for meta in metas if _name(meta) not in listed]


def _name(meta: ObjectMeta) -> str:
    """Return the unique part of a uri. A directory, or a copy of it, can have another path."""
    return meta.uri.rpartition(f"/{WRITTEN_PREFIX}")[2]

"""Clean-up after dead processes: open uploads, temporary objects, data objects without a manifest.

    list uploads, list objects -> select stale (pure) -> read manifests
        -> abort, delete (pinned to the generation)

A dead process looks the same as a slow one, so the age decides: an upload that is still in progress
after `older_than_seconds` is aborted too, and its writer fails. Data objects of `write_objects` are
kept if a manifest of their dataset lists their attempt. If a manifest is young, all are kept, for
readers of the manifest that it may have replaced. Manifests are listed and read after the objects,
so that a write that commits meanwhile is complete.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import datetime
from typing import TYPE_CHECKING

from aioflux._concurrency.fan_out import bounded_map
from aioflux._services.base import Source
from aioflux._transfer.delete import delete_many
from aioflux._transfer.list import list_all, list_pages
from aioflux._transfer.read import fetch
from aioflux._transfer.temp_keys import (
    COMPOSITE_PREFIX,
    is_temporary,
    stale_objects,
    stale_uploads,
)
from aioflux._values.dataset_keys import MANIFEST_KEY, WrittenKey
from aioflux._values.listing import Listing
from aioflux._values.meta import CleanResult
from aioflux.errors import NotFoundError, StorageError

if TYPE_CHECKING:
    from aioflux._transfer.session import Session
    from aioflux._values.meta import ObjectMeta, OpenUpload


async def clean(
    session: Session, prefix: str, *, now: datetime, older_than_seconds: float, dry_run: bool
) -> CleanResult:
    """Abort stale uploads, and delete stale temporary and data objects below a prefix.

    There are no uploads below `COMPOSITE_PREFIX`, so cleaning it needs no permission to list them.
    """
    open_uploads: Sequence[OpenUpload] = ()
    if f"/{COMPOSITE_PREFIX}" not in f"/{prefix}":
        open_uploads = await session.call(prefix, session.service.list_uploads, prefix)
    uploads = stale_uploads(open_uploads, now=now, older_than_seconds=older_than_seconds)
    uploads.sort(key=lambda upload: (upload.key, upload.upload_id))
    metas: list[ObjectMeta] = []
    async for page in list_pages(session, prefix, with_temporary=True):
        metas += (
            page[index]
            for index, key in enumerate(page.keys)
            if is_temporary(key) or WrittenKey.parse(key).attempt
        )
    errors: dict[str, StorageError] = {}
    objects: list[ObjectMeta] = []
    stale = stale_objects(metas, now=now, older_than_seconds=older_than_seconds)

    def is_young(time: datetime | None) -> bool:
        return time is not None and (now - time).total_seconds() < older_than_seconds

    for dataset, group in stale.items():
        if dataset is not None:
            unlisted = await _unlisted(session, dataset, group, is_young, errors)
        objects += group if dataset is None else unlisted
    objects.sort(key=lambda meta: meta.key)
    if dry_run:
        removed = tuple(meta.key for meta in objects)
        return CleanResult(aborted=tuple(uploads), removed=removed, errors=errors)

    async def abort(upload: OpenUpload) -> OpenUpload | None:
        try:
            await session.call(
                upload.key, session.service.abort_upload, upload.key, upload.upload_id
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
    dataset: str,
    metas: list[ObjectMeta],
    is_young: Callable[[datetime | None], bool],
    errors: dict[str, StorageError],
) -> list[ObjectMeta]:
    """Return the objects of attempts that no manifest of a dataset lists.

    None are returned if a manifest is young, or cannot be read.
    """
    listed: set[str] = set()
    for manifest in (await list_all(session, dataset + MANIFEST_KEY, delimiter="/")).keys:
        try:
            fetched = await fetch(session, manifest)
            keys = Listing.from_bytes(fetched.data).keys
        except NotFoundError:
            continue
        except (ValueError, StorageError) as exc:
            uri = session.service.uri(manifest)
            message = f"kept {len(metas)} objects, since {uri} may list them: {exc}"
            errors[manifest] = StorageError(message, uri=uri)
            return []
        if is_young(fetched.meta().updated):
            return []
        listed.update(WrittenKey.parse(key).attempt for key in keys)
    return [meta for meta in metas if WrittenKey.parse(meta.key).attempt not in listed]

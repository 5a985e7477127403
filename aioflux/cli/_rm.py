"""`aioflux rm`: deletes objects."""

from __future__ import annotations

from contextlib import aclosing
from typing import TYPE_CHECKING, Annotated

import typer

from aioflux.cli._loop import run
from aioflux.cli._ls import find
from aioflux.cli._output import tell
from aioflux.cli._place import (
    Access,
    Anonymous,
    Endpoint,
    check_places,
    open_place,
    parse_place,
    uri_of,
)
from aioflux.cli._report import Report
from aioflux.cli._text import describe, format_count, one_line

if TYPE_CHECKING:
    from collections.abc import Sequence

    from aioflux._meta import ObjectMeta
    from aioflux.cli._place import Place
    from aioflux.store import Store

__all__ = ["rm"]


def rm(
    uris: Annotated[list[str], typer.Argument(metavar="URI...", help="Objects, or prefixes.")],
    *,
    recursive: Annotated[
        bool, typer.Option("-r", "--recursive", help="All objects below the prefixes.")
    ] = False,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Print what would be deleted, and delete nothing.")
    ] = False,
    endpoint_url: Endpoint = None,
    anonymous: Anonymous = False,
) -> int:
    """Delete objects. One that cannot be deleted does not keep the others.

    With -r, "gs://b/p" means all below "p/", or the object "p" where nothing is. Each object is
    deleted in the generation that was listed: one that is replaced meanwhile stays, and is named.
    """
    places = [parse_place(uri) for uri in uris]
    access = Access(endpoint_url, anonymous)
    check_places(places, access)
    report = Report()
    remover = _Remover(report, dry_run=dry_run)

    async def work() -> int:
        for place in places:
            root, key = place.split()
            async with open_place(root, access) as store:
                await remover.remove(place, store, key, recursive=recursive)
        done = "would delete" if dry_run else "deleted"
        return report.finish(f"{done} {format_count(remover.num_deleted, 'object')}")

    return run(work)


class _Remover:
    def __init__(self, report: Report, *, dry_run: bool) -> None:
        self.num_deleted = 0
        self._report = report
        self._dry_run = dry_run

    async def remove(self, place: Place, store: Store, key: str, *, recursive: bool) -> None:
        """Delete what one argument names."""
        if not recursive:
            if place.is_directory():
                self._report.fail(
                    f"{one_line(place.text)} is a bucket, prefix or directory; use -r"
                )
            else:
                await self._delete(store, [key])
            return
        found = False
        pages = store.list_pages(key if not key or key.endswith("/") else f"{key}/")
        async with aclosing(pages):
            async for page in pages:
                await self._delete(store, page)
                found = True
        if not found and key and not key.endswith("/") and (meta := await find(store, key)):
            await self._delete(store, [meta])
            found = True
        if not found:
            self._report.fail(f"there is no object below {one_line(place.text)}")

    async def _delete(self, store: Store, keys: Sequence[str] | Sequence[ObjectMeta]) -> None:
        if self._dry_run:
            metas = [await store.head(key) if isinstance(key, str) else key for key in keys]
            await tell("\n".join(f"would delete {one_line(meta.uri)}" for meta in metas))
            self.num_deleted += len(keys)
            return
        result = await store.delete_many(keys)
        self.num_deleted += len(result.deleted)
        for name in result.missing if isinstance(keys[0], str) else ():
            self._report.fail(f"there is no object {one_line(uri_of(store, name))}")
        for error in result.errors.values():
            self._report.fail(describe(error))

"""`aioflux rm`: deletes objects."""

from __future__ import annotations

import os
from contextlib import aclosing
from typing import TYPE_CHECKING, Annotated

import typer

from aioflux.cli._event_loop import run
from aioflux.cli._location import (
    Access,
    Anonymous,
    Endpoint,
    check_places,
    open_place,
    parse_place,
    uri_of,
)
from aioflux.cli._ls import find
from aioflux.cli._report import Report
from aioflux.cli._stdout import tell
from aioflux.cli._text import describe, format_count, one_line
from aioflux.errors import AiofluxError, StorageError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from aioflux._values.meta import ObjectMeta
    from aioflux.cli._location import Place
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

    Of a symbolic link on disk the link is deleted. -r refuses links to directories, "/" and what
    holds the home directory.

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
            try:
                await remover.remove(place, access, recursive=recursive)
            except (AiofluxError, ValueError) as exc:
                report.fail(describe(exc))
        done = "would delete" if dry_run else "deleted"
        return report.finish(f"{done} {format_count(remover.num_deleted, 'object')}")

    return run(work)


def refuse_precious(place: Place) -> None:
    """Refuse to delete all below a place where that is a slip: an unset variable, a link.

    Raises:
        ValueError: It is a link to a directory, the root of the machine, or what holds the home
            directory.
    """
    if not place.is_local:
        return
    bare = place.path.rstrip("/")
    if os.path.islink(bare) and os.path.isdir(bare):
        raise ValueError(
            f"{place.text} is a link to a directory: name {os.path.realpath(bare)} to delete what "
            "is below that, or leave out -r and the / at the end to delete the link"
        )
    real = os.path.realpath(place.path).rstrip("/")
    home = os.path.expanduser("~")
    if not real or (os.path.isabs(home) and f"{os.path.realpath(home)}/".startswith(f"{real}/")):
        raise ValueError(
            f"will not delete all of {place.text}: it is the root or holds your home directory"
        )


class _Remover:
    def __init__(self, report: Report, *, dry_run: bool) -> None:
        self.num_deleted = 0
        self._report = report
        self._dry_run = dry_run

    async def remove(self, place: Place, access: Access, *, recursive: bool) -> None:
        """Delete what one argument names.

        Raises:
            ValueError: It is nothing that this should delete.
        """
        if recursive:
            refuse_precious(place)
        if place.is_link():
            await self._unlink(place)
            return
        if not recursive and not place.may_be_object():
            raise ValueError(f"{place.text} is a bucket or directory; use -r")
        root, key = place.split()
        async with open_place(root, access) as store:
            if recursive:
                await self._below(place, store, key)
            else:
                await self._delete(store, [key])

    async def _unlink(self, place: Place) -> None:
        """Delete a symbolic link, and not what it leads to."""
        uri = str(place.location)
        if self._dry_run:
            await tell(f"would delete {one_line(uri)}")
        else:
            try:
                os.unlink(place.path)
            except OSError as exc:
                raise StorageError(f"could not delete {uri}: {exc.strerror}", uri=uri) from exc
        self.num_deleted += 1

    async def _below(self, place: Place, store: Store, key: str) -> None:
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

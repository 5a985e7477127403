"""`aioflux rm`: deletion of objects."""

from __future__ import annotations

import os
from collections.abc import Sequence
from contextlib import aclosing
from typing import TYPE_CHECKING, Annotated

import typer

from aioflux._values.uri import join_uri
from aioflux.cli._event_loop import run
from aioflux.cli._ls import find
from aioflux.cli._output import Report, print_lines
from aioflux.cli._text import format_count, one_line
from aioflux.cli._uri_or_path import (
    Anonymous,
    Endpoint,
    as_prefix,
    parse_arguments,
)
from aioflux.errors import NotFoundError, StorageError

if TYPE_CHECKING:
    from aioflux._values.meta import ObjectMeta
    from aioflux.cli._uri_or_path import UriOrPath
    from aioflux.store import Store


def rm(
    uris: Annotated[list[str], typer.Argument(metavar="URI...", help="Objects, or prefixes.")],
    *,
    recursive: Annotated[
        bool, typer.Option("-r", "--recursive", help="Delete all objects below the prefixes.")
    ] = False,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Print what would be deleted, and delete nothing.")
    ] = False,
    endpoint_url: Endpoint = None,
    anonymous: Anonymous = False,
) -> int:
    """Delete objects. If one cannot be deleted, an error is printed; the others are deleted.

    For a symbolic link on disk, the link is deleted. -r rejects links to directories, "/", the home
    directory and the directories above it.

    With -r, "gs://b/p" means everything below "p/", or the object "p" if nothing is below "p/".
    Temporary objects of writes in progress are deleted, too, so that these writes fail.
    With -r, an object is deleted only if it still has the generation that was listed: an object
    that is overwritten in the meantime is kept, and an error is printed.
    """
    arguments = parse_arguments(uris, endpoint_url, anonymous=anonymous)
    report = Report()
    remover = _Remover(report, dry_run=dry_run)

    async def work() -> int:
        await report.for_each(
            arguments, lambda argument: remover.remove(argument, recursive=recursive)
        )
        done = "would delete" if dry_run else "deleted"
        return report.finish(f"{done} {format_count(remover.num_deleted, 'object')}")

    return run(work)


def _reject_dangerous(argument: UriOrPath) -> None:
    """Reject a recursive deletion that is most likely a mistake.

    Raises:
        ValueError: The argument is a link to a directory, the root, the home directory, or a
            directory above it.
    """
    if not argument.is_local:
        return
    bare = argument.path.rstrip("/")
    if os.path.islink(bare) and os.path.isdir(bare):
        raise ValueError(
            f"{argument.text} is a link to a directory: use {os.path.realpath(bare)} to delete "
            "what is below it, or leave out -r and the / at the end to delete the link"
        )
    real = os.path.realpath(argument.path).rstrip("/")
    home = os.path.expanduser("~")
    if not real or (os.path.isabs(home) and f"{os.path.realpath(home)}/".startswith(f"{real}/")):
        raise ValueError(
            f"rm -r does not delete {argument.text}: it is the root, your home directory or "
            "a directory above it"
        )


class _Remover:
    def __init__(self, report: Report, *, dry_run: bool) -> None:
        self.num_deleted = 0
        self._report = report
        self._dry_run = dry_run

    async def remove(self, argument: UriOrPath, *, recursive: bool) -> None:
        """Delete the object or the prefix of one argument.

        Raises:
            ValueError: The argument is a prefix but -r is missing, or `_reject_dangerous` raises.
        """
        if recursive:
            _reject_dangerous(argument)
        if argument.is_link():
            await self._unlink(argument)
            return
        if not recursive and not argument.may_be_object():
            raise ValueError(f"{argument.text} is a bucket, prefix or directory; use -r")
        async with argument.open_object("use -r to delete them") as (store, key):
            if recursive:
                await self._delete_below(argument, store, key)
            else:
                await self._delete(store, [key])

    async def _unlink(self, argument: UriOrPath) -> None:
        """Delete a symbolic link, and not its target."""
        uri = str(argument.location)
        if self._dry_run:
            await print_lines(f"would delete {one_line(uri)}")
        else:
            try:
                os.unlink(argument.path)
            except OSError as exc:
                raise StorageError(f"could not delete {uri}: {exc.strerror}", uri=uri) from exc
        self.num_deleted += 1

    async def _delete_below(self, argument: UriOrPath, store: Store, key: str) -> None:
        found = False
        pages = store.list_pages(as_prefix(key), with_temporary=True)
        async with aclosing(pages):
            async for page in pages:
                await self._delete(store, page)
                found = True
        if not found and key and not key.endswith("/") and (meta := await find(store, key)):
            await self._delete(store, [meta])
            found = True
        if not found:
            raise NotFoundError(f"there is no object below {argument.text}")

    async def _delete(self, store: Store, keys: Sequence[str] | Sequence[ObjectMeta]) -> None:
        if self._dry_run:
            metas = [await store.head(key) if isinstance(key, str) else key for key in keys]
            await print_lines("\n".join(f"would delete {one_line(meta.uri)}" for meta in metas))
            self.num_deleted += len(keys)
            return
        result = await store.delete_many(keys)
        self.num_deleted += len(result.deleted)
        for error in result.errors.values():
            self._report.fail(error)
        if result.missing and isinstance(keys[0], str):
            uri = join_uri(store.uri, keys[0])
            raise NotFoundError(f"there is no object {one_line(uri)}", uri=uri)

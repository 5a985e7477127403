"""`aioflux rm` and `clean`: deletion of objects, and of what dead processes left."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable, Sequence
from contextlib import aclosing
from typing import TYPE_CHECKING, Annotated, Any

import typer

from aioflux._values.uri import join_uri
from aioflux.cli._arguments import (
    Exclude,
    Include,
    Json,
    NameFilter,
    Prefixes,
    as_prefix,
    expand,
    find,
    parse_arguments,
    parse_root_argument,
)
from aioflux.cli._event_loop import run
from aioflux.cli._output import Report, call_in_daemon_thread, print_lines, print_question
from aioflux.cli._text import format_count, format_time, json_line, one_line, parse_age
from aioflux.errors import NotFoundError, StorageError

if TYPE_CHECKING:
    from aioflux._values.meta import CleanResult, ObjectMeta
    from aioflux.cli._arguments import UriOrPath
    from aioflux.store import Store


_MAX_UNASKED = 1000
"""Most objects that are deleted without a question."""
_PAGE = 1000
_ANSWER_BYTES = 100


def rm(
    uris: Prefixes,
    *,
    recursive: Annotated[
        bool, typer.Option("-r", "--recursive", help="Delete all objects below the prefixes.")
    ] = False,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Print what would be deleted, and delete nothing.")
    ] = False,
    include: Include = None,
    exclude: Exclude = None,
    yes: Annotated[
        bool, typer.Option("--yes", "-y", help="Do not ask, however many objects are deleted.")
    ] = False,
) -> int:
    """Delete objects. If one cannot be deleted, an error is printed; the others are deleted.

    For a symbolic link on disk, the link is deleted. -r rejects links to directories, "/", the home
    directory and the directories above it.

    With -r, "gs://b/p" means everything below "p/", or the object "p" if nothing is below "p/".
    Temporary objects of writes in progress are deleted, too, so that these writes fail.
    With -r or a pattern, an object is deleted only if it still has the generation that was listed:
    an object that is overwritten in the meantime is kept, and an error is printed. The command asks
    before it deletes more than 1,000 objects; without a terminal it fails, unless --yes is given.

    Examples: aioflux rm -r --dry-run gs://bucket/runs/7; aioflux rm "gs://bucket/tmp/*.part"
    """
    if (include or exclude) and not recursive:
        raise typer.BadParameter("--include and --exclude are for -r")
    arguments = parse_arguments(uris)
    report = Report()
    remover = _Remover(
        report, dry_run=dry_run, recursive=recursive, names=NameFilter.parse(include, exclude)
    )

    async def work() -> int:
        counted = arguments if yes or dry_run else await remover.confirm(arguments)
        for argument in counted:
            async with report.printing():
                await remover.remove_each(argument)
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
    def __init__(
        self, report: Report, *, dry_run: bool, recursive: bool, names: NameFilter
    ) -> None:
        self.num_deleted = 0
        self._report = report
        self._dry_run = dry_run
        self._recursive = recursive
        self._names = names

    async def confirm(self, arguments: Sequence[UriOrPath]) -> list[UriOrPath]:
        """Ask if there is more to delete than `_MAX_UNASKED` objects.

        Returns:
            The arguments without those that could not be counted, whose errors are printed.

        Raises:
            Abort: The answer is no.
            ValueError: There is no terminal to ask.
        """
        num_found, counted = 0, []
        for argument in arguments:
            async with (
                self._report.printing(),
                aclosing(expand(argument, prefixes=self._recursive)) as found,
            ):
                async for each in found:
                    if num_found <= _MAX_UNASKED:
                        num_found += await self._count(each, _MAX_UNASKED + 1 - num_found)
                    else:
                        break
                counted.append(argument)
        if num_found <= _MAX_UNASKED:
            return counted
        what = f"more than {_MAX_UNASKED:,} objects"
        if not sys.stdin.isatty():
            raise ValueError(f"this deletes {what}; add --yes if that is meant, or try --dry-run")
        print_question(f"Delete {what}? [y/N] ")
        answer = await call_in_daemon_thread(os.read, 0, _ANSWER_BYTES)
        if answer.strip().lower() not in {b"y", b"yes"}:
            raise typer.Abort
        return counted

    async def _count(self, argument: UriOrPath, limit: int) -> int:
        """Return the number of objects to delete for an argument, at most `limit`."""
        if not self._recursive or argument.meta is not None or argument.is_link():
            return 1
        _reject_dangerous(argument)
        store, key = argument.open()
        prefix, num_found = as_prefix(key), 0
        async with aclosing(store.list_pages(prefix, with_temporary=True)) as pages:
            async for page in pages:
                num_found += len(self._admitted(page, prefix))
                if num_found >= limit:
                    break
        return min(num_found, limit)

    def _admitted(self, metas: Iterable[ObjectMeta], prefix: str) -> list[ObjectMeta]:
        return [meta for meta in metas if self._names.admits(meta.key[len(prefix) :])]

    async def remove_each(self, argument: UriOrPath) -> None:
        """Delete what an argument names, or each match of its pattern."""
        matched: list[ObjectMeta] = []
        async with aclosing(expand(argument, prefixes=self._recursive)) as found:
            async for each in found:
                if each.meta is None:
                    async with self._report.printing():
                        await self._remove(each)
                elif self._names.admits(each.meta.key.rpartition("/")[2]):
                    matched.append(each.meta)
                if len(matched) >= _PAGE:
                    await self._delete(argument.open()[0], matched)
                    matched = []
        if matched:
            await self._delete(argument.open()[0], matched)

    async def _remove(self, argument: UriOrPath) -> None:
        """Delete the object or the prefix of one argument.

        Raises:
            ValueError: The argument is a prefix but -r is missing, or `_reject_dangerous` raises.
        """
        if self._recursive:
            _reject_dangerous(argument)
        if argument.is_link():
            await self._unlink(argument)
            return
        if not self._recursive and not argument.may_be_object():
            raise ValueError(f"{argument.text} is a bucket, prefix or directory; use -r")
        async with argument.open_object("use -r to delete them") as (store, _):
            key = argument.split()[1]
            if self._recursive:
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
        found, prefix = False, as_prefix(key)
        pages = store.list_pages(prefix, with_temporary=True)
        async with aclosing(pages):
            async for page in pages:
                if admitted := self._admitted(page, prefix):
                    await self._delete(store, admitted)
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


def clean(
    uri: Annotated[str, typer.Argument(metavar="URI", help="Bucket, prefix or directory.")],
    *,
    older_than: Annotated[
        str,
        typer.Option(metavar="AGE", help="Only what is at least this old: 90s, 30m, 12h, 1d, 2w."),
    ] = "1d",
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Print what would be removed, and remove nothing.")
    ] = False,
    as_json: Json = False,
) -> int:
    """Abort open multipart uploads, and delete temporary objects of dead processes.

    Temporary objects are below ".aioflux-uploads/" and "aioflux-composed-objects/", at any depth
    below URI; on local disk, their names are ".aioflux-" (or ".aioflux-lock-") followed by 32
    hexadecimal digits. Objects of unfinished saves, which no checkpoint contains, are deleted, too,
    and data objects of write_objects ("data-", 32 hexadecimal digits, and further numbers) that no
    manifest beside them lists. If the commit object of a checkpoint, or a manifest, is damaged, its
    objects are kept, and the exit status is 1.

    A slow upload cannot be distinguished from the upload of a dead process: --older-than must be
    longer than your longest upload or save.

    --json: type ("upload" or "object"), uri; for uploads also upload_id and initiated (RFC 3339).
    Uploads come first, each kind by key.

    Example: aioflux clean --dry-run --older-than 2d gs://bucket/runs
    """
    argument = parse_root_argument(uri)
    try:
        seconds = parse_age(older_than)
    except ValueError as exc:
        raise typer.BadParameter(f"--older-than: {exc}") from None
    report = Report()
    from aioflux.checkpoint._store.orphans import clean_store

    async def work() -> int:
        store, key = argument.open()
        result = await clean_store(
            store, as_prefix(key), older_than_seconds=seconds, dry_run=dry_run
        )
        rows = _rows(result, store)
        await print_lines(
            "\n".join(json_line(row) if as_json else _line(row, dry_run=dry_run) for row in rows)
        )
        for _, error in sorted(result.errors.items()):
            report.fail(error)
        done = "would abort" if dry_run else "aborted"
        uploads = format_count(len(result.aborted), "upload")
        objects = format_count(len(result.removed), "object")
        deleted = "delete" if dry_run else "deleted"
        return report.finish(f"{done} {uploads}, {deleted} {objects}")

    return run(work)


def _rows(result: CleanResult, store: Store) -> list[dict[str, Any]]:
    uploads: list[dict[str, Any]] = [
        {
            "type": "upload",
            "uri": join_uri(store.uri, upload.key),
            "upload_id": upload.upload_id,
            "initiated": format_time(upload.initiated),
        }
        for upload in result.aborted
    ]
    return uploads + [{"type": "object", "uri": join_uri(store.uri, key)} for key in result.removed]


def _line(row: dict[str, Any], *, dry_run: bool) -> str:
    if row["type"] == "object":
        return f"{'would delete' if dry_run else 'deleted'} {one_line(row['uri'])}"
    done = "would abort" if dry_run else "aborted"
    return f"{done} the upload of {one_line(row['uri'])}, started {row['initiated']}"

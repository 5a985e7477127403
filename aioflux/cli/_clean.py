"""`aioflux clean`: removes what dead processes left behind."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Annotated, Any

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
from aioflux.cli._report import Report
from aioflux.cli._stdout import tell
from aioflux.cli._text import (
    describe,
    format_count,
    format_time,
    json_line,
    one_line,
    parse_age,
)
from aioflux.errors import NotFoundError

if TYPE_CHECKING:
    from aioflux._values.meta import CleanResult
    from aioflux.store import Store

__all__ = ["clean"]


def clean(
    uri: Annotated[str, typer.Argument(metavar="URI", help="Bucket, prefix or directory.")],
    *,
    older_than: Annotated[
        str,
        typer.Option(metavar="AGE", help="Only what is at least so old: 90s, 30m, 12h, 1d, 2w."),
    ] = "1d",
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Print what would be removed, and remove nothing.")
    ] = False,
    as_json: Annotated[
        bool, typer.Option("--json", help="One JSON object per line; the fields stand above.")
    ] = False,
    endpoint_url: Endpoint = None,
    anonymous: Anonymous = False,
) -> int:
    """Abort open multipart uploads, and delete what dead processes left.

    These are objects below ".aioflux-uploads/" and "aioflux-composed-objects/", at any depth below
    URI; on local disk, files named ".aioflux-" (or ".aioflux-lock-") and 32 hexadecimal digits;
    and objects of killed saves of checkpoints, which no commit object names. Where a commit object
    is damaged, its objects stay, and the exit status is 1.

    Nobody can tell a dead upload from a slow one: keep --older-than above the time that your
    longest upload, or save of a checkpoint, takes.

    --json: type ("upload" or "object"), uri, and of an upload upload_id and initiated (RFC 3339).
    Uploads come first, each kind by key.
    """
    place = parse_place(uri)
    access = Access(endpoint_url, anonymous)
    check_places([place], access)
    try:
        seconds = parse_age(older_than)
    except ValueError as exc:
        raise typer.BadParameter(f"--older-than: {exc}") from None
    report = Report()

    if place.is_local and not os.path.isdir(place.path):
        raise NotFoundError(f"there is no directory {place.text}", uri=str(place.location))

    from aioflux.checkpoint._maintain.orphans import clean_store

    async def work() -> int:
        root, key = place.split()
        prefix = key if not key or key.endswith("/") else f"{key}/"
        async with open_place(root, access) as store:
            result = await clean_store(store, prefix, older_than_seconds=seconds, dry_run=dry_run)
        rows = _rows(result, store)
        await tell(
            "\n".join(json_line(row) if as_json else _line(row, dry_run=dry_run) for row in rows)
        )
        for _, error in sorted(result.errors.items()):
            report.fail(describe(error))
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
            "uri": uri_of(store, upload.key),
            "upload_id": upload.upload_id,
            "initiated": format_time(upload.initiated),
        }
        for upload in result.aborted
    ]
    return uploads + [{"type": "object", "uri": uri_of(store, key)} for key in result.removed]


def _line(row: dict[str, Any], *, dry_run: bool) -> str:
    if row["type"] == "object":
        return f"{'would delete' if dry_run else 'deleted'} {one_line(row['uri'])}"
    done = "would abort" if dry_run else "aborted"
    return f"{done} the upload of {one_line(row['uri'])}, begun {row['initiated']}"

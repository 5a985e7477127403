"""`aioflux clean`: removal of open uploads and temporary objects of dead processes."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer

from aioflux._values.uri import join_uri
from aioflux.cli._event_loop import run
from aioflux.cli._output import Report, print_lines
from aioflux.cli._text import format_count, format_time, json_line, one_line, parse_age
from aioflux.cli._uri_or_path import (
    Json,
    as_prefix,
    parse_root_argument,
)

if TYPE_CHECKING:
    from aioflux._values.meta import CleanResult
    from aioflux.store import Store


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

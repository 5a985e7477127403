"""`aioflux stat`: the metadata of objects."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from aioflux.cli._event_loop import run
from aioflux.cli._output import Report, print_lines
from aioflux.cli._text import json_line, meta_row, paragraph
from aioflux.cli._uri_or_path import LIST_BELOW, Anonymous, Endpoint, parse_arguments

if TYPE_CHECKING:
    from aioflux.cli._uri_or_path import UriOrPath


def stat(
    uris: Annotated[list[str], typer.Argument(metavar="URI...", help="Objects.")],
    *,
    as_json: Annotated[
        bool, typer.Option("--json", help="One JSON object per line, with the fields of ls --json.")
    ] = False,
    endpoint_url: Endpoint = None,
    anonymous: Anonymous = False,
) -> int:
    """Show all metadata of objects. If one cannot be read, an error is printed."""
    arguments = parse_arguments(uris, endpoint_url, anonymous=anonymous)

    async def work() -> int:
        report = Report()
        await report.for_each(arguments, show)
        return report.finish()

    async def show(argument: UriOrPath) -> None:
        if not argument.may_be_object():
            raise ValueError(f"{argument.text} is a bucket or directory; stat takes objects")
        async with argument.open_object(LIST_BELOW, follow=True) as (store, key):
            row = meta_row(await store.head(key))
        if argument.is_link():
            row["uri"] = str(argument.location)
        await print_lines(json_line(row) if as_json else paragraph(row))

    return run(work)

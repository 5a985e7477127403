"""`aioflux stat`: the metadata of objects."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from aioflux.cli._output import print_lines
from aioflux.cli._patterns import run_for_each
from aioflux.cli._text import json_line, meta_row, paragraph
from aioflux.cli._uri_or_path import LIST_BELOW, Objects

if TYPE_CHECKING:
    from aioflux.cli._uri_or_path import UriOrPath


def stat(
    uris: Objects,
    *,
    as_json: Annotated[
        bool, typer.Option("--json", help="One JSON object per line, with the fields of ls --json.")
    ] = False,
) -> int:
    """Show all metadata of objects. If one cannot be read, an error is printed.

    Example: aioflux stat --json "gs://bucket/train/*.tar"
    """

    async def show(argument: UriOrPath) -> None:
        argument.require_object("stat")
        async with argument.open_object(LIST_BELOW, follow=True) as (store, key):
            row = meta_row(await store.head(key))
        if argument.is_link():
            row["uri"] = str(argument.location)
        await print_lines(json_line(row) if as_json else paragraph(row))

    return run_for_each(uris, show)

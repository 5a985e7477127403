"""`aioflux stat`: the metadata of objects."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer

from aioflux.cli._event_loop import run
from aioflux.cli._location import (
    Access,
    Anonymous,
    Endpoint,
    check_places,
    each_place,
    open_place,
    parse_place,
)
from aioflux.cli._stdout import tell
from aioflux.cli._text import format_size, json_line, meta_row, one_line

if TYPE_CHECKING:
    from aioflux.cli._location import Place

__all__ = ["stat"]


def stat(
    uris: Annotated[list[str], typer.Argument(metavar="URI...", help="Objects.")],
    *,
    as_json: Annotated[
        bool, typer.Option("--json", help="One JSON object per line, with the fields of ls --json.")
    ] = False,
    endpoint_url: Endpoint = None,
    anonymous: Anonymous = False,
) -> int:
    """Show all metadata of objects; one that cannot be read does not keep the others."""
    places = [parse_place(uri) for uri in uris]
    access = Access(endpoint_url, anonymous)
    check_places(places, access)

    async def work() -> int:
        return await each_place(places, show)

    async def show(place: Place) -> None:
        if not place.may_be_object():
            raise ValueError(f"{place.text} is a bucket or directory; stat takes objects")
        root, key = place.split(follow=True)
        async with open_place(root, access) as store:
            row = meta_row(await store.head(key))
        if place.is_link():
            row["uri"] = str(place.location)
        await tell(json_line(row) if as_json else _paragraph(row))

    return run(work)


def _paragraph(row: dict[str, Any]) -> str:
    lines = [one_line(row["uri"])]
    for name, value in row.items():
        if name in {"type", "uri", "metadata"}:
            continue
        text = f"{value} ({format_size(value)})" if name == "size" else str(value or "-")
        lines.append(f"  {name.replace('_', ' ') + ':':<18}{one_line(text)}")
    lines += [
        f"  {'metadata:':<18}{one_line(f'{name}: {value}')}"
        for name, value in row["metadata"].items()
    ]
    return "\n".join(lines)

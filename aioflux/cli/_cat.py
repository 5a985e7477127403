"""`aioflux cat`: the bytes of objects on standard output."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Annotated

import typer

from aioflux.cli._event_loop import in_daemon, run
from aioflux.cli._location import (
    Access,
    Anonymous,
    Endpoint,
    check_places,
    each_place,
    open_place,
    parse_place,
)
from aioflux.cli._stdout import write_stdout

if TYPE_CHECKING:
    from aioflux.cli._location import Place
    from aioflux.store import Store

__all__ = ["cat", "write_stdout"]

_PIECE_BYTES = 4 * 1024 * 1024


def cat(
    uris: Annotated[list[str], typer.Argument(metavar="URI...", help="Objects.")],
    *,
    range_: Annotated[
        str,
        typer.Option(
            "--range",
            metavar="START-END",
            help="Bytes from START, counted from 0, up to but not including END; or to the end.",
        ),
    ] = "",
    endpoint_url: Endpoint = None,
    anonymous: Anonymous = False,
) -> int:
    """Write objects to standard output, one after the other, as their bytes are stored.

    One that cannot be read does not keep the others. A whole object is verified against its crc32c
    before its last bytes are written.
    """
    places = [parse_place(uri) for uri in uris]
    access = Access(endpoint_url, anonymous)
    check_places(places, access)
    start, end = _parse_range(range_)

    async def work() -> int:
        return await each_place(places, write)

    async def write(place: Place) -> None:
        if not place.may_be_object():
            raise ValueError(f"{place.text} is a bucket or directory; cat takes objects")
        root, key = place.split(follow=True)
        async with open_place(root, access) as store:
            await _write(store, key, start, end)

    return run(work)


def _parse_range(text: str) -> tuple[int, int | None]:
    if not text:
        return 0, None
    found = re.fullmatch(r"(\d+)-(\d*)", text)
    end = int(found[2]) if found and found[2] else None
    if not found or (end is not None and end <= int(found[1])):
        raise typer.BadParameter(f"{text!r} is no range; write START-END, such as 0-1024 or 100-")
    return int(found[1]), end


async def _write(store: Store, key: str, start: int, end: int | None) -> None:
    async with store.open_reader(key) as reader:
        stop = reader.meta.size if end is None else min(end, reader.meta.size)
        reader.seek(start)
        while (left := stop - reader.tell()) > 0:
            await in_daemon(write_stdout, await reader.read(min(left, _PIECE_BYTES)))

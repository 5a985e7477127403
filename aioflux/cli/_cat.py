"""`aioflux cat`: objects, written to standard output."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Annotated

import typer

from aioflux.cli._event_loop import run
from aioflux.cli._output import Report, write_stdout
from aioflux.cli._uri_or_path import LIST_BELOW, Anonymous, Endpoint, parse_arguments

if TYPE_CHECKING:
    from aioflux.cli._uri_or_path import UriOrPath
    from aioflux.store import Store

_PIECE_BYTES = 4 * 1024 * 1024


def cat(
    uris: Annotated[list[str], typer.Argument(metavar="URI...", help="Objects.")],
    *,
    range_: Annotated[
        str,
        typer.Option(
            "--range",
            metavar="START-END",
            help="Bytes from START, counted from 0, up to but not including END; without END, to "
            "the end of the object.",
        ),
    ] = "",
    endpoint_url: Endpoint = None,
    anonymous: Anonymous = False,
) -> int:
    """Write objects to standard output, one after the other, as stored.

    If an object cannot be read, an error is printed and the next object is written. An object
    that is read whole is verified with its crc32c before its last bytes are written.
    """
    arguments = parse_arguments(uris, endpoint_url, anonymous=anonymous)
    start, end = _parse_range(range_)

    async def work() -> int:
        report = Report()
        await report.for_each(arguments, write)
        return report.finish()

    async def write(argument: UriOrPath) -> None:
        if not argument.may_be_object():
            raise ValueError(f"{argument.text} is a bucket or directory; cat takes objects")
        async with argument.open_object(LIST_BELOW, follow=True) as (store, key):
            await _write(store, key, start, end)

    return run(work)


def _parse_range(text: str) -> tuple[int, int | None]:
    if not text:
        return 0, None
    found = re.fullmatch(r"(\d+)-(\d*)", text)
    end = int(found[2]) if found and found[2] else None
    if not found or (end is not None and end <= int(found[1])):
        raise typer.BadParameter(
            f"{text!r} is not a range; write START-END, such as 0-1024 or 100-"
        )
    return int(found[1]), end


async def _write(store: Store, key: str, start: int, end: int | None) -> None:
    async with store.open_reader(key) as reader:
        size = reader.meta.size
        if start and start >= size:
            asked = f"{start}-{'' if end is None else end}"
            raise ValueError(
                f"--range {asked} begins beyond the end of {reader.meta.uri}, which has {size:,} "
                f"byte{'' if size == 1 else 's'}"
            )
        stop = size if end is None else min(end, size)
        reader.seek(start)
        while (remaining := stop - reader.tell()) > 0:
            await write_stdout(await reader.read(min(remaining, _PIECE_BYTES)))

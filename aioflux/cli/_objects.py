"""`aioflux cat`, `stat` and `sign`: the commands for single objects."""

from __future__ import annotations

import re
import zlib
from collections.abc import AsyncGenerator
from contextlib import aclosing
from datetime import timedelta
from typing import TYPE_CHECKING, Annotated, cast

import typer

from aioflux.cli._arguments import LIST_BELOW, Json, Objects, run_for_each
from aioflux.cli._output import print_lines, write_stdout
from aioflux.cli._text import json_line, meta_row, paragraph, parse_age

if TYPE_CHECKING:
    from aioflux._values.meta import ObjectMeta
    from aioflux.cli._arguments import UriOrPath
    from aioflux.store import Store, UrlMethod


_PIECE_BYTES = 4 * 1024 * 1024
_GZIP = zlib.MAX_WBITS | 16
_METHODS = ("GET", "HEAD", "PUT", "DELETE")


def cat(
    uris: Objects,
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
    decompress: Annotated[
        bool, typer.Option("--decompress", help="Uncompress gzip; other objects are an error.")
    ] = False,
) -> int:
    """Write objects to standard output, one after the other, as stored.

    If an object cannot be read, an error is printed and the next object is written. An object
    that is read whole is verified with its crc32c before its last bytes are written.

    Example: aioflux cat --decompress "gs://bucket/logs/*.gz" | grep ERROR
    """
    start, end = _parse_range(range_)
    if decompress and range_:
        raise typer.BadParameter("--decompress reads whole objects; leave out --range")

    async def write(argument: UriOrPath) -> None:
        argument.require_object("cat")
        async with argument.open_object(LIST_BELOW, follow=True) as (store, key):
            pieces = _pieces(store, key, start, end)
            async with aclosing(_gunzip(pieces) if decompress else pieces) as data:
                async for piece in data:
                    await write_stdout(piece)

    return run_for_each(uris, write)


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


async def _pieces(
    store: Store, key: str | ObjectMeta, start: int, end: int | None
) -> AsyncGenerator[bytes, None]:
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
            yield await reader.read(min(remaining, _PIECE_BYTES))


async def _gunzip(pieces: AsyncGenerator[bytes, None]) -> AsyncGenerator[bytes, None]:
    """Yield the uncompressed bytes of one or several gzip members.

    Raises:
        ValueError: The bytes are not gzip, or end within a member.
    """
    decoder = zlib.decompressobj(wbits=_GZIP)
    async with aclosing(pieces):
        async for data in pieces:
            while data:
                if decoder.eof:  # another member follows
                    decoder = zlib.decompressobj(wbits=_GZIP)
                try:
                    yield decoder.decompress(data, _PIECE_BYTES)
                except zlib.error as exc:
                    raise ValueError(f"--decompress: the object is not gzip: {exc}") from None
                data = decoder.unconsumed_tail or decoder.unused_data
    if not decoder.eof:
        raise ValueError("--decompress: the object is not gzip, or its end is missing")


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


def sign(
    uris: Objects,
    *,
    expires: Annotated[
        str,
        typer.Option(metavar="AGE", help="Time for which the url is valid: 90s, 30m, 12h, 7d."),
    ] = "1h",
    method: Annotated[
        str, typer.Option(metavar="METHOD", help="GET, HEAD, PUT or DELETE: what the url allows.")
    ] = "GET",
    as_json: Json = False,
) -> int:
    """Print a signed url for each object. Who has the url needs no credentials: keep it secret.

    The object need not exist. On gs://, a service account key or impersonated credentials sign;
    on az://, an account key. On gs:// and s3:// a url is valid for 7 days at most.

    --json: uri and url.

    Example: curl "$(aioflux sign --expires 15m gs://bucket/a.bin)" -o a.bin
    """
    duration = timedelta(seconds=parse_age(expires))
    if method.upper() not in _METHODS:
        raise typer.BadParameter(f"--method {method}: use {', '.join(_METHODS)}")

    async def show(argument: UriOrPath) -> None:
        argument.require_object("sign")
        store, key = argument.open()
        allowed = cast("UrlMethod", method.upper())
        url = await store.sign(key, method=allowed, expires=duration)
        row = {"uri": str(argument.location), "url": url}
        await print_lines(json_line(row) if as_json else url)

    return run_for_each(uris, show)

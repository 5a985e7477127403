"""`aioflux du`: the number and the size of the objects below prefixes."""

from __future__ import annotations

from collections import defaultdict
from contextlib import aclosing
from typing import TYPE_CHECKING, Annotated

import typer

from aioflux._values.stats import format_size
from aioflux._values.uri import join_uri
from aioflux.cli._output import print_lines
from aioflux.cli._patterns import run_for_each
from aioflux.cli._text import json_line, one_line
from aioflux.cli._uri_or_path import Human, Json, Prefixes, as_prefix, find
from aioflux.errors import NotFoundError

if TYPE_CHECKING:
    from aioflux.cli._uri_or_path import UriOrPath


def du(
    uris: Prefixes,
    *,
    human: Human = False,
    depth: Annotated[
        int,
        typer.Option(
            min=0, metavar="LEVELS", help="Show the prefixes of so many levels below, too."
        ),
    ] = 0,
    as_json: Json = False,
) -> int:
    """Show the bytes and the number of objects below each URI, as `ls -r` lists them.

    All objects below are listed; only their sums are kept in memory.

    --json: uri, size (bytes) and num_objects.

    Example: aioflux du -h --depth 1 gs://bucket/train
    """

    async def show(argument: UriOrPath) -> None:
        lines = []
        for uri, (num_objects, num_bytes) in await _sums(argument, depth):
            size = format_size(num_bytes) if human else str(num_bytes)
            row = {"uri": uri, "size": num_bytes, "num_objects": num_objects}
            text = f"{size:>14}  {num_objects:>10}  {one_line(uri)}"
            lines.append(json_line(row) if as_json else text)
        await print_lines("\n".join(lines))

    return run_for_each(uris, show, prefixes=True)


async def _sums(argument: UriOrPath, depth: int) -> list[tuple[str, tuple[int, int]]]:
    """Return objects and bytes of each prefix up to `depth`, sorted, and then of all.

    Raises:
        NotFoundError: Nothing has this name.
    """
    sums: defaultdict[str, tuple[int, int]] = defaultdict(lambda: (0, 0))
    store, key = argument.open(follow=True)
    prefix = as_prefix(key)

    def add(name: str, size: int) -> None:
        *levels, _ = name.removeprefix(prefix).split("/")
        for number in range(min(depth, len(levels)) + 1):
            below = prefix + "".join(f"{level}/" for level in levels[:number])
            num_objects, num_bytes = sums[below]
            sums[below] = (num_objects + 1, num_bytes + size)

    if meta := argument.meta or (prefix != key and await find(store, key)):
        sums[prefix] = (1, meta.size)
    pages = store.list_pages(prefix)
    async with aclosing(pages):
        async for page in pages:
            for name, size in zip(page.keys, page.sizes, strict=True):
                add(name, size)
    if not sums and (key or argument.is_missing()):
        uri = str(argument.location)
        raise NotFoundError(f"there is no object or prefix {uri}; {argument.hint()}", uri=uri)
    total = sums.pop(prefix, (0, 0))
    rows = [(join_uri(store.uri, name), sums[name]) for name in sorted(sums)]
    return [*rows, (str(argument.location), total)]

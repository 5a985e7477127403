"""`aioflux ls`: objects and prefixes, one level or all."""

from __future__ import annotations

import heapq
from contextlib import aclosing
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Annotated

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
    uri_of,
)
from aioflux.cli._stdout import tell
from aioflux.cli._text import (
    format_count,
    format_size,
    format_time,
    json_line,
    meta_row,
    one_line,
    prefix_row,
)
from aioflux.errors import NotFoundError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from aioflux._values.listing import Listing
    from aioflux._values.meta import ObjectMeta
    from aioflux.cli._location import Place
    from aioflux.store import Store

__all__ = ["ls"]


def ls(
    uris: Annotated[
        list[str], typer.Argument(metavar="URI...", help="Prefix, bucket, object or directory.")
    ],
    *,
    long: Annotated[
        bool, typer.Option("-l", "--long", help="Size, time of change and generation, too.")
    ] = False,
    recursive: Annotated[
        bool, typer.Option("-r", "--recursive", help="All objects below, not one level.")
    ] = False,
    as_json: Annotated[
        bool, typer.Option("--json", help="One JSON object per line; the fields stand above.")
    ] = False,
    manifest: Annotated[
        str,
        typer.Option(metavar="URI", help="Save what is below the one URI as a listing, here."),
    ] = "",
    endpoint_url: Endpoint = None,
    anonymous: Anonymous = False,
) -> int:
    """List objects and prefixes by key, one whole uri per line.

    "gs://b/p" lists what is below "p/", and the object "p" if there is one. A URI that cannot be
    listed does not keep the others.

    --json: type ("object" or "prefix") and uri; of an object also size (bytes), updated (RFC 3339,
    UTC), generation, etag, crc32c (base64), content_type, content_encoding, storage_class and
    metadata. What is not known is null or empty.

    --manifest: an object (or file) that datasets open in place of listing, with `from_manifest`;
    prints how much it lists.
    """
    places = [parse_place(uri) for uri in uris]
    access = Access(endpoint_url, anonymous)
    if manifest:
        if len(places) > 1 or long or as_json:
            raise typer.BadParameter("--manifest takes one URI, and neither --long nor --json")
        target = parse_place(manifest)
        check_places([*places, target], access)
        return run(lambda: _save(places[0], target, access))
    check_places(places, access)
    printer = _Printer(long=long, as_json=as_json)

    async def work() -> int:
        status = await each_place(places, show)
        await printer.total()
        return status

    async def show(place: Place) -> None:
        await _list(place, access, printer, recursive=recursive)

    return run(work)


@dataclass(slots=True)
class _Printer:
    """Prints objects and prefixes in the form that was asked for, and counts them."""

    long: bool
    as_json: bool
    num_objects: int = 0
    num_bytes: int = 0

    async def objects(self, metas: Sequence[ObjectMeta]) -> None:
        """Print a page of objects."""
        self.num_objects += len(metas)
        self.num_bytes += sum(meta.size for meta in metas)
        await tell("\n".join(map(self._line, metas)))

    async def page(self, store: Store, page: Listing) -> None:
        """Print a page of one level: objects and prefixes by key."""
        rows = [(meta.key, self._line(meta)) for meta in page]
        prefixes = [(prefix, self._prefix(uri_of(store, prefix))) for prefix in page.prefixes]
        self.num_objects += len(rows)
        self.num_bytes += sum(page.sizes)
        await tell("\n".join(line for _, line in heapq.merge(rows, prefixes)))

    async def total(self) -> None:
        """Print the sum that ends a long listing."""
        if self.long and not self.as_json:
            count = format_count(self.num_objects, "object")
            await tell(f"{count}, {self.num_bytes:,} bytes ({format_size(self.num_bytes)})")

    def _line(self, meta: ObjectMeta) -> str:
        if self.as_json:
            return json_line(meta_row(meta))
        if not self.long:
            return one_line(meta.uri)
        updated = format_time(meta.updated) or "-"
        return f"{meta.size:>14}  {updated:<24}  {meta.generation or '-'}  {one_line(meta.uri)}"

    def _prefix(self, uri: str) -> str:
        if self.as_json:
            return json_line(prefix_row(uri))
        return f"{'':>14}  {'':<24}  {one_line(uri)}" if self.long else one_line(uri)


async def _list(place: Place, access: Access, printer: _Printer, *, recursive: bool) -> None:
    root, key = place.split(follow=True)
    async with open_place(root, access) as store:
        prefix = key if not key or key.endswith("/") else f"{key}/"
        found = False
        if prefix != key and (meta := await find(store, key)):
            uri = str(place.location) if place.is_link() else meta.uri
            await printer.objects([replace(meta, uri=uri)])
            found = True
        if recursive:
            pages = store.list_pages(prefix)
            async with aclosing(pages):
                async for metas in pages:
                    await printer.objects(metas)
                    found = True
        else:
            levels = store.list_pages(prefix, delimiter="/")
            async with aclosing(levels):
                async for page in levels:
                    await printer.page(store, page)
                    found = True
    if not found and (key or place.is_missing()):
        uri = str(place.location)
        raise NotFoundError(f"there is no object and no prefix {uri}; check the spelling", uri=uri)


async def _save(place: Place, target: Place, access: Access) -> int:
    """Store a listing of all that is below a place."""
    root, key = target.split()
    if not key:
        raise typer.BadParameter(f"{target.text} names no object; a manifest is one")
    async with open_place(str(place.location), access) as source:
        listing = await source.list_all()
        if not listing:
            raise NotFoundError(
                f"there is no object below {source.uri}; check the spelling", uri=source.uri
            )
    async with open_place(root, access) as store:
        uri = uri_of(store, key)
        others = [at for at, each in enumerate(listing.keys) if uri_of(source, each) != uri]
        if len(others) < len(listing):
            listing = listing.pick(others)
        await store.put(key, listing.to_bytes())
    num_bytes = sum(listing.sizes)
    count = format_count(len(listing), "object")
    await tell(f"{one_line(uri)}: {count}, {num_bytes:,} bytes ({format_size(num_bytes)})")
    return 0


async def find(store: Store, key: str) -> ObjectMeta | None:
    """Return the metadata of an object, or None where there is none."""
    try:
        return await store.head(key)
    except NotFoundError:
        return None

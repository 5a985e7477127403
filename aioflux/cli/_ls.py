"""`aioflux ls`: listings of objects and prefixes."""

from __future__ import annotations

from contextlib import aclosing
from dataclasses import dataclass, field, replace
from operator import itemgetter
from typing import TYPE_CHECKING, Annotated

import typer

from aioflux._values.stats import format_size
from aioflux._values.uri import join_uri
from aioflux.cli._event_loop import run
from aioflux.cli._output import Report, print_lines, print_notice
from aioflux.cli._text import (
    format_count,
    format_time,
    json_line,
    meta_row,
    one_line,
    prefix_row,
)
from aioflux.cli._uri_or_path import (
    Anonymous,
    Endpoint,
    Json,
    as_prefix,
    parse_arguments,
)
from aioflux.errors import NotFoundError

if TYPE_CHECKING:
    from aioflux._values.listing import Listing
    from aioflux._values.meta import ObjectMeta
    from aioflux.cli._uri_or_path import UriOrPath
    from aioflux.store import Store


def ls(
    uris: Annotated[
        list[str], typer.Argument(metavar="URI...", help="Prefix, bucket, object or directory.")
    ],
    *,
    long: Annotated[
        bool, typer.Option("-l", "--long", help="Show size, modification time and generation.")
    ] = False,
    recursive: Annotated[
        bool, typer.Option("-r", "--recursive", help="List all objects below, not only one level.")
    ] = False,
    as_json: Json = False,
    show_all: Annotated[
        bool, typer.Option("--all", help="List the temporary objects of writes, too.")
    ] = False,
    manifest: Annotated[
        str,
        typer.Option(metavar="URI", help="Save the listing to this object; with one URI only."),
    ] = "",
    endpoint_url: Endpoint = None,
    anonymous: Anonymous = False,
) -> int:
    """List objects and prefixes by key, one whole uri per line.

    "gs://b/p" lists everything below "p/", and the object "p" if it exists. If a URI cannot be
    listed, an error is printed and the next one is listed.

    --json: type ("object" or "prefix") and uri; for objects also size (bytes), updated (RFC 3339,
    UTC), generation, etag, crc32c (base64), content_type, content_encoding, storage_class and
    metadata. Unknown values are null or empty.

    --manifest: writes the listing to one object (or file), from which `from_manifest` of the
    datasets reads it instead of listing again; prints the number of objects.
    """
    if manifest:
        if len(uris) > 1 or long or as_json or show_all:
            raise typer.BadParameter("--manifest takes one URI, and no --long, --json or --all")
        source, target = parse_arguments([*uris, manifest], endpoint_url, anonymous=anonymous)
        return run(lambda: _save_manifest(source, target))
    arguments = parse_arguments(uris, endpoint_url, anonymous=anonymous)
    printer = _Printer(long=long, as_json=as_json)

    async def work() -> int:
        report = Report()
        await report.for_each(arguments, show)
        if not report.num_failed:
            await printer.print_total()
        if manifests := printer.manifests:
            print_notice(
                f"{one_line(manifests[0])} is the manifest of a dataset: from_manifest of "
                "aioflux.data reads the objects that it lists"
            )
        return report.finish()

    async def show(argument: UriOrPath) -> None:
        await _list(argument, printer, "" if recursive else "/", show_all)

    return run(work)


@dataclass(slots=True)
class _Printer:
    """Printer and counter of objects and prefixes."""

    long: bool
    as_json: bool
    num_objects: int = 0
    num_bytes: int = 0
    manifests: list[str] = field(default_factory=list)
    """Uris of the printed manifests."""

    async def print_object(self, meta: ObjectMeta) -> None:
        self.num_objects += 1
        self.num_bytes += meta.size
        await print_lines(self._line(meta))

    async def print_page(self, store: Store, page: Listing) -> None:
        """Print a page: objects and prefixes, sorted by key."""
        rows = [(meta.key, self._line(meta)) for meta in page]
        prefixes = [(prefix, self._prefix(join_uri(store.uri, prefix))) for prefix in page.prefixes]
        self.num_objects += len(rows)
        self.num_bytes += sum(page.sizes)
        self.manifests += (join_uri(store.uri, key) for key in page.without_manifests()[1])
        lines = sorted(rows + prefixes, key=itemgetter(0))
        await print_lines("\n".join(line for _, line in lines))

    async def print_total(self) -> None:
        """Print the total of a long listing; call it if nothing is missing."""
        if self.long and not self.as_json:
            count = format_count(self.num_objects, "object")
            await print_lines(f"{count}, {self.num_bytes:,} bytes ({format_size(self.num_bytes)})")

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


async def _list(argument: UriOrPath, printer: _Printer, delimiter: str, show_all: bool) -> None:
    async with argument.open(follow=True) as (store, key):
        prefix = as_prefix(key)
        found = False
        if prefix != key and (meta := await find(store, key)):
            uri = str(argument.location) if argument.is_link() else meta.uri
            await printer.print_object(replace(meta, uri=uri))
            found = True
        pages = store.list_pages(prefix, delimiter=delimiter, with_temporary=show_all)
        async with aclosing(pages):
            async for page in pages:
                await printer.print_page(store, page)
                found = True
    if not found and (key or argument.is_missing()):
        uri = str(argument.location)
        raise NotFoundError(f"there is no object or prefix {uri}; {argument.hint()}", uri=uri)


async def _save_manifest(source_uri: UriOrPath, target: UriOrPath) -> int:
    """Write the listing of everything below a uri to one object."""
    if not target.split()[1]:
        raise typer.BadParameter(f"--manifest {target.text}: a manifest is an object; add a name")
    async with source_uri.open_root(str(source_uri.location)) as source:
        listing, _ = (await source.list_all()).without_manifests()
        if not listing:
            raise NotFoundError(
                f"there is no object below {source.uri}; check the spelling", uri=source.uri
            )
    async with target.open() as (store, key):
        uri = join_uri(store.uri, key)
        # The manifest does not list an older version of itself.
        others = [index for index, at in enumerate(listing.keys) if join_uri(source.uri, at) != uri]
        if len(others) < len(listing):
            listing = listing.pick(others)
        await store.put(key, listing.to_bytes())
    num_bytes = sum(listing.sizes)
    count = format_count(len(listing), "object")
    await print_lines(f"{one_line(uri)}: {count}, {num_bytes:,} bytes ({format_size(num_bytes)})")
    return 0


async def find(store: Store, key: str) -> ObjectMeta | None:
    """Return the metadata of an object, or None if it does not exist."""
    try:
        return await store.head(key)
    except NotFoundError:
        return None

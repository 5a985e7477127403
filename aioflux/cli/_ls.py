"""`aioflux ls` and `du`: objects and prefixes, and their number and size."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterable
from contextlib import aclosing
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime, timedelta
from operator import attrgetter, itemgetter
from typing import TYPE_CHECKING, Annotated, Any

import typer

from aioflux._values.stats import format_size
from aioflux._values.uri import Location, join_uri
from aioflux.cli._arguments import (
    PATTERN,
    Human,
    Json,
    Prefixes,
    UriOrPath,
    as_prefix,
    find,
    parse_arguments,
    run_for_each,
)
from aioflux.cli._event_loop import run
from aioflux.cli._output import print_lines, print_notice
from aioflux.cli._text import (
    format_count,
    format_time,
    json_line,
    meta_row,
    one_line,
    parse_age,
    prefix_row,
)
from aioflux.errors import NotFoundError
from aioflux.options import Timeouts, TransferOptions

if TYPE_CHECKING:
    from aioflux._values.listing import Listing
    from aioflux._values.meta import ObjectMeta
    from aioflux.cli._output import Report
    from aioflux.store import Store


_BATCH = 1000
"""Number of generations that are printed at once."""
_BUCKETS = {"gs://": "gs", "gcs://": "gs", "s3://": "s3"}
"""Uris that list buckets, and their schemes."""
_SORT_KEYS: dict[str, Callable[[ObjectMeta], Any]] = {
    "key": attrgetter("uri"),
    "time": lambda meta: -meta.updated.timestamp() if meta.updated else 0.0,
    "size": lambda meta: -meta.size,
}
"""Sort key of each value of `--sort`."""


def ls(
    uris: Prefixes,
    *,
    long: Annotated[
        bool, typer.Option("-l", "--long", help="Show size, modification time and generation.")
    ] = False,
    recursive: Annotated[
        bool, typer.Option("-r", "--recursive", help="List all objects below, not only one level.")
    ] = False,
    human: Human = False,
    as_json: Json = False,
    sort: Annotated[
        str, typer.Option(metavar="BY", help="key, time (newest first) or size (largest first).")
    ] = "key",
    limit: Annotated[
        int | None, typer.Option(metavar="NUMBER", min=0, help="Show at most so many.")
    ] = None,
    newer: Annotated[
        str,
        typer.Option(metavar="AGE", help="Only objects changed since: 90s, 30m, 12h, 1d, 2w."),
    ] = "",
    show_all: Annotated[
        bool, typer.Option("--all", help="List the temporary objects of writes, too.")
    ] = False,
    all_generations: Annotated[
        bool,
        typer.Option("--all-generations", help="List all below, with noncurrent generations."),
    ] = False,
    manifest: Annotated[
        str,
        typer.Option(metavar="URI", help="Save the listing to this object; with one URI only."),
    ] = "",
) -> int:
    """List objects and prefixes by key, one whole uri per line.

    "gs://b/p" lists everything below "p/", and the object "p" if it exists. If a URI cannot be
    listed, an error is printed and the next one is listed. "gs://" or "s3://" alone lists the
    buckets of the project (of GOOGLE_CLOUD_PROJECT, or the credentials) or of the account.

    --all-generations: on gs:// and s3://, as uri#generation; JSON also has is_latest.

    --json: type ("object" or "prefix") and uri; for objects also size (bytes), updated (RFC 3339,
    UTC), generation, etag, crc32c (base64), content_type, content_encoding, content_disposition,
    cache_control, storage_class and metadata. Unknown values are null or empty.

    --manifest: writes the listing to one object (or file), from which `from_manifest` of the
    datasets reads it instead of listing again; prints the number of objects.

    Examples: aioflux ls -r --sort time --limit 5 gs://bucket/runs;
    aioflux ls -lh "gs://bucket/train/*.tar"
    """
    if buckets := _BUCKETS.keys() & set(uris):
        if len(uris) > 1 or long or human or recursive or newer or sort != "key":
            raise typer.BadParameter(f"{min(buckets)} lists buckets, with --limit and --json only")
        if all_generations or show_all or manifest:
            raise typer.BadParameter(f"{min(buckets)} lists buckets; add the name of one")
    if sort not in _SORT_KEYS:
        raise typer.BadParameter(f"--sort {sort}: use {', '.join(_SORT_KEYS)}")
    if all_generations and (show_all or any(map(PATTERN.search, uris))):
        raise typer.BadParameter("--all-generations takes no --all and no patterns")
    if manifest:
        if len(uris) > 1 or long or as_json or show_all or all_generations:
            raise typer.BadParameter("--manifest takes one URI, and no --long, --json or --all")
        source, target = parse_arguments([*uris, manifest])
        return run(lambda: _save_manifest(source, target))
    printer = _Printer(
        long=long or human,
        as_json=as_json,
        human=human,
        sort=sort,
        limit=math.inf if limit is None else limit,
        since=datetime.now(UTC) - timedelta(seconds=parse_age(newer)) if newer else None,
        with_generations=all_generations,
    )
    if buckets:
        location = Location(_BUCKETS[uris[0]], "", "")
        return run(lambda: _list_buckets(UriOrPath(uris[0], location), printer))

    async def show(argument: UriOrPath) -> None:
        if all_generations:
            await _list_generations(argument, printer)
            return
        await _list(argument, printer, "" if recursive else "/", show_all)

    async def finish(report: Report) -> int:
        await printer.finish(is_complete=not report.num_failed)
        if manifests := printer.manifests:
            print_notice(
                f"{one_line(manifests[0])} is the manifest of a dataset: from_manifest of "
                "aioflux.data reads the objects that it lists"
            )
        return report.finish()

    return run_for_each(uris, show, prefixes=True, finish=finish)


@dataclass(slots=True)
class _Printer:
    """Printer and counter of objects and prefixes."""

    long: bool
    as_json: bool
    human: bool
    sort: str
    limit: float
    """Most objects and prefixes to print."""
    since: datetime | None
    """Time of the oldest objects to print; None for all objects, and prefixes."""
    with_generations: bool = False
    """Print uris as `uri#generation`."""
    num_printed: int = 0
    num_objects: int = 0
    num_bytes: int = 0
    manifests: list[str] = field(default_factory=list)
    """Uris of the printed manifests."""
    _sorted: list[ObjectMeta] = field(default_factory=list)
    """What `finish` sorts and prints; unused if the order is that of the keys."""
    _prefixes: list[str] = field(default_factory=list)
    """What `finish` prints then, as prefixes have neither size nor time."""

    @property
    def is_full(self) -> bool:
        """Return whether nothing more is printed, whatever follows."""
        return self.sort == "key" and self.num_printed >= self.limit

    async def print_objects(self, metas: Iterable[ObjectMeta]) -> None:
        await self._print(metas, [])

    async def print_buckets(self, uris: Iterable[str]) -> None:
        await self._print([], [(uri, uri) for uri in uris])

    async def print_page(self, store: Store, page: Listing) -> None:
        """Print a page: objects and prefixes, sorted by key."""
        self.manifests += (join_uri(store.uri, key) for key in page.without_manifests()[1])
        await self._print(page, [(each, join_uri(store.uri, each)) for each in page.prefixes])

    async def _print(self, metas: Iterable[ObjectMeta], prefixes: list[tuple[str, str]]) -> None:
        """Print objects, and prefixes with their uris."""
        if self.since is not None:
            metas = [each for each in metas if each.updated and each.updated >= self.since]
            prefixes = []
        if self.sort != "key":
            self._sorted += metas
            self._prefixes += (uri for _, uri in prefixes)
            metas, prefixes = [], []
        rows: list[tuple[str, ObjectMeta | str]] = [(meta.key, meta) for meta in metas]
        rows += prefixes
        rows.sort(key=itemgetter(0))
        shown = rows if self.limit == math.inf else rows[: int(self.limit) - self.num_printed]
        self.num_printed += len(shown)
        await print_lines("\n".join(self._line(each) for _, each in shown))

    async def finish(self, *, is_complete: bool) -> None:
        """Print what is left, and the total of a long listing if nothing is missing."""
        found = sorted(self._sorted, key=_SORT_KEYS[self.sort])
        rows: list[ObjectMeta | str] = [*found, *self._prefixes]
        shown = rows if self.limit == math.inf else rows[: int(self.limit)]
        await print_lines("\n".join(map(self._line, shown)))
        if is_complete and self.long and not self.as_json:
            count = format_count(self.num_objects, "object")
            await print_lines(f"{count}, {self.num_bytes:,} bytes ({format_size(self.num_bytes)})")

    def _line(self, each: ObjectMeta | str) -> str:
        if isinstance(each, str):
            return self._prefix(each)
        self.num_objects += 1
        self.num_bytes += each.size
        if self.with_generations:
            each = replace(each, uri=f"{each.uri}#{each.generation}")
        if self.as_json:
            more = {"is_latest": each.is_latest} if self.with_generations else {}
            return json_line(meta_row(each) | more)
        if not self.long:
            return one_line(each.uri)
        updated = format_time(each.updated) or "-"
        size = format_size(each.size) if self.human else str(each.size)
        return f"{size:>14}  {updated:<24}  {each.generation or '-'}  {one_line(each.uri)}"

    def _prefix(self, uri: str) -> str:
        if self.as_json:
            return json_line(prefix_row(uri))
        return f"{'':>14}  {'':<24}  {one_line(uri)}" if self.long else one_line(uri)


async def _list(argument: UriOrPath, printer: _Printer, delimiter: str, show_all: bool) -> None:
    if argument.meta is not None:
        await printer.print_objects([argument.meta])
        return
    store, key = argument.open(follow=True)
    prefix = as_prefix(key)
    found = False
    if prefix != key and (meta := await find(store, key)):
        uri = str(argument.location) if argument.is_link() else meta.uri
        await printer.print_objects([replace(meta, uri=uri)])
        found = True
    pages = store.list_pages(prefix, delimiter=delimiter, with_temporary=show_all)
    async with aclosing(pages):
        async for page in pages:
            await printer.print_page(store, page)
            found = True
            if printer.is_full:
                break
    if not found and (key or argument.is_missing()):
        uri = str(argument.location)
        raise NotFoundError(f"there is no object or prefix {uri}; {argument.hint()}", uri=uri)


async def _list_generations(argument: UriOrPath, printer: _Printer) -> None:
    store, key = argument.open()
    prefix, found, metas = as_prefix(key), False, []
    async with aclosing(store.list(key, versions=True)) as listed:
        async for meta in listed:
            if meta.key != key and not meta.key.startswith(prefix):
                continue
            found = True
            metas.append(meta)
            if len(metas) == _BATCH:
                await printer.print_objects(metas)
                metas = []
                if printer.is_full:
                    break
    await printer.print_objects(metas)
    if not found and key:
        uri = str(argument.location)
        raise NotFoundError(f"there is no generation of {uri}; {argument.hint()}", uri=uri)


async def _list_buckets(argument: UriOrPath, printer: _Printer) -> int:
    from aioflux.store import Store, sessions_of

    options: dict[str, Any] = {"transfer": TransferOptions(), "timeouts": Timeouts()}
    options |= argument.store_options()
    async with Store(argument.location, **options) as store:
        session = sessions_of(store).current()
        names = await session.call("", session.service.list_buckets)
    await printer.print_buckets(f"{argument.location}{name}/" for name in names)
    return 0


async def _save_manifest(source_uri: UriOrPath, target: UriOrPath) -> int:
    """Write the listing of everything below a uri to one object."""
    if not target.split()[1]:
        raise typer.BadParameter(f"--manifest {target.text}: a manifest is an object; add a name")
    source = source_uri.open_root(str(source_uri.location))
    listing, _ = (await source.list_all()).without_manifests()
    if not listing:
        raise NotFoundError(
            f"there is no object below {source.uri}; check the spelling", uri=source.uri
        )
    store, key = target.open()
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

"""Listings of S3: a page of ListObjectsV2, parsed from XML into columns, and the requests for it.

Requests ask for percent-encoded keys (`encoding-type=url`), since XML cannot represent some
characters. A regular expression parses the objects, in 1.5 ms for a page of 1,000. If it does not
match all objects, an XML parser parses the page, in 6 ms.
Source: docs.aws.amazon.com/AmazonS3/latest/API/API_ListObjectsV2.html.
"""

from __future__ import annotations

import re
from array import array
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from datetime import datetime
from functools import partial
from operator import lt
from typing import TYPE_CHECKING, Any, Final, TypeVar
from urllib.parse import quote, unquote_plus

from aioflux._services.base import MAX_PAGE_ENTRIES, Page
from aioflux._services.responses import EmptyPageCounter, malformed_page, unexpected_page
from aioflux._services.s3.wire import generation_of, version_generation
from aioflux._services.sender import MAX_PAGE_BYTES
from aioflux._services.xml_reader import read_xml
from aioflux._values.columns import TimeColumn
from aioflux._values.listing import MAX_SIZE_BYTES, Kind, Listing
from aioflux._values.meta import ObjectMeta

if TYPE_CHECKING:
    from aioflux._services.base import ListRequest
    from aioflux._services.s3.sender import S3Sender

T = TypeVar("T")

_OBJECT = re.compile(
    r"<Contents><Key>([^<]*)</Key><LastModified>([^<]*)</LastModified><ETag>([^<]*)</ETag>"
    r"(?:<Checksum\w+>[^<]*</Checksum\w+>)*<Size>([0-9]+)</Size>(?:<Owner>.*?</Owner>)?"
    r"(?:<StorageClass>([^<]*)</StorageClass>)?</Contents>"
)
_MAX_MATCHED_BYTES = 8 * 1024 * 1024
"""Largest page that the regular expression parses: it takes several times the memory of a page."""
_FIELDS = ("Key", "LastModified", "ETag", "Size", "StorageClass")
SORTED_PREFIX = "aioflux:after:"
"""Prefix of page tokens of a listing that is sorted here. The last name of the previous page
follows it."""
_LAST = "\U0010fffd"  # the last character that XML can represent
_MAX_KEY_BYTES = 1024
_SAME_PAGE = "its next page is the same page again"
_SURROGATES = range(0xD800, 0xE000)


@dataclass(slots=True)
class BucketPage:
    """One page of a listing as columns, with full object names."""

    names: list[str] = field(default_factory=list)
    sizes: list[int] = field(default_factory=list)
    etags: list[str] = field(default_factory=list)
    updated: list[str] = field(default_factory=list)
    classes: list[str] = field(default_factory=list)
    prefixes: list[str] = field(default_factory=list)
    next_token: str = ""

    def extend(self, other: BucketPage) -> None:
        """Append another page."""
        for name in ("names", "sizes", "etags", "updated", "classes", "prefixes"):
            getattr(self, name).extend(getattr(other, name))

    def split(self, num_objects: int) -> BucketPage:
        """Keep the first `num_objects` objects and all prefixes; return the other objects."""
        rest = BucketPage()
        for name in ("names", "sizes", "etags", "updated", "classes"):
            column = getattr(self, name)
            setattr(rest, name, column[num_objects:])
            setattr(self, name, column[:num_objects])
        return rest

    def pick(self, indices: list[int]) -> None:
        """Keep only the objects at these indices, in this order."""
        for name in ("names", "sizes", "etags", "updated", "classes"):
            column = getattr(self, name)
            setattr(self, name, [column[index] for index in indices])


def list_query(
    *, prefix: str, start_after: str = "", delimiter: str = "", token: str = "", size: int = 1000
) -> bytes:
    """Return the query of one page, with its parameters sorted as the signature requires."""
    pairs = {
        "continuation-token": token,
        "delimiter": delimiter,
        "encoding-type": "url",
        "list-type": "2",
        "max-keys": str(size),
        "prefix": prefix,
        "start-after": "" if token else start_after,
    }
    return _encode_query(pairs)


def version_query(*, prefix: str, token: str, size: int) -> bytes:
    """Return the query of one page of ListObjectVersions; `token` is that of `decode_versions`."""
    version, _, key = token.partition(" ")
    pairs = {
        "encoding-type": "url",
        "key-marker": key,
        "max-keys": str(size),
        "prefix": prefix,
        "version-id-marker": version,
    }
    return _encode_query(pairs) + b"&versions="


def _encode_query(pairs: Mapping[str, str]) -> bytes:
    return "&".join(
        f"{name}={quote(value, safe='')}" for name, value in pairs.items() if value
    ).encode()


def start_after(name: str) -> str:
    """Return a value of `start-after` for a listing that starts at `name`.

    S3 lists the names after that value, without the value itself. Some names before `name` may be
    listed, too.
    """
    if not name:
        return ""
    previous = ord(name[-1]) - 1
    if previous in _SURROGATES:
        previous = _SURROGATES.start - 1
    # Some servers copy the value into the XML of the response, so it must have only XML characters.
    is_xml = previous > 0x20 and previous & 0xFFFE != 0xFFFE
    value = name[:-1] + (chr(previous) + _LAST if is_xml else "")
    # The value may not be longer than a name.
    return value if len(value.encode()) <= _MAX_KEY_BYTES else name[:-1]


def decode_page(data: bytes | bytearray | memoryview) -> BucketPage:
    """Parse a page of a listing.

    Raises:
        ValueError: The page is malformed, or has too many entries.
    """
    rows: list[tuple[str, ...]] = []
    rest = data
    if len(data) <= _MAX_MATCHED_BYTES:
        text = bytes(data).decode()
        rows = _OBJECT.findall(text)
        rest = _OBJECT.sub("", text).encode() if rows else data
    page, fields = _decode_by_parser(rest)
    if rows and page.names:
        # The regular expression does not match all objects.
        page, fields = _decode_by_parser(data)
    elif rows:
        names, updated, etags, sizes, classes = map(list, zip(*rows, strict=True))
        if any("&" in name for name in names):
            from xml.sax.saxutils import unescape  # takes 8 ms to import

            names = [unescape(name) if "&" in name else name for name in names]
        page.names = names
        page.sizes = list(map(int, sizes))
        page.etags = [
            etag.replace("&#34;", "&quot;").replace("&quot;", "").strip('"') for etag in etags
        ]
        page.updated, page.classes = updated, classes
    return _finish(page, fields)


def _decode_by_parser(data: bytes | bytearray | memoryview) -> tuple[BucketPage, dict[str, str]]:
    page = BucketPage()

    def add(values: Mapping[str, str]) -> None:
        name, updated, etag, size, storage_class = (values.get(tag, "") for tag in _FIELDS)
        page.names.append(name)
        page.updated.append(updated)
        page.etags.append(etag.strip('"'))
        page.sizes.append(int(size))
        page.classes.append(storage_class)

    def add_prefix(texts: Mapping[str, str]) -> None:
        page.prefixes.append(texts[""])

    root, fields = read_xml(data, {"Contents": add, "CommonPrefixes/Prefix": add_prefix})
    if root != "ListBucketResult":
        raise ValueError(f"it is <{root}>")
    return page, fields


def _finish(page: BucketPage, fields: dict[str, str]) -> BucketPage:
    num_objects, num_prefixes = len(page.names), len(page.prefixes)
    for size in (min(page.sizes, default=0), max(page.sizes, default=0)):
        if not 0 <= size <= MAX_SIZE_BYTES:
            raise ValueError(f"an object has {size} bytes, not 0 to {MAX_SIZE_BYTES}")
    if fields.get("EncodingType") == "url":
        page.names = [_decode_name(name) for name in page.names]
        page.prefixes = [_decode_name(name) for name in page.prefixes]
    if num_objects + num_prefixes > MAX_PAGE_ENTRIES:
        raise ValueError(f"it has more than {MAX_PAGE_ENTRIES:,} entries")
    if len(set(page.names)) < num_objects:
        raise ValueError("it has a key twice")
    # Some servers do not count the common prefixes, and some return no count.
    counts = {str(num_objects), str(num_objects + num_prefixes), ""}
    if fields.get("KeyCount", "") not in counts:
        raise ValueError(f"its KeyCount is {fields['KeyCount']!r}, but it has {num_objects} keys")
    is_truncated = fields.get("IsTruncated", "").lower()
    if is_truncated == "true":
        page.next_token = fields.get("NextContinuationToken", "")
        if not page.next_token:
            raise ValueError("the page is truncated, but has no token for the next page")
    elif is_truncated != "false":
        raise ValueError("it does not say whether it is truncated")
    return page


def decode_versions(
    data: bytes | bytearray | memoryview, *, prefix: str, root: str, below: str
) -> tuple[list[ObjectMeta], str]:
    """Parse a page of ListObjectVersions, without its delete markers.

    Args:
        data: Body of the response.
        prefix: Prefix of the store, which keys are relative to.
        root: Uri of the store.
        below: Full prefix of the listing.

    Returns:
        The versions, and the token of the next page: id and key of the last entry of this one.

    Raises:
        ValueError: The page is malformed, has too many entries, or a name that was not requested.
    """
    rows: list[Mapping[str, str]] = []
    page, fields = read_xml(data, {"Version": rows.append, "DeleteMarker": lambda _: None})
    if page != "ListVersionsResult":
        raise ValueError(f"it is <{page}>")
    decode = _decode_name if fields.get("EncodingType") == "url" else str
    metas: list[ObjectMeta] = []
    for row in rows:
        name, updated, etag, size, storage_class = (row.get(tag, "") for tag in _FIELDS)
        name, etag = decode(name), etag.strip('"')
        if not name.startswith(below) or not 0 <= int(size) <= MAX_SIZE_BYTES:
            raise ValueError(f"{name!r} has {size} bytes, or is not below {below!r}")
        is_latest, version = row.get("IsLatest") == "true", row.get("VersionId", "")
        if not is_latest and not version:
            raise ValueError(f"a noncurrent version of {name!r} has no id")
        key = name.removeprefix(prefix)
        metas.append(
            ObjectMeta(
                key=key,
                uri=root + key,
                size=int(size),
                etag=etag,
                generation=generation_of(etag, int(size))
                if is_latest
                else version_generation(version),
                updated=datetime.fromisoformat(updated),
                storage_class=storage_class,
                is_latest=is_latest,
            )
        )
    if fields.get("IsTruncated", "").lower() != "true":
        return metas, ""
    if not (key := decode(fields.get("NextKeyMarker", ""))):
        raise ValueError("the page is truncated, but has no marker of the next page")
    return metas, f"{fields.get('NextVersionIdMarker', '')} {key}"


def decode_buckets(data: bytes | bytearray | memoryview) -> list[str]:
    """Return the names in a response to ListBuckets; ValueError if it is malformed."""
    names: list[str] = []
    root, _ = read_xml(data, {"Buckets/Bucket": lambda row: names.append(row.get("Name", ""))})
    if root != "ListAllMyBucketsResult":
        raise ValueError(f"it is <{root}>")
    return names


def _decode_name(name: str) -> str:
    return unquote_plus(name, errors="strict") if "%" in name or "+" in name else name


def is_sorted(page: BucketPage) -> bool:
    """Return whether names and prefixes are sorted and unique."""
    return all(all(map(lt, names, names[1:])) for names in (page.names, page.prefixes))


def sort(page: BucketPage) -> None:
    """Sort a page by name."""
    names = page.names
    page.pick(sorted(range(len(names)), key=names.__getitem__))
    page.prefixes = sorted(set(page.prefixes))


def cut_to_range(page: BucketPage, *, start: str, end: str) -> None:
    """Remove names outside of `[start, end)`, and the page token if the page reaches `end`."""
    names = page.names
    first, stop = 0, len(names)
    while first < stop and names[first] < start:
        first += 1
    if end and (names[-1:] >= [end] or page.prefixes[-1:] >= [end]):
        page.next_token = ""
        while stop > first and names[stop - 1] >= end:
            stop -= 1
    if (first, stop) != (0, len(names)):
        page.pick(list(range(first, stop)))
    page.prefixes = [
        prefix
        for prefix in page.prefixes
        if (prefix >= start or start.startswith(prefix)) and (not end or prefix < end)
    ]


def listing_of(page: BucketPage, *, prefix: str, root: str) -> Listing:
    """Return the objects of a page as columns.

    Raises:
        ValueError: A name does not begin with `prefix`, or a time is malformed.
    """
    listing = Listing()
    if not page.names:
        return listing
    # Names are sorted: if the first and the last one begin with the prefix, all of them do.
    for name in (page.names[0], page.names[-1]):
        if not name.startswith(prefix):
            raise ValueError(f"{name!r} is not below {prefix!r}")
    num_cut = len(prefix)
    kinds = [Kind(storage_class=storage_class) for storage_class in page.classes]
    has_one_kind = len(set(page.classes)) == 1
    listing.extend_columns(
        root,
        keys=[name[num_cut:] for name in page.names] if num_cut else page.names,
        sizes=page.sizes,
        etags=page.etags,
        generations=list(map(generation_of, page.etags, page.sizes)),
        crc32c=array("q", [-1]) * len(page.names),
        updated=_times(page.updated),
        kinds=None if has_one_kind else kinds,
        kind=kinds[0],
    )
    return listing


def _times(texts: list[str]) -> TimeColumn:
    column = TimeColumn()
    if not column.add_texts(texts):
        column.add_times([datetime.fromisoformat(text) if text else None for text in texts])
    return column


_UNSORTED_SERVERS: Final = (b"SeaweedFS",)
"""Servers that list "a/b" before "a-b", by the beginning of their Server header."""
_MAX_REMAINDERS: Final = 4
"""Maximum number of sorted listings whose remaining objects are cached."""


class S3Lister:
    """Reader of sorted pages below the prefix of a store.

    If the server does not sort, the whole listing is read and sorted for its first page.
    """

    def __init__(
        self,
        sender: S3Sender,
        prefix: str,
        *,
        uri: Callable[[str], str],
        note_unsorted: Callable[[], None],
    ) -> None:
        """Initialize; `prefix` is the prefix of the store, `uri` returns the uri of a key.

        `note_unsorted` is called when the server does not sort. A listing should not be split into
        ranges then, since each range would read the whole listing.
        """
        self._sender = sender
        self._prefix = prefix
        self._uri = uri
        self._note_unsorted = note_unsorted
        self._is_unsorted = False
        # The remaining objects of sorted listings, by the token of the next page.
        self._remainders: dict[str, BucketPage] = {}

    async def page(self, request: ListRequest, size: int) -> Page:
        """Read one page of at most `size` objects; see `Service.list_page`.

        With a delimiter, a listing that the server does not sort is one page of all its objects.
        """
        prefix, page_token = request.prefix, request.page_token
        start = request.start_offset and self._prefix + request.start_offset
        end = request.end_offset and self._prefix + request.end_offset
        request_page = partial(self._request_page, prefix, request.delimiter, size)
        page = self._remainders.pop(page_token, None)
        if page is None and not self._is_unsorted:
            page = await request_page(start, page_token)
        if page is None or self._is_unsorted or not is_sorted(page):
            self._is_unsorted = True
            self._note_unsorted()
            limit = 0 if request.delimiter else size
            page = await self._page_of_sorted(request_page, page, prefix, page_token, start, limit)
        if page_token and page.next_token == page_token:
            raise unexpected_page(self._uri(prefix), _SAME_PAGE)
        cut_to_range(page, start=start, end=end)
        try:
            objects = listing_of(page, prefix=self._prefix, root=self._uri(""))
        except ValueError as exc:
            raise unexpected_page(self._uri(prefix), exc) from exc
        num_cut = len(self._prefix)
        return Page(
            objects=objects,
            prefixes=[name[num_cut:] for name in page.prefixes],
            next_token=page.next_token,
        )

    async def version_page(self, request: ListRequest, size: int) -> Page:
        """Read one page of at most `size` versions and delete markers, which are left out."""
        prefix, token = request.prefix, request.page_token
        below = self._prefix + prefix
        query = b"?" + version_query(prefix=below, token=token, size=size)
        decode = partial(decode_versions, prefix=self._prefix, root=self._uri(""), below=below)
        metas, next_token = await self._request(query, prefix, decode)
        if token and next_token == token:
            raise unexpected_page(self._uri(prefix), _SAME_PAGE)
        return Page(objects=metas, prefixes=(), next_token=next_token)

    async def _request_page(
        self, prefix: str, delimiter: str, size: int, start: str, token: str
    ) -> BucketPage:
        query = list_query(
            prefix=self._prefix + prefix,
            start_after=start_after(start),
            delimiter=delimiter,
            token=token,
            size=size,
        )
        return await self._request(b"?" + query, prefix, decode_page)

    async def buckets(self) -> list[str]:
        """Return the names of all buckets of the account."""
        return await self._request(b"", "", decode_buckets)

    async def _request(self, query: bytes, prefix: str, decode: Callable[[Any], T]) -> T:
        """Send a request, and decode its response."""
        response = await self._sender.send(
            b"GET", query, "list", prefix, max_body_bytes=MAX_PAGE_BYTES
        )
        if response.headers.get(b"server", b"").startswith(_UNSORTED_SERVERS):
            self._is_unsorted = True
        try:
            return decode(response.body)
        except ValueError as exc:
            response.discard_connection()
            raise malformed_page(self._uri(prefix), exc) from exc

    async def _page_of_sorted(
        self,
        request_page: Any,
        page: BucketPage | None,
        prefix: str,
        token: str,
        start: str,
        limit: int,
    ) -> BucketPage:
        """Return one page of a listing that the server does not sort.

        Args:
            request_page: Requests one page of the server, given its start and its token.
            page: Cached rest of the sorted listing, or None. A page of the server may be passed,
                and is ignored if `token` is not a token for a sorted listing.
            prefix: Prefix of the listing, for error messages.
            token: Token of the page to return; empty for the first page.
            start: Smallest name to return.
            limit: Largest number of objects in the page; 0 for all.

        Raises:
            StorageError: The server returns the same page token twice, or too many empty pages.
        """
        if page is None or not token.startswith(SORTED_PREFIX):
            page = await request_page("", "")
            seen_tokens: set[str] = set()
            empty_pages = EmptyPageCounter(self._uri(prefix))
            while page.next_token:
                if page.next_token in seen_tokens:
                    raise unexpected_page(self._uri(prefix), "its next page is a previous page")
                seen_tokens.add(page.next_token)
                next_page = await request_page("", page.next_token)
                empty_pages.count(len(next_page.names) + len(next_page.prefixes))
                page.extend(next_page)
                page.next_token = next_page.next_token
            sort(page)
            if token.startswith(SORTED_PREFIX):
                # The remaining objects are no longer cached.
                start = max(start, token.removeprefix(SORTED_PREFIX) + "\0")
            cut_to_range(page, start=start, end="")
        if limit and len(page.names) > limit:
            remainder = page.split(limit)
            page.next_token = SORTED_PREFIX + page.names[-1]
            self._remainders[page.next_token] = remainder
            while len(self._remainders) > _MAX_REMAINDERS:
                del self._remainders[next(iter(self._remainders))]
        return page

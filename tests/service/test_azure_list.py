"""Pages of List Blobs, and listings in one order in any namespace."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import TYPE_CHECKING
from urllib.parse import parse_qs, quote, urlsplit
from xml.sax.saxutils import escape

import pytest
from hypothesis import given
from hypothesis import strategies as st

import aioflux
from aioflux import StorageError, TransientError
from aioflux._services.azure import listing
from aioflux._services.azure.listing import ListedBlob, ListedPage
from aioflux._services.base import ListRequest
from aioflux._values.listing import Kind
from tests.http.scripted import Peer, ok, serving

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

WHEN = "Sun, 22 Nov 2026 07:00:00 GMT"


def blob(name: str, *, properties: str = "", metadata: str = "", encoded: bool = False) -> str:
    text = (
        f'<Name Encoded="true">{quote(name)}</Name>' if encoded else f"<Name>{escape(name)}</Name>"
    )
    return (
        f"<Blob>{text}<Properties><Last-Modified>{WHEN}</Last-Modified><Etag>0x8D</Etag>"
        f"<Content-Length>3</Content-Length><Content-Type>a/b</Content-Type>{properties}"
        f"</Properties><Metadata>{metadata}</Metadata></Blob>"
    )


def page(*items: str, marker: str = "") -> bytes:
    return (
        f"\ufeff<?xml version='1.0'?><EnumerationResults><Blobs>{''.join(items)}</Blobs>"
        f"<NextMarker>{marker}</NextMarker></EnumerationResults>"
    ).encode()


def names(found: ListedPage) -> list[str]:
    return [each.name for each in found.blobs]


def test_a_page_is_read() -> None:
    found = listing.parse_page(
        page(
            blob("p/a", properties="<AccessTier>Hot</AccessTier>", metadata="<numRows>7</numRows>"),
            blob("p/\x7f", encoded=True),
            "<BlobPrefix><Name>p/d/</Name></BlobPrefix><Unheard/>",
            marker="next",
        )
    )
    assert names(found) == ["p/a", "p/\x7f"]
    assert (found.prefixes, found.next_marker) == (["p/d/"], "next")
    [meta, _] = listing.listing_of(found.blobs, prefix="p/", root="az://a/c/p/")
    assert (meta.key, meta.uri, meta.size) == ("a", "az://a/c/p/a", 3)
    assert (meta.etag, meta.generation, meta.crc32c) == ("0x8D", "0x8D", None)
    assert meta.updated == datetime(2026, 11, 22, 7, tzinfo=UTC)
    assert (meta.content_type, meta.storage_class) == ("a/b", "Hot")
    assert dict(meta.metadata) == {"numrows": "7"}


@pytest.mark.parametrize(
    "marker",
    [
        blob("d", properties="<ResourceType>directory</ResourceType>"),
        blob("d", metadata="<hdi_isfolder>true</hdi_isfolder>"),
    ],
)
def test_directories_are_left_out(marker: str) -> None:
    file = blob("d/a", properties="<ResourceType>file</ResourceType>")
    found = listing.parse_page(page(marker, file, marker="next"))
    assert names(found) == ["d/a"]
    assert listing.may_be_unsorted(found)


@pytest.mark.parametrize(
    ("data", "says"),
    [
        (b"", "not XML"),
        (b"<Error/>", "<Error>"),
        (b"<EnumerationResults/>", "not a page"),
        (page("<Blob><Properties/></Blob>"), "no name"),
        (page(blob("a").replace(">3<", ">-3<")), "the size of a blob is -3"),
        (page(blob("a").replace(">3<", ">x<")), "invalid literal"),
    ],
)
def test_what_is_no_page_is_refused(data: bytes, says: str) -> None:
    with pytest.raises(ValueError, match=says):
        listing.parse_page(data)


def listed(*names: str, prefixes: Sequence[str] = (), marker: str = "") -> ListedPage:
    return ListedPage([ListedBlob(name, 1, "e", "", Kind()) for name in names], [*prefixes], marker)


def test_a_page_is_cut_to_what_was_requested() -> None:
    found = listed("p/c", "p/a", "p/b", marker="next")
    cut = listing.in_range(found, prefix="p/", start="p/b", end="")
    assert (names(cut), cut.next_marker) == (["p/b", "p/c"], "next")
    cut = listing.in_range(found, prefix="p/", start="", end="p/c")
    assert (names(cut), cut.next_marker) == (["p/a", "p/b"], "")
    cut = listing.in_range(listed(prefixes=["p/z/", "p/y/"]), prefix="p/", start="", end="p/z")
    assert cut.prefixes == ["p/y/"]
    with pytest.raises(ValueError, match="not below 'p/'"):
        listing.in_range(listed("q"), prefix="p/", start="", end="")


def hierarchical(name: str) -> object:
    return name.split("/")


def utf16(name: str) -> object:
    return name.encode("utf-16-be", "surrogatepass")


def utf8(name: str) -> object:
    return name


text = st.text(st.sampled_from("ab-./\ud7ff\uff5e\U0001f600"), min_size=1, max_size=5)


@given(
    keys=st.sets(text, max_size=12), size=st.integers(1, 4), order=st.sampled_from([utf16, utf8])
)
def test_what_comes_after_a_page_without_doubt_is_after_it(
    keys: set[str], size: int, order: Callable[[str], object]
) -> None:
    """Whichever of the two orders a flat namespace has."""
    given = sorted(keys, key=order)  # type: ignore[arg-type]
    for at in range(0, len(given), size):
        found = listed(*given[at : at + size], marker="x" if given[at + size :] else "")
        if listing.may_be_unsorted(found):
            return
        assert max(given[at : at + size]) < min(given[at + size :], default="\U0010ffff" * 9)


class Namespace:
    """Answers List Blobs with pages of two, in an order of its own."""

    def __init__(self, keys: Sequence[str], order: Callable[[str], object]) -> None:
        self.num_asked = 0
        is_deep = order is hierarchical
        entries = {(key, False) for key in keys}
        if is_deep:
            entries |= {
                (key.rsplit("/", depth)[0], True)
                for key in keys
                for depth in range(1, key.count("/") + 1)
            }
        self._entries = sorted(entries, key=lambda entry: order(entry[0]))  # type: ignore[arg-type, return-value]

    async def __call__(self, peer: Peer) -> None:
        while True:
            head, _ = await peer.read_request()
            self.num_asked += 1
            query = parse_qs(urlsplit(head.split()[1].decode()).query)
            begin = int(query.get("marker", ["0"])[0])
            directory = "<ResourceType>directory</ResourceType>"
            items = [
                blob(name, properties=directory if is_directory else "")
                for name, is_directory in self._entries[begin : begin + 2]
            ]
            more = begin + 2 < len(self._entries)
            await peer.send(ok(page(*items, marker=str(begin + 2) if more else "")))


KEYS = ["a-b", "a.b", "a/b", "a/b/c-", "a/c", "a0", "b", "d/e", "\uff5e", "\U0001f600"]


@pytest.mark.parametrize("order", [utf8, utf16, hierarchical])
async def test_listings_are_in_one_order_in_any_namespace(order: Callable[[str], object]) -> None:
    keys = [key for key in KEYS if order is not hierarchical or key != "a/b"]
    namespace = Namespace(keys, order)
    async with serving(namespace) as (_, origin):
        url = f"http://127.0.0.1:{origin.port}"
        async with aioflux.open_store("az://acct/c", endpoint_url=url) as store:
            assert [meta.key for meta in await store.list_all()] == sorted(keys)
    assert namespace.num_asked == (len(namespace._entries) + 1) // 2


@pytest.mark.parametrize("is_known", [True, False], ids=["known token", "forgotten token"])
async def test_pages_of_what_was_sorted_are_given_one_by_one(*, is_known: bool) -> None:
    """Also to whoever comes again with a token that is no longer known."""
    keys = sorted([*KEYS, *(chr(0x1F600 + number) for number in range(1, 6)), "\uff60", "\uff61"])
    async with serving(Namespace(keys, utf16)) as (_, origin):
        url = f"http://127.0.0.1:{origin.port}"
        async with aioflux.open_store("az://acct/c", endpoint_url=url) as store:
            service = store._sessions.current().service
            got: list[str] = []
            token = ""
            for _ in range(20):
                found = await service.list_page(ListRequest("", page_size=3, page_token=token))
                assert len(found.objects) <= 3
                if not is_known:
                    service._lister._sorted.clear()  # type: ignore[attr-defined]
                got += [meta.key for meta in found.objects]
                token = found.next_token
                if not token:
                    break
            assert got == keys


@pytest.mark.parametrize(
    ("answer", "error", "says"),
    [
        (b"<html/>", TransientError, "not a listing"),
        (
            page(blob("p/a", properties=f"<Content-Length>{'9' * 30}</Content-Length>")),
            TransientError,
            "not a listing",
        ),
        (page(blob("else")), StorageError, "'else' is not below 'p/'"),
        (page(blob("p/a"), marker="m"), StorageError, "same page again"),
    ],
)
async def test_a_page_that_cannot_be_right_is_refused(
    answer: bytes, error: type[Exception], says: str
) -> None:
    async def script(peer: Peer) -> None:
        while True:
            await peer.read_request()
            await peer.send(ok(answer))

    retry = aioflux.RetryPolicy(max_attempts=1)
    async with serving(script) as (_, origin):
        url = f"http://127.0.0.1:{origin.port}"
        store = aioflux.open_store("az://acct/c/p", endpoint_url=url, retry=retry)
        async with store:
            with pytest.raises(error, match=says):
                await store.list_all()

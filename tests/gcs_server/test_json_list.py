"""objects.list: pages, filters and field masks."""

from __future__ import annotations

import json
import re
from urllib.parse import urlencode

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from aioflux.testing.gcs_server import APIError
from aioflux.testing.gcs_server._glob import Glob, compile_glob, literal_prefix
from aioflux.testing.gcs_server._listing import Query, list_page
from aioflux.testing.gcs_server._resources import parse_fields, select

NAMES = ["a/", "a/1", "a/2/x", "a/2/y", "b", "b/", "b/1", "c/1", "d", "\u732b/1"]


@pytest.fixture
def filled(server):
    for name in NAMES:
        server.put("bucket", name, b"data")
    return server


def listing(call, **query: object) -> dict:
    response = call("GET", f"/storage/v1/b/bucket/o?{urlencode(query)}")
    assert response.status == 200, response.body
    return json.loads(response.body)


def names_of(page: dict) -> list[str]:
    return [item["name"] for item in page.get("items", [])]


def walk(call, **query: object) -> tuple[list[str], list[str], list[int]]:
    """Follow the pages; return names, prefixes and how many entries each page had."""
    names, prefixes, sizes = [], [], []
    token: dict[str, str] = {}
    while True:
        page = listing(call, **query, **token)
        names += names_of(page)
        prefixes += page.get("prefixes", [])
        sizes.append(len(page.get("items", [])) + len(page.get("prefixes", [])))
        if "nextPageToken" not in page:
            return names, prefixes, sizes
        token = {"pageToken": page["nextPageToken"]}


def test_names_come_in_order_of_their_bytes(filled, call):
    assert names_of(listing(call)) == sorted(NAMES, key=str.encode)


def test_an_item_is_the_resource_that_get_gives(filled, call):
    item = listing(call, prefix="d")["items"][0]
    assert item == json.loads(call("GET", "/storage/v1/b/bucket/o/d").body)


def test_an_empty_listing_has_neither_items_nor_prefixes(call):
    assert listing(call) == {"kind": "storage#objects"}


def test_a_delimiter_groups_names(filled, call):
    page = listing(call, delimiter="/")
    assert names_of(page) == ["b", "d"]
    assert page["prefixes"] == ["a/", "b/", "c/", "\u732b/"]


def test_a_delimiter_counts_behind_the_prefix(filled, call):
    page = listing(call, delimiter="/", prefix="a/")
    assert (names_of(page), page["prefixes"]) == (["a/", "a/1"], ["a/2/"])


def test_a_delimiter_may_have_several_characters(filled, call):
    page = listing(call, delimiter="/1")
    assert page["prefixes"] == ["a/1", "b/1", "c/1", "\u732b/1"]


def test_include_trailing_delimiter_lists_the_placeholder_too(filled, call):
    page = listing(call, delimiter="/", includeTrailingDelimiter="true")
    assert names_of(page) == ["a/", "b", "b/", "d"]
    assert page["prefixes"] == ["a/", "b/", "c/", "\u732b/"]


def test_offsets_include_the_start_and_exclude_the_end(filled, call):
    assert names_of(listing(call, startOffset="a/2/x", endOffset="b/")) == ["a/2/x", "a/2/y", "b"]
    assert names_of(listing(call, startOffset="a/2", prefix="a/")) == ["a/2/x", "a/2/y"]
    assert names_of(listing(call, startOffset="x", endOffset="c")) == []


@pytest.mark.parametrize("size", [1, 2, 3, 100])
@pytest.mark.parametrize("trailing", ["true", "false"])
def test_pages_count_items_and_prefixes_together(filled, call, size, trailing):
    query = {"delimiter": "/", "includeTrailingDelimiter": trailing}
    names, prefixes, sizes = walk(call, maxResults=size, **query)
    whole = listing(call, **query)
    assert (names, prefixes) == (names_of(whole), whole["prefixes"])
    assert all(found == size for found in sizes[:-1])


def test_pages_work_together_with_offsets(filled, call):
    names, _, _ = walk(call, maxResults=1, startOffset="a/1", endOffset="c/1")
    assert names == ["a/1", "a/2/x", "a/2/y", "b", "b/", "b/1"]


def test_a_token_survives_the_end_of_the_name_it_came_from(filled, call):
    token = listing(call, maxResults=2)["nextPageToken"]
    call("DELETE", "/storage/v1/b/bucket/o/a%2F1")
    call("DELETE", "/storage/v1/b/bucket/o/a%2F2%2Fx")
    assert names_of(listing(call, maxResults=2, pageToken=token)) == ["a/2/y", "b"]


def test_a_token_of_a_prefix_survives_the_end_of_the_prefix(filled, call):
    token = listing(call, maxResults=3, delimiter="/")["nextPageToken"]  # ends at b/
    call("DELETE", "/storage/v1/b/bucket/o/b%2F")
    call("DELETE", "/storage/v1/b/bucket/o/b%2F1")
    assert listing(call, delimiter="/", pageToken=token)["prefixes"] == ["c/", "\u732b/"]


def test_a_page_has_1000_entries_by_default(server, call):
    for number in range(1001):
        server.put("bucket", f"{number:04}", b"")
    page = listing(call, fields="items/name,nextPageToken")
    assert len(page["items"]) == 1000
    rest = listing(call, pageToken=page["nextPageToken"])
    assert names_of(rest) == ["1000"]
    assert len(listing(call, maxResults=5000)["items"]) == 1001


def test_a_page_has_5000_entries_at_most(server, call):
    for number in range(5001):
        server.put("bucket", f"{number:04}", b"")
    page = listing(call, maxResults=9999, fields="items/name,nextPageToken")
    assert len(page["items"]) == 5000
    assert "nextPageToken" in page


@pytest.mark.parametrize("query", [{}, {"delimiter": "|"}], ids=["flat", "grouped"])
def test_a_page_that_holds_the_rest_has_no_token(filled, call, query):
    assert "nextPageToken" not in listing(call, maxResults=len(NAMES), **query)
    assert "nextPageToken" in listing(call, maxResults=len(NAMES) - 1, **query)


@pytest.mark.parametrize(
    "query", ["maxResults=x", "maxResults=-1", "pageToken=%C3%A4", "matchGlob=[", "fields=("]
)
def test_a_malformed_query_is_400(filled, call, query):
    assert call("GET", f"/storage/v1/b/bucket/o?{query}").status == 400


def test_parameters_of_other_features_are_ignored(filled, call):
    page = listing(call, versions="true", projection="full", softDeleted="false", userProject="p")
    assert names_of(page) == sorted(NAMES)


def test_a_listing_of_no_bucket_is_404(call):
    assert call("GET", "/storage/v1/b/none/o").status == 404


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ("items/name", {"items": [{"name": "b"}, {"name": "b/"}]}),
        ("items(name,size)", {"items": [{"name": "b", "size": "4"}, {"name": "b/", "size": "4"}]}),
        ("kind,prefixes", {"kind": "storage#objects"}),
        (
            "items(kind),items(bucket)",
            {"items": [{"kind": "storage#object", "bucket": "bucket"}] * 2},
        ),
        ("nothing", {}),
    ],
)
def test_fields_selects_what_is_sent(filled, call, fields, expected):
    page = listing(call, startOffset="b", endOffset="b/1", fields=fields)
    assert page == expected


def test_the_mask_asks_for_tokens_explicitly(filled, call):
    assert "nextPageToken" not in listing(call, maxResults=1, fields="items")
    assert "nextPageToken" in listing(call, maxResults=1, fields="*")
    assert listing(call, maxResults=1, fields="*") == listing(call, maxResults=1)


@pytest.mark.parametrize("fields", ["items(name,updated,metadata)", "items", "items(*)", None])
def test_a_listing_shows_what_changed_since_the_last(server, call, fields):
    query = {"fields": fields} if fields else {}
    server.put("bucket", "key", b"data")
    first = listing(call, **query)
    assert listing(call, **query) == first
    call("PATCH", "/storage/v1/b/bucket/o/key", b'{"metadata": {"a": "b"}}')
    assert listing(call, **query)["items"][0]["metadata"] == {"a": "b"}


def test_masks_of_different_listings_do_not_mix(server, call):
    server.put("bucket", "key", b"data")
    for fields, names in [("items(name)", {"name"}), ("items(size)", {"size"})] * 2:
        assert set(listing(call, fields=fields)["items"][0]) == names
    assert listing(call, fields="items(metadata)")["items"] == [{}]


@pytest.mark.parametrize(
    ("glob", "expected"),
    [
        ("*", ["b", "d"]),
        ("**", sorted(NAMES)),
        ("a/*", ["a/", "a/1"]),
        ("a/**", ["a/", "a/1", "a/2/x", "a/2/y"]),
        ("**/1", ["a/1", "b/1", "c/1", "\u732b/1"]),
        ("?/1", ["a/1", "b/1", "c/1", "\u732b/1"]),
        ("[ac]/1", ["a/1", "c/1"]),
        ("[a-b]/1", ["a/1", "b/1"]),
        ("[!a-b]/1", ["c/1", "\u732b/1"]),
        ("[^a-b]/1", ["c/1", "\u732b/1"]),
        ("{a,b/}1", ["b/1"]),
        ("{a,c}/{1,2/*}", ["a/1", "a/2/x", "a/2/y", "c/1"]),
        ("a/?", ["a/1"]),
        ("d", ["d"]),
        ("\\d", ["d"]),
    ],
)
def test_match_glob(filled, call, glob, expected):
    assert names_of(listing(call, matchGlob=glob)) == expected


@pytest.mark.parametrize("glob", ["**a" * 12 + "b", "{a,a}" * 60 + "b", "{*,**}a" * 60 + "b"])
def test_match_glob_of_many_wildcards_takes_no_longer(server, call, glob):
    """A name is read once, however many ways there are to match it."""
    server.put("bucket", "a" * 1000, b"")
    assert names_of(listing(call, matchGlob=glob)) == []


def test_match_glob_longer_than_any_name_is_400(call):
    """Patterns have at most 1,024 characters."""
    assert call("GET", f"/storage/v1/b/bucket/o?matchGlob={'a' * 1025}").status == 400


def test_match_glob_goes_with_prefix_delimiter_and_pages(filled, call):
    assert names_of(listing(call, matchGlob="**/1", prefix="b")) == ["b/1"]
    page = listing(call, matchGlob="[a-b]*/", delimiter="/")
    assert (names_of(page), page["prefixes"]) == ([], ["a/", "b/"])
    assert walk(call, matchGlob="**/1", maxResults=1)[0] == ["a/1", "b/1", "c/1", "\u732b/1"]


TEXTS = st.text(alphabet="ab/*.", max_size=5)


@given(
    names=st.sets(st.text(alphabet="ab/", min_size=1, max_size=4), max_size=20),
    prefix=st.text(alphabet="ab/", max_size=2),
    delimiter=st.sampled_from(["", "/", "a", "b/"]),
    start=st.text(alphabet="ab/", max_size=2),
    end=st.text(alphabet="ab/", max_size=2),
    glob=st.sampled_from(["", "*", "**", "a*", "a**", "*/", "{a,b}/**"]),
    trailing=st.booleans(),
    size=st.integers(1, 4),
)
def test_pages_together_are_the_whole_listing(
    names, prefix, delimiter, start, end, glob, trailing, size
):
    pattern = compile_glob(glob) if glob else None
    query = Query(
        prefix=prefix,
        delimiter=delimiter,
        start=start,
        end=end,
        glob=pattern,
        glob_prefix=literal_prefix(glob),
        with_trailing=trailing,
    )
    ordered = sorted(names)
    found, prefixes, after, num_pages = [], [], "", 0
    while num_pages == 0 or after:
        page = list_page(ordered, query, size=size, after=after)
        found += page.names
        prefixes += page.prefixes
        after, num_pages = page.last, num_pages + 1
        assert len(page) == size or not after
    assert (found, prefixes) == _plain(ordered, prefix, delimiter, start, end, pattern, trailing)


def test_a_page_of_none_is_the_last():
    """size=0 lists nothing, and does not promise more: `max-keys=0` of the XML API."""
    for delimiter in ("", "/"):
        page = list_page(["a"], Query(delimiter=delimiter), size=0)
        assert (len(page), page.last) == (0, "")


def _plain(ordered, prefix, delimiter, start, end, pattern, trailing):
    """List as the documentation says it, one name at a time."""
    found, prefixes = [], []
    for name in ordered:
        if not name.startswith(prefix) or name < start or (end and name >= end):
            continue
        rest = name[len(prefix) :]
        grouped = bool(delimiter) and delimiter in rest
        common = prefix + rest[: rest.index(delimiter) + len(delimiter)] if grouped else None
        if (common is None or (trailing and name == common)) and _matches(pattern, name):
            found.append(name)
        if common is not None and common not in prefixes and _matches(pattern, common):
            prefixes.append(common)
    return found, prefixes


def _matches(pattern: Glob | None, name: str) -> bool:
    return pattern is None or pattern.matches(name)


@given(pattern=st.text(alphabet="ab*?[]!^-{},\\/", max_size=8), name=TEXTS)
def test_any_glob_compiles_or_is_rejected_and_keeps_its_literal_prefix(pattern, name):
    try:
        compiled = compile_glob(pattern)
    except APIError:
        return
    if compiled.matches(name):
        assert name.startswith(literal_prefix(pattern))


@settings(max_examples=60)
@given(st.text(alphabet="ab*,()/", max_size=8))
def test_any_mask_parses_or_is_rejected(text):
    try:
        mask = parse_fields(text)
    except APIError:
        return
    value = {"a": {"b": 1}, "b": [{"a": 2}]}
    assert select(value, mask).keys() <= value.keys()


PIECES = {
    "a": "a",
    "*": "[^/]*",
    "?": "[^/]",
    "/": "/",
    "[!b]": "[^b/]",
    "{a,*b}": "(?:a|[^/]*b)",
    "{,**/,{a,b}?}": "(?:|.*/|[ab][^/])",
}


@given(
    pieces=st.lists(st.sampled_from(sorted(PIECES)), max_size=6),
    name=st.text(alphabet="ab/", max_size=8),
)
def test_globs_match_what_their_regular_expression_does(pieces, name):
    """The automaton and the backtracking of `re` agree wherever the latter ends."""
    pieces = [piece for at, piece in enumerate(pieces) if pieces[at - 1 : at + 1] != ["*", "*"]]
    glob = "".join(pieces)
    pattern = "".join(PIECES[piece] for piece in pieces)
    assert compile_glob(glob).matches(name) == bool(re.fullmatch(pattern, name, re.DOTALL))


def test_a_glob_matches_names_of_any_number_of_characters():
    glob = compile_glob("**/a")
    name = "".join(map(chr, range(0x4E00, 0x4E00 + 17_000)))
    assert glob.matches(f"{name}/a")
    assert not glob.matches(f"{name}/b")


def test_a_range_of_characters_that_runs_backwards_is_rejected():
    with pytest.raises(APIError):
        compile_glob("[z-a]")


def test_a_mask_leaves_scalars_and_is_merged_with_a_wider_one():
    assert select(1, parse_fields("a")) == 1
    assert select({"a": {"b": 1, "c": 2}}, parse_fields("a(b),a")) == {"a": {"b": 1, "c": 2}}

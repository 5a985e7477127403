"""Pages of the JSON API become columns that hold what the page said."""

from __future__ import annotations

import base64
from datetime import UTC, datetime
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from aioflux._services.gcs import listing
from aioflux._services.gcs.listing import decode_resource, meta_from_resource
from aioflux._values.listing import Kind

times = st.datetimes(min_value=datetime(1970, 1, 1), timezones=st.just(UTC))  # noqa: DTZ001
texts = st.text(st.characters(codec="utf-8"), max_size=6)


@st.composite
def resources(draw: st.DrawFn) -> dict[str, Any]:
    """Draw what a service may tell of an object, all of it or some."""
    crc32c = draw(st.integers(0, 2**32 - 1))
    item = {
        "name": "p/" + draw(texts),
        "size": str(draw(st.integers(0, 2**60))),
        "etag": draw(texts),
        "generation": str(draw(st.integers(1, 2**62))),
        "crc32c": base64.b64encode(crc32c.to_bytes(4, "big")).decode(),
        "timeCreated": draw(times).isoformat().replace("+00:00", "Z"),
        "contentType": draw(st.sampled_from(["image/png", "image/jpeg"])),
        "contentEncoding": draw(st.sampled_from(["", "gzip"])),
        "storageClass": draw(st.sampled_from(["STANDARD", "NEARLINE"])),
        "contentDisposition": draw(st.sampled_from(["", "inline"])),
        "cacheControl": draw(st.sampled_from(["", "no-store"])),
        "metadata": draw(st.dictionaries(texts, texts, max_size=2)),
    }
    missing = draw(st.sets(st.sampled_from(sorted(item.keys() - {"name"})), max_size=2))
    return {name: value for name, value in item.items() if name not in missing}


def page_of(items: list[dict[str, Any]]) -> listing.ObjectsPage:
    return listing.decode_page(msgspec.json.encode({"kind": "storage#objects", "items": items}))


@given(st.lists(resources(), max_size=6))
@settings(max_examples=30)
def test_a_page_says_what_its_resources_say(items: list[dict[str, Any]]) -> None:
    page = page_of(items)
    found = listing.listing_of(page.items, prefix="p/", root="gs://bucket/p/")
    expected = [
        meta_from_resource(
            decode_resource(msgspec.json.encode(item)),
            key=item["name"][2:],
            uri=f"gs://bucket/{item['name']}",
        )
        for item in items
    ]
    assert list(found) == expected


@given(st.lists(resources(), min_size=1, max_size=6), st.data())
@settings(max_examples=30)
def test_a_page_says_the_same_whatever_kind_was_expected(
    items: list[dict[str, Any]], data: st.DataObject
) -> None:
    text = st.sampled_from(["", "image/png", "STANDARD", "gzip"])
    first = items[0]
    names = {
        "content_type": "contentType",
        "content_encoding": "contentEncoding",
        "storage_class": "storageClass",
        "content_disposition": "contentDisposition",
        "cache_control": "cacheControl",
    }
    told = Kind(**{name: first.get(field, "") for name, field in names.items()})
    texts = st.tuples(text, text, text, st.just(()), text, text)
    kind = data.draw(st.just(told) | texts.map(lambda each: Kind(*each)))
    body = msgspec.json.encode({"kind": "storage#objects", "items": items, "prefixes": ["q"]})
    page = listing.decode_page(body, expected=kind)
    assert page.prefixes == ["q"]
    found = listing.listing_of(page.items, prefix="p/", root="gs://bucket/p/")
    assert found == listing.listing_of(page_of(items).items, prefix="p/", root="gs://bucket/p/")


def alike(num: int, **others: Any) -> list[dict[str, Any]]:
    plain = {"contentType": "image/png", "storageClass": "STANDARD"}
    return [{"name": f"{at:06}", **plain, **others} for at in range(num)]


def test_pages_of_one_kind_are_expected_to_go_on() -> None:
    kind = Kind("image/png", "", "STANDARD")
    assert listing.expected_kind(page_of(alike(1_000))) == kind
    for others in (
        alike(1, metadata={"a": "b"}),
        alike(1, contentType="x"),
        alike(1, cacheControl="no-store"),
        [{"name": "z"}],
    ):
        assert listing.expected_kind(page_of([*alike(1_000), *others])) is None
    assert listing.expected_kind(page_of(alike(10))) is None
    assert listing.expected_kind(page_of([])) is None


@pytest.mark.parametrize(
    "other",
    [
        {"contentType": "image/png"},
        {"storageClass": "STANDARD"},
        {"contentType": "x", "storageClass": "STANDARD"},
        {"contentType": "image/png", "storageClass": "NEARLINE"},
        {"contentType": "image/png", "storageClass": "STANDARD", "contentEncoding": "gzip"},
        {"contentType": "image/png", "storageClass": "STANDARD", "cacheControl": "no-store"},
        {"contentType": "image/png", "storageClass": "STANDARD", "contentDisposition": "inline"},
        {"contentType": "image/png", "storageClass": "STANDARD", "metadata": {"a": "b"}},
    ],
)
def test_one_of_another_kind_than_expected_is_reported_as_it_is(other: dict[str, Any]) -> None:
    items = [*alike(3), {"name": "z", **other}]
    body = msgspec.json.encode({"kind": "storage#objects", "items": items})
    page = listing.decode_page(body, expected=Kind("image/png", "", "STANDARD"))
    *_, found = listing.listing_of(page.items, prefix="", root="gs://b/")
    assert found.content_type == other.get("contentType", "")
    assert found.storage_class == other.get("storageClass", "")
    assert found.content_encoding == other.get("contentEncoding", "")
    assert found.cache_control == other.get("cacheControl", "")
    assert found.content_disposition == other.get("contentDisposition", "")
    assert found.metadata == other.get("metadata", {})


def test_an_expected_kind_is_parsed_without_its_texts() -> None:
    body = msgspec.json.encode({"kind": "storage#objects", "items": alike(3)})
    kind = Kind("image/png", "", "STANDARD")
    first, second, _ = listing.decode_page(body, expected=kind).items
    assert first.kind == kind
    assert first.content_type is second.content_type


@pytest.mark.parametrize("updated", ["2026-01-01", "2026-01-01T00:00:00.000", "x", "2026-13-01T"])
def test_a_time_that_is_none_is_an_error(updated: str) -> None:
    page = page_of([{"name": "a", "timeCreated": updated}])
    with pytest.raises(ValueError, match=r"RFC3339|timezone"):
        listing.listing_of(page.items, prefix="", root="gs://b/")


@pytest.mark.parametrize(
    "crc32c", ["AAAA", "AAAAAAAA", "AAAAA===", "AAAAAA=A", "!AAAAA==", "AAAAAAA="]
)
@pytest.mark.parametrize("others", [[], ["AAAAAA=="]], ids=["alone", "among others"])
def test_a_damaged_checksum_is_an_error(crc32c: str, others: list[str]) -> None:
    page = page_of([{"name": f"{at}", "crc32c": text} for at, text in enumerate([crc32c, *others])])
    with pytest.raises(ValueError, match=r"crc32c|base64|padding|data|Excess"):
        listing.listing_of(page.items, prefix="", root="gs://bucket/")


def test_a_size_below_zero_is_an_error() -> None:
    with pytest.raises(ValueError, match="the size of an object is -1"):
        listing.listing_of(page_of([{"name": "a", "size": "-1"}]).items, prefix="", root="gs://b/")


def test_objects_of_every_storage_class_are_listed() -> None:
    classes = ["STANDARD", "NEARLINE", "COLDLINE", "ARCHIVE", "RAPID", ""]
    page = page_of([{"name": f"{at}", "storageClass": each} for at, each in enumerate(classes)])
    found = listing.listing_of(page.items, prefix="", root="gs://b/")
    assert [meta.storage_class for meta in found] == classes


def test_a_listed_object_is_held_in_less_than_150_bytes() -> None:
    page = page_of(
        [
            {
                "name": f"train/{at:07}.jpg",
                "size": f"{100_000 + at}",
                "etag": "CJLmx+yz8oUDEAE=",
                "generation": f"{1_700_000_000_000_000 + at}",
                "crc32c": "AAAAAA==",
                "timeCreated": "2024-01-01T00:00:00.123Z",
                "contentType": "image/jpeg",
                "storageClass": "STANDARD",
            }
            for at in range(5_000)
        ]
    )
    found = listing.listing_of(page.items, prefix="", root="gs://b/")
    assert len(found.to_bytes()) < 150 * 5_000


@given(texts)
def test_a_prefix_stands_for_itself_in_a_pattern(text: str) -> None:
    escaped = listing.escape_glob(text)
    assert escaped.replace("\\", "") == text.replace("\\", "")
    assert len(escaped) == len(text) + sum(text.count(each) for each in "*?[]{}\\")


@pytest.mark.parametrize("filler", ["x", "{", ","])
def test_a_large_page_of_few_objects_is_read(filler: str) -> None:
    """Also if the texts of its metadata have the characters by which entries are counted."""
    item = {
        "name": "p/a",
        "size": "1",
        "generation": "1",
        "metadata": {"note": filler * 20_000_000},
    }
    page = page_of([item])
    assert listing.listing_of(page.items, prefix="p/", root="gs://bucket/p/").keys[0] == "a"

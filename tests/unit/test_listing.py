"""Columns give back exactly what was put into them; manifests, too, or they say why not."""

from __future__ import annotations

import json
import pickle
import sys
from array import array
from dataclasses import replace
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

import google_crc32c
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from aioflux import ObjectMeta
from aioflux._values.columns import TimeColumn
from aioflux._values.listing import KeyColumn, Listing

if TYPE_CHECKING:
    from collections.abc import Callable

# Names of local files may hold surrogates, hence all of unicode.
TEXTS = st.text(st.characters(), max_size=8)
TIMES = st.datetimes(min_value=datetime(1971, 1, 1), timezones=st.just(UTC))  # noqa: DTZ001


@st.composite
def metas(draw: st.DrawFn, root: str) -> ObjectMeta:
    key = draw(TEXTS)
    quoted = key.replace("%", "%25") if root.startswith("file:") else key
    return ObjectMeta(
        key=key,
        uri=root + quoted,
        size=draw(st.integers(0, 2**62)),
        etag=draw(TEXTS),
        generation=draw(st.one_of(st.just(""), st.integers(1, 2**63).map(str))),
        crc32c=draw(st.none() | st.integers(0, 2**32 - 1)),
        updated=draw(st.none() | TIMES),
        content_type=draw(st.sampled_from(["", "image/png"])),
        content_encoding=draw(st.sampled_from(["", "gzip"])),
        content_disposition=draw(st.sampled_from(["", "inline"])),
        cache_control=draw(st.sampled_from(["", "no-store"])),
        storage_class=draw(st.sampled_from(["STANDARD", "NEARLINE"])),
        metadata=draw(st.dictionaries(TEXTS, TEXTS, max_size=2)),
    )


@pytest.mark.parametrize("root", ["gs://bucket/a b%/", "file:///data/50%25/"])
@given(st.data())
@settings(max_examples=40)
def test_a_listing_gives_back_every_field(root: str, data: st.DataObject) -> None:
    given_metas = data.draw(st.lists(metas(root), max_size=8))
    listing = Listing(given_metas)
    assert [listing[index] for index in range(len(listing))] == given_metas


@given(st.data())
@settings(max_examples=40)
def test_a_listing_is_a_sequence(data: st.DataObject) -> None:
    given_metas = data.draw(st.lists(metas("gs://b/"), max_size=8))
    listing = Listing(given_metas)
    assert list(listing) == given_metas
    assert listing == given_metas
    assert given_metas == listing
    assert listing != [*given_metas, None]
    assert list(reversed(listing)) == given_metas[::-1]
    ends = st.none() | st.integers(-9, 9)
    places = slice(data.draw(ends), data.draw(ends), data.draw(st.sampled_from([None, 1, 2, -1])))
    assert listing[places] == given_metas[places]
    assert isinstance(listing[places], Listing)
    assert list(listing.sizes) == [meta.size for meta in given_metas]
    index = data.draw(st.integers(-9, 9))
    if -len(listing) <= index < len(listing):
        assert listing[index] == given_metas[index]
    else:
        with pytest.raises(IndexError):
            listing[index]


@given(st.data())
@settings(max_examples=40)
def test_listings_are_joined_whatever_their_kinds(data: st.DataObject) -> None:
    parts = data.draw(st.lists(st.lists(metas("gs://b/"), max_size=4), max_size=4))
    whole = Listing()
    for part in parts:
        whole.extend(Listing(part))
    assert list(whole) == [meta for part in parts for meta in part]


@given(st.data())
@settings(max_examples=40)
def test_a_manifest_gives_back_every_field(data: st.DataObject) -> None:
    listing = Listing(data.draw(st.lists(metas("gs://b/"), max_size=8)))
    listing.prefixes = ["a/", "b/"]
    again = Listing.from_bytes(listing.to_bytes())
    assert again == listing
    assert again.prefixes == listing.prefixes
    assert pickle.loads(pickle.dumps(listing)) == listing
    again.extend(listing)  # what is read can be added to
    assert list(again) == [*listing, *listing]


@given(st.data())
@settings(max_examples=40)
def test_a_damaged_manifest_is_an_error(data: st.DataObject) -> None:
    saved = bytearray(Listing(data.draw(st.lists(metas("gs://b/"), max_size=3))).to_bytes())
    at = data.draw(st.integers(0, len(saved) - 1))
    saved[at] ^= 1 << data.draw(st.integers(0, 7))
    with pytest.raises(ValueError, match=r"damaged|not a listing|of version"):
        Listing.from_bytes(saved)
    with pytest.raises(ValueError, match=r"damaged|not a listing|of version"):
        Listing.from_bytes(saved[:at])


def resealed(saved: bytes, change: Callable[[Any, bytes], tuple[Any, bytes]]) -> bytes:
    """Return a manifest with another header and body, and a crc32c that holds."""
    size = int.from_bytes(saved[20:24], "little")
    header, body = change(json.loads(saved[24 : 24 + size]), saved[24 + size : -4])
    text = json.dumps(header).encode()
    whole = saved[:20] + len(text).to_bytes(4, "little") + text + body
    return whole + google_crc32c.value(whole).to_bytes(4, "little")


@pytest.mark.parametrize(
    "change",
    [
        lambda header, body: ([], body),
        lambda header, body: ({**header, "columns": []}, body),
        lambda header, body: ({"columns": header["columns"]}, body),
        lambda header, body: ({**header, "columns": [*header["columns"], 0]}, body),
        lambda header, body: ({**header, "columns": [*header["columns"][:-1], 3]}, body),
        lambda header, body: (header, body[:-4]),
        lambda header, body: (header, body + b"more"),
        lambda header, body: (header, bytes([body[0] ^ 1]) + body[1:]),
        lambda header, body: (header, body[:-4] + b"\xff\0\0\0"),
    ],
)
def test_a_manifest_that_another_writer_sealed_is_an_error(
    change: Callable[[Any, bytes], tuple[Any, bytes]],
) -> None:
    saved = Listing(
        ObjectMeta(key=key, uri=f"gs://b/{key}", size=1) for key in ("a", "bc")
    ).to_bytes()
    assert resealed(saved, lambda header, body: (header, body)) == saved
    with pytest.raises(ValueError, match="although its crc32c matches"):
        Listing.from_bytes(resealed(saved, change))


def test_each_object_may_have_metadata_of_its_own() -> None:
    """Kinds are compared with the first thousand only; none is lost behind them."""
    given_metas = [
        ObjectMeta(key=f"{at}", uri=f"gs://b/{at}", size=at, metadata={"mtime": f"{at}"})
        for at in range(3_000)
    ]
    listing = Listing(given_metas)
    assert list(listing) == given_metas
    assert Listing.from_bytes(listing.to_bytes()) == given_metas


@given(st.lists(TEXTS))
def test_a_column_of_keys_gives_back_every_key(keys: list[str]) -> None:
    column = KeyColumn(keys)
    assert [column[index] for index in range(len(column))] == keys
    assert list(column) == keys


@given(st.lists(TEXTS), st.slices(12))
def test_a_slice_of_keys_is_that_of_a_list(keys: list[str], part: slice) -> None:
    assert KeyColumn(keys)[part] == keys[part]


@given(st.integers(0, 300), st.integers(0, 300), st.sampled_from(["k", "\u00e9"]))
@settings(max_examples=20)
def test_parts_of_long_columns(start: int, end: int, letter: str) -> None:
    keys = [letter * (at % 7) + str(at) for at in range(2_500)]
    column = KeyColumn(keys[:1_000])
    column.extend(KeyColumn(keys[1_000:]))
    assert list(column) == keys
    start, end = 8 * start, 8 * end
    assert list(column.part(start, end)) == keys[start:end]
    assert column[start] == keys[start]


MILLISECONDS = TIMES.map(lambda time: time.replace(microsecond=time.microsecond // 1000 * 1000))


def told(time: datetime) -> str:
    return time.isoformat(timespec="milliseconds").replace("+00:00", "Z")


@given(
    st.lists(st.tuples(st.sampled_from(["texts", "times"]), st.lists(MILLISECONDS, max_size=4))),
    st.integers(0, 9),
    st.integers(0, 9),
    st.booleans(),
)
def test_a_column_of_times_gives_back_every_time(
    parts: list[tuple[str, list[datetime]]], start: int, end: int, is_read: bool
) -> None:
    """However they came, and whether or not they were made numbers in between."""
    column = TimeColumn()
    for how, times in parts:
        part = TimeColumn()
        if how == "texts":
            assert part.add_texts([told(time) for time in times])
        else:
            part.add_times(times)
        column.extend(part)
    whole = [time for _, times in parts for time in times]
    if is_read:
        assert len(column.numbers()) == len(whole)
    start, end = min(start, len(whole)), min(end, len(whole))
    assert list(column) == whole
    assert len(column) == len(whole)
    assert list(column.part(start, end)) == whole[start:end]
    places = range(start, end)[::-1]
    assert list(column.pick(places)) == [whole[at] for at in places]
    assert list(TimeColumn.of_numbers(column.numbers())) == whole
    column.append(None)
    assert list(column) == [*whole, None]


@pytest.mark.parametrize("text", ["", "2026-01-01T00:00:00Z", "2026-01-01T00:00:00.0000Z"])
def test_texts_of_another_shape_are_left_to_who_can_read_them(text: str) -> None:
    column = TimeColumn()
    assert not column.add_texts(["2026-01-01T00:00:00.000Z", text])
    assert not len(column)


def test_a_time_that_is_none_is_named() -> None:
    column = TimeColumn()
    assert column.add_texts(["2026-02-30T00:00:00.000Z"])
    with pytest.raises(ValueError, match=r"2026-02-30T.*not a valid time"):
        column.numbers()


def test_a_listing_is_of_one_store() -> None:
    with pytest.raises(ValueError, match="gs://other/b is not below gs://bucket/"):
        Listing(
            [
                ObjectMeta(key="a", uri="gs://bucket/a", size=1),
                ObjectMeta(key="b", uri="gs://other/b", size=1),
            ]
        )


def test_a_pickled_listing_takes_less_than_150_bytes_an_object() -> None:
    listing = Listing(
        ObjectMeta(
            key=f"train/{number:07d}.jpg",
            uri=f"gs://bucket/train/{number:07d}.jpg",
            size=100_000 + number,
            etag=f"CJ{number:010d}",
            generation=str(1_700_000_000_000_000 + number),
            crc32c=number,
            updated=datetime.fromtimestamp(1_700_000_000 + number, UTC),
            content_type="image/jpeg",
        )
        for number in range(1_000)
    )
    assert len(pickle.dumps(listing)) < 150 * len(listing)


def test_a_pickled_listing_is_the_same_on_a_machine_of_the_other_byte_order(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    listing = Listing()
    listing.extend([ObjectMeta(key="a", uri="gs://b/a", size=7, etag="e", generation="1")])
    monkeypatch.setattr(sys, "byteorder", "big")
    assert pickle.loads(pickle.dumps(listing)) == listing


def test_a_listing_equals_sequences_alone_and_says_what_it_holds() -> None:
    listing = Listing()
    assert listing != 1
    assert repr(listing) == "<Listing of 0 objects below nothing>"


def test_times_are_added_as_texts_behind_numbers_too() -> None:
    times = TimeColumn()
    times.append(datetime(2026, 1, 1, tzinfo=UTC))
    assert times.add_texts(["2026-01-02T00:00:00.000Z"])
    assert [times[0], times[1]] == [datetime(2026, 1, day, tzinfo=UTC) for day in (1, 2)]


def test_equal_strings_have_equal_checksums() -> None:
    assert KeyColumn(["a", "b"]).checksum() == KeyColumn(["a", "b"]).checksum()
    assert KeyColumn(["a", "b"]).checksum() != KeyColumn(["ab"]).checksum()


def test_a_page_without_objects_adds_none() -> None:
    listing = Listing()
    listing.extend_columns(
        "gs://b/",
        keys=[],
        sizes=[],
        etags=[],
        generations=[],
        crc32c=array("q"),
        updated=TimeColumn(),
    )
    assert len(listing) == 0


def test_a_listing_has_all_attributes_and_one_of_earlier_versions_has_fewer() -> None:
    """Earlier versions saved four attributes of a kind of objects."""
    texts = {"content_type": "a/b", "content_encoding": "gzip", "storage_class": "COLD"}
    earlier = ObjectMeta(key="a", uri="gs://b/a", size=1, **texts, metadata={"k": "v"})
    newer = replace(earlier, key="b", uri="gs://b/b", cache_control="c", content_disposition="d")
    listing = Listing([earlier, newer])
    assert list(Listing.from_bytes(listing.to_bytes())) == [earlier, newer]
    (kind,) = Listing([earlier])._kinds
    assert json.loads(kind)[3:] == [[["k", "v"]]], "earlier versions read a manifest of today"


def test_a_saved_listing_of_another_version_is_rejected() -> None:
    saved = bytearray(Listing().to_bytes())
    saved[len(b"aioflux listing\n")] = 99
    with pytest.raises(ValueError, match="of version 99"):
        Listing.from_bytes(saved)


def test_objects_that_show_directories_are_left_out() -> None:
    """An object with content, or with another name, is no such object."""
    names = {"a/": 0, "a/b": 0, "c/": 1}
    metas = [ObjectMeta(key=key, uri=f"gs://b/{key}", size=size) for key, size in names.items()]
    shown = Listing(metas).without_directories()
    assert shown.keys[:] == ["a/b", "c/"]
    assert shown.root == "gs://b/"
    assert shown.without_directories() is shown

"""Columns give back exactly what was put into them."""

from __future__ import annotations

import pickle
from datetime import UTC, datetime

import pytest
from hypothesis import given
from hypothesis import strategies as st

from aioflux import ObjectMeta
from aioflux._listing import KeyColumn, Listing

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
        storage_class=draw(st.sampled_from(["STANDARD", "NEARLINE"])),
        metadata=draw(st.dictionaries(TEXTS, TEXTS, max_size=2)),
    )


@pytest.mark.parametrize("root", ["gs://bucket/a b%/", "file:///data/50%25/"])
@given(st.data())
def test_a_listing_gives_back_every_field(root: str, data: st.DataObject) -> None:
    given_metas = data.draw(st.lists(metas(root), max_size=8))
    listing = Listing(given_metas)
    assert [listing[index] for index in range(len(listing))] == given_metas


@given(st.lists(TEXTS))
def test_a_column_of_keys_gives_back_every_key(keys: list[str]) -> None:
    column = KeyColumn(keys)
    assert [column[index] for index in range(len(column))] == keys


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

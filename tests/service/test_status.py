"""What an answer means."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from aioflux import (
    ChecksumError,
    NotFoundError,
    PermissionDeniedError,
    PreconditionFailedError,
    StorageError,
    TransientError,
)
from aioflux._services.base import MAX_EMPTY_PAGES
from aioflux._services.responses import (
    EmptyPageCounter,
    Failure,
    RequestKind,
    error_from_status,
    parse_retry_after,
)
from tests.servers.statuses import AMBIGUOUS

TABLE = [
    (400, "", StorageError),
    (400, "BadDigest", ChecksumError),
    (400, "XAmzContentChecksumMismatch", ChecksumError),
    (401, "", PermissionDeniedError),
    (403, "AccessDenied", PermissionDeniedError),
    (404, "NoSuchKey", NotFoundError),
    (404, "NoSuchUpload", NotFoundError),
    (409, "", StorageError),
    (410, "", StorageError),
    (411, "", StorageError),
    (412, "PreconditionFailed", PreconditionFailedError),
    (416, "", StorageError),
    (501, "", StorageError),
    (505, "", StorageError),
    (308, "", StorageError),
    *((status, "SlowDown", TransientError) for status in AMBIGUOUS),
]


@pytest.mark.parametrize(("status", "code", "kind"), TABLE)
def test_a_status_has_one_meaning(status: int, code: str, kind: type[StorageError]) -> None:
    error = error_from_status(
        Failure(
            status, action="read", uri="gs://b/k", code=code, detail="the service's\n own words"
        )
    )
    assert type(error) is kind
    assert (error.uri, error.status) == ("gs://b/k", status)
    for word in ("read", "gs://b/k", str(status), code, "the service's own words"):
        assert word in str(error)


@pytest.mark.parametrize(
    ("code", "detail"), [("NoSuchBucket", ""), ("", "The specified bucket does not exist.")]
)
@pytest.mark.parametrize("generation", ["", "17"])
def test_a_missing_bucket_is_not_called_a_missing_object(
    code: str, detail: str, generation: str
) -> None:
    error = error_from_status(
        Failure(
            404,
            action="read",
            uri="gs://b/k",
            code=code,
            detail=detail,
            kind=RequestKind(generation=generation),
        )
    )
    assert isinstance(error, NotFoundError)
    assert "the bucket does not exist" in str(error)
    assert "object" not in str(error)


def test_what_is_sent_again_does_not_hang_on_words() -> None:
    error = error_from_status(
        Failure(400, action="read", uri="gs://b/k", detail="503 try again later")
    )
    assert not isinstance(error, TransientError)


def test_long_words_of_a_service_are_cut() -> None:
    error = error_from_status(Failure(500, action="read", uri="gs://b/k", detail="x" * 10_000))
    assert len(str(error)) < 500


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (None, None),
        ("", None),
        ("0", 0.0),
        ("120", 120.0),
        (" 7 ", 7.0),
        ("-5", None),
        ("1.5", None),
        ("soon", None),
        ("²", None),
        ("Wed, 21 Oct 2015 07:28:10 GMT", 10.0),
        ("Wed, 21 Oct 2015 07:27:00 GMT", 0.0),
        ("Wed, 99 Oct 2015 07:27:00 GMT", None),
        ("Mon, 01 Jan 99999999999 00:00:00 GMT", None),
        ("9" * 400, None),
    ],
)
def test_retry_after_is_seconds_or_a_date(value: str | None, expected: float | None) -> None:
    now = 1445412480.0  # 2015-10-21 07:28:00 GMT
    assert parse_retry_after(value, now=now) == expected


@given(st.text(max_size=40))
def test_any_retry_after_is_a_wait_or_nothing(value: str) -> None:
    seconds = parse_retry_after(value, now=0.0)
    assert seconds is None or seconds >= 0


def test_a_listing_ends_after_many_empty_pages_in_a_row() -> None:
    counter = EmptyPageCounter("gs://b/k")
    for _ in range(2):
        for _ in range(MAX_EMPTY_PAGES - 1):
            counter.count(0)
        counter.count(1)
    for _ in range(MAX_EMPTY_PAGES - 1):
        counter.count(0)
    with pytest.raises(StorageError, match=r"could not list gs://b/k.*empty pages"):
        counter.count(0)


def test_the_wait_travels_with_the_error() -> None:
    error = error_from_status(Failure(503, action="read", uri="gs://b/k", retry_after="3"))
    assert isinstance(error, TransientError)
    assert error.retry_after_seconds == 3.0

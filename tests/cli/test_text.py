"""Formats of the output."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta, timezone

import pytest
import typer
from hypothesis import given
from hypothesis import strategies as st

from aioflux import CredentialsError, NotFoundError, StorageError
from aioflux._values.stats import format_size
from aioflux.cli._text import (
    describe,
    format_count,
    format_seconds,
    format_time,
    one_line,
    paragraph,
    parse_age,
)


@pytest.mark.parametrize(
    ("num_bytes", "text"),
    [(0, "0 B"), (1023, "1023 B"), (1024, "1.0 KiB"), (1536, "1.5 KiB"), (2**30, "1.0 GiB")],
)
def test_sizes_are_in_units_of_1024(num_bytes: int, text: str) -> None:
    assert format_size(num_bytes) == text


@given(st.integers(1024, 2**80))
def test_a_size_has_four_digits_at_most_before_its_unit(num_bytes: int) -> None:
    number, _ = format_size(num_bytes).split()
    assert float(number) < 1024 or num_bytes >= 2**70


@pytest.mark.parametrize(
    ("seconds", "text"), [(3.21, "3.2 s"), (59.9, "59.9 s"), (125, "2:05"), (3725, "1:02:05")]
)
def test_durations(seconds: float, text: str) -> None:
    assert format_seconds(seconds) == text


def test_counts_have_thousands_and_plurals() -> None:
    assert format_count(1, "object") == "1 object"
    assert format_count(10_000, "object") == "10,000 objects"


def test_times_are_in_utc_to_the_millisecond() -> None:
    moment = datetime(2026, 1, 31, 13, 0, 0, 999, tzinfo=timezone(timedelta(hours=1)))
    assert format_time(moment) == "2026-01-31T12:00:00.000Z"
    assert format_time(None) is None
    assert format_time(datetime(2026, 1, 1, tzinfo=UTC)) == "2026-01-01T00:00:00.000Z"


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("90s", 90),
        ("30m", 1800),
        ("12h", 43_200),
        ("1d", 86_400),
        ("1.5d", 129_600),
        ("2w", 1209600),
    ],
)
def test_ages(text: str, seconds: float) -> None:
    assert parse_age(text) == seconds


@pytest.mark.parametrize("text", ["", "1", "d", "-1d", "1 day", "1d2h", "inf"])
def test_other_texts_are_not_ages(text: str) -> None:
    with pytest.raises(typer.BadParameter, match="not an age"):
        parse_age(text)


@given(st.text())
def test_one_line_is_one_line(text: str) -> None:
    assert len(one_line(text).splitlines()) <= 1


def test_notes_are_part_of_the_line() -> None:
    error = NotFoundError("a\nb")
    error.add_note("c")
    assert describe(error) == "a b; c"


def test_errors_of_the_system_name_the_path() -> None:
    assert describe(OSError(28, "No space left on device", "/x")) == "/x: No space left on device"
    assert describe(OSError(28, "No space left on device")) == "No space left on device"
    assert describe(ValueError()) == "ValueError"


def test_advice_names_options_of_the_command() -> None:
    """The store names arguments of Python."""
    error = CredentialsError('pass credentials="anonymous"')
    assert describe(error) == "pass --anonymous"
    assert describe(StorageError("pass endpoint_url= with it")) == "pass --endpoint-url with it"


@pytest.mark.parametrize(
    ("value", "text"), [((), "-"), (["best", "release"], "best, release"), (None, "-"), (0, "0")]
)
def test_a_field_of_a_paragraph_is_text_for_people(value: object, text: str) -> None:
    printed = paragraph({"type": "checkpoint", "uri": "gs://b/step", "names": value})
    assert printed.splitlines() == ["gs://b/step", f"  names: {text}"]

"""Memory that becomes bytes without a copy."""

from __future__ import annotations

import gc

import pytest
from hypothesis import given
from hypothesis import strategies as st

from aioflux._http.memory import BytesBuffer


@given(st.binary(max_size=5000))
def test_what_was_written_is_what_comes_out(data: bytes) -> None:
    buffer = BytesBuffer(len(data))
    assert (buffer.view.nbytes, buffer.view.readonly) == (len(data), False)
    buffer.view[:] = data
    made = buffer.finish()
    assert type(made) is bytes
    assert made == data
    assert hash(made) == hash(data)
    assert made + b"x" == data + b"x"


@given(st.binary(min_size=1, max_size=500), st.integers(0, 500))
def test_what_was_not_filled_is_cut_off(data: bytes, size: int) -> None:
    size = min(size, len(data))
    buffer = BytesBuffer(len(data))
    buffer.view[:] = data
    assert buffer.finish(size) == data[:size]


def test_the_whole_is_handed_out_without_a_copy() -> None:
    buffer = BytesBuffer(100_000)
    buffer.view[:] = bytes(100_000)
    assert buffer.finish() is buffer.finish(100_000)


def test_a_view_outlives_its_buffer() -> None:
    view = BytesBuffer(1_000_000).view
    gc.collect(0)
    view[:5] = b"hello"
    assert bytes(view[:5]) == b"hello"


def test_a_view_ends_where_the_object_ends() -> None:
    view = BytesBuffer(10).view
    with pytest.raises(IndexError):
        view[10] = 1

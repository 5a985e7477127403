"""Byte planes: what is split is joined again."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from aioflux.checkpoint._format.methods import (
    PLANE_SIZES,
    join_planes,
    plan_plane_size,
    split_planes,
)


@given(st.binary(max_size=4096), st.sampled_from(PLANE_SIZES))
def test_joined_planes_are_what_was_split(data: bytes, plane_size: int) -> None:
    raw = np.frombuffer(data[: len(data) - len(data) % plane_size], np.uint8)
    planes = np.empty((plane_size, len(raw) // plane_size), np.uint8)
    split_planes(raw, planes)
    out = np.zeros(len(raw), np.uint8)
    join_planes(list(planes), out)
    assert out.tobytes() == raw.tobytes()


@pytest.mark.parametrize("plane_size", PLANE_SIZES)
def test_a_plane_is_one_byte_of_every_element(plane_size: int) -> None:
    raw = np.arange(5 * plane_size, dtype=np.uint8)
    planes = np.empty((plane_size, 5), np.uint8)
    split_planes(raw, planes)
    assert planes.tolist() == [
        list(range(k, 5 * plane_size, plane_size)) for k in range(plane_size)
    ]


@pytest.mark.parametrize("offset", [1, 2, 3, 7])
@pytest.mark.parametrize("plane_size", PLANE_SIZES)
def test_memory_need_not_be_aligned(plane_size: int, offset: int) -> None:
    whole = np.random.default_rng(0).integers(0, 256, offset + 64 * plane_size, dtype=np.uint8)
    planes = np.empty((plane_size, 64), np.uint8)
    split_planes(whole[offset:], planes)
    out = np.zeros_like(whole)
    join_planes(list(planes), out[offset:])
    assert out[offset:].tobytes() == whole[offset:].tobytes()


@pytest.mark.parametrize(
    ("element_size", "plane_size"),
    [(1, 1), (2, 2), (4, 4), (8, 8), (16, 8), (0, 1), (3, 1), (12, 1)],
)
def test_elements_are_split_into_as_many_planes_as_they_have_bytes(
    element_size: int, plane_size: int
) -> None:
    assert plan_plane_size(element_size) == plane_size

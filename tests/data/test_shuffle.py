"""The order of an epoch is the same everywhere and for good; a shuffle buffer loses nothing."""

from __future__ import annotations

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from aioflux.data._shuffle import ShuffleBuffer, permutation

SEEDS = st.integers(-(2**70), 2**70)


@given(st.integers(0, 500), SEEDS, st.integers(0, 2**40))
def test_every_listing_index_comes_once(count: int, seed: int, epoch: int) -> None:
    order = permutation(count, seed=seed, epoch=epoch).tolist()
    assert sorted(order) == list(range(count))
    assert order == permutation(count, seed=seed, epoch=epoch).tolist()


def test_orders_stay_as_they_are() -> None:
    """States that were saved hang on them: these values may never change."""
    assert permutation(10, seed=0, epoch=1).tolist() == [3, 2, 1, 8, 5, 9, 0, 6, 7, 4]
    assert permutation(10, seed=1, epoch=0).tolist() == [0, 3, 6, 5, 1, 9, 8, 7, 4, 2]


def test_every_epoch_index_has_every_listing_index_about_as_often() -> None:
    places: Counter[tuple[int, int]] = Counter()
    for seed in range(20):
        for epoch in range(50):
            places.update(enumerate(permutation(5, seed=seed, epoch=epoch).tolist()))
    assert len(places) == 25
    assert all(140 < count < 260 for count in places.values())  # 200 of 1,000, 4.7 sigma


@given(st.lists(st.integers()), st.integers(1, 10), st.text())
def test_a_buffer_returns_each_item_once(items: list[int], size: int, seed: str) -> None:
    buffer: ShuffleBuffer[int] = ShuffleBuffer(seed=seed)
    given_out = []
    for item in items:
        buffer.add(item)
        if len(buffer) > size:
            given_out.append(buffer.pop())
    assert sorted(given_out + list(buffer)) == sorted(items)

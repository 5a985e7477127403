"""A state that was loaded is for one epoch, by however many workers that and the next are read."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
from torch.utils.data import DataLoader

from aioflux.data import IterableDataset, MapDataset, loader, merge_states
from tests.data.transforms import key_of

if TYPE_CHECKING:
    from tests.data.conftest import Bucket

# torchdata's loader asks torch for it.
pytestmark = pytest.mark.filterwarnings("ignore:'set_vital' is deprecated:UserWarning")


def read(dataset: Any, num_workers: int) -> list[str]:
    options: dict[str, Any] = {"multiprocessing_context": "fork"} if num_workers else {}
    return sorted(DataLoader(dataset, batch_size=None, num_workers=num_workers, **options))


@pytest.mark.parametrize(("first", "second"), [(1, 2), (2, 0), (0, 2)])
def test_the_epoch_after_the_resumed_one_is_whole(bucket: Bucket, first: int, second: int) -> None:
    keys = bucket.fill(20)
    dataset = IterableDataset(bucket.uri, transform=key_of)
    stream = iter(dataset)
    begun = [next(stream) for _ in range(7)]
    state = merge_states([dataset.state_dict()])
    stream.close()
    resumed = IterableDataset(bucket.uri, transform=key_of)
    resumed.load_state_dict(state)
    assert sorted(begun + read(resumed, first)) == keys
    assert read(resumed, second) == keys


def test_the_next_epoch_may_be_set(bucket: Bucket) -> None:
    keys = bucket.fill(20)
    dataset = IterableDataset(bucket.uri, transform=key_of, shuffle=True)
    stream = iter(dataset)
    begun = [next(stream) for _ in range(7)]
    dataset.load_state_dict(dataset.state_dict())
    stream.close()
    assert sorted(begun + read(dataset, 0)) == keys
    dataset.set_epoch(1)
    assert read(dataset, 2) == keys


@pytest.mark.parametrize(("resumable", "batch_size"), [(True, 4), (True, None), (False, None)])
def test_a_sampler_resumes_in_a_loader_with_workers(
    bucket: Bucket, batch_size: int | None, *, resumable: bool
) -> None:
    """The loader asks the sampler for two iterators, and takes indices of the second."""
    keys = bucket.fill(20)

    def built(num_workers: int) -> Any:
        return loader(
            MapDataset(bucket.uri, transform=key_of),
            batch_size=batch_size,
            num_workers=num_workers,
            resumable=resumable,
        )

    def flat(items: Any) -> list[str]:
        return [each for item in items for each in (item if batch_size else [item])]

    before = built(0)
    stream = iter(before)
    begun = flat(next(stream) for _ in range(3))
    state = merge_states([before.sampler.state_dict()])
    after = built(2)
    after.sampler.load_state_dict(state)
    assert sorted(begun + flat(after)) == keys
    assert sorted(flat(after)) == keys

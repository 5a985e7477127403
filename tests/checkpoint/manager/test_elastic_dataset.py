"""TrainingState with a StatefulDataLoader: another number of ranks or workers loses no sample."""

from __future__ import annotations

import sys
from contextlib import contextmanager
from itertools import islice
from typing import TYPE_CHECKING, Any

import pytest
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

from aioflux.checkpoint import Checkpointer, TrainingState
from aioflux.data import IterableDataset, MapDataset, loader, merge_states
from tests.data.test_workers import reading
from tests.data.transforms import key_of

if TYPE_CHECKING:
    from collections.abc import Iterator

    from aioflux.testing import GCSServer

pytest.importorskip("torchdata")

pytestmark = [
    pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning"),
    # torchdata 0.11 takes a name from torch that torch 2.13 has deprecated.
    pytest.mark.filterwarnings("ignore:'set_vital' is deprecated:UserWarning"),
    pytest.mark.more,
]

NUM_OBJECTS = 40
KINDS = [IterableDataset, MapDataset]
CHANGES = [
    pytest.param((2, 0), (1, 0), id="2 ranks -> 1"),
    pytest.param((2, 2), (1, 0), id="2 ranks of 2 workers -> 1 of none"),
    pytest.param((2, 2), (1, 2), id="2 ranks of 2 workers -> 1"),
    pytest.param((1, 0), (3, 2), id="1 rank of no workers -> 3 of 2"),
    pytest.param((1, 2), (3, 0), id="1 rank of 2 workers -> 3 of none"),
    pytest.param((1, 0), (1, 2), id="no workers -> 2"),
    pytest.param((2, 2), (2, 0), id="2 ranks, 2 workers -> none"),
    pytest.param((2, 1), (2, 2), id="2 ranks, 1 worker -> 2"),
    pytest.param((2, 2), (2, 2), id="unchanged"),
]


@contextmanager
def process_group(rank: int, world_size: int) -> Iterator[None]:
    """This process as one rank of several, without the others."""
    hook = sys.excepthook  # torch puts its own in front, for good
    dist.init_process_group("fake", rank=rank, world_size=world_size, store=FakeStore())
    try:
        yield
    finally:
        dist.destroy_process_group()
        sys.excepthook = hook


@pytest.fixture
def samples(server: GCSServer) -> tuple[str, list[str]]:
    """The uri of the samples, and their keys."""
    keys = [f"{number:03}" for number in range(NUM_OBJECTS)]
    for key in keys:
        server.put("bucket", f"train/{key}", key.encode())
    return f"{server.root}/train", keys


def new_loader(kind: type[Any], uri: str, num_workers: int) -> Any:
    """The loader of this rank, which reads every sample once in each epoch."""
    order: dict[str, Any] = {"shuffle": True, "seed": 3, "tail": "uneven"}
    if kind is MapDataset:
        return new_loader_of(MapDataset(uri, transform=key_of), num_workers, **order)
    return new_loader_of(IterableDataset(uri, transform=key_of, **order), num_workers)


def new_loader_of(dataset: Any, num_workers: int, **options: Any) -> Any:
    start = "fork" if num_workers else None
    return loader(
        dataset,
        batch_size=3,
        num_workers=num_workers,
        start_method=start,
        resumable=True,
        **options,
    )


def new_state(batches: Any) -> TrainingState:
    return TrainingState(dataset=batches, merge=merge_states, rng=False)


def read_and_save(
    kind: type[Any], uri: str, shape: tuple[int, int], num_batches: int
) -> tuple[list[str], dict[str, Any]]:
    """Read a part of the epoch on every rank; return what was read and what all ranks save."""
    world_size, num_workers = shape
    read: list[str] = []
    saved: dict[str, dict[str, Any]] = {}
    for rank in range(world_size):
        with process_group(rank, world_size):
            batches = new_loader(kind, uri, num_workers)
            with reading(batches) as stream:
                # Ranks are not equally far, and the last one has just begun.
                wanted = num_batches if rank == 0 else rank % 2
                read += [key for batch in islice(stream, wanted) for key in batch]
                state = new_state(batches).state_dict()
            for name, value in state.items():
                if isinstance(value, dict):
                    saved.setdefault(name, {}).update(value)
                else:
                    saved[name] = value
    return read, saved


def load(state: TrainingState, saved: dict[str, Any]) -> None:
    """Load as the Checkpointer does, from memory."""
    names = {
        f"{name}.{key}": None
        for name, value in saved.items()
        if isinstance(value, dict)
        for key in value
    }
    template = state.template_for({**names, "values": None})
    for name, value in template.items():
        if isinstance(value, dict):
            value.update({key: saved[name][key] for key in value})
        else:
            template[name] = saved[name]
    state.load_state_dict(template)


def read_rest(
    kind: type[Any], uri: str, shape: tuple[int, int], saved: dict[str, Any]
) -> tuple[list[str], list[str]]:
    """Load on every rank; return the rest of the epoch, and all of the next one."""
    world_size, num_workers = shape
    rest: list[str] = []
    following: list[str] = []
    for rank in range(world_size):
        with process_group(rank, world_size):
            batches = new_loader(kind, uri, num_workers)
            load(new_state(batches), saved)
            with reading(batches) as stream:
                rest += [key for batch in stream for key in batch]
                following += [key for batch in batches for key in batch]
    return rest, following


@pytest.mark.parametrize(("before", "after"), CHANGES)
@pytest.mark.parametrize("kind", KINDS)
def test_each_sample_is_read_once_over_a_change(
    samples: tuple[str, list[str]],
    kind: type[Any],
    before: tuple[int, int],
    after: tuple[int, int],
) -> None:
    uri, keys = samples
    read, saved = read_and_save(kind, uri, before, 4)
    assert 0 < len(read) < len(keys)
    rest, following = read_rest(kind, uri, after, saved)
    assert sorted(read + rest) == keys
    assert sorted(following) == keys, "the next epoch is whole"


def test_a_checkpoint_of_two_ranks_goes_on_with_one(
    server: GCSServer, samples: tuple[str, list[str]]
) -> None:
    uri, keys = samples
    read, saved = read_and_save(IterableDataset, uri, (2, 2), 4)
    batches = new_loader(IterableDataset, uri, 1)
    with Checkpointer(f"{server.root}/run") as checkpointer:
        checkpointer.save(1, saved)
        with pytest.raises(ValueError, match=r"2 ranks \(loader with 2 .*merge=.*merge_states"):
            checkpointer.load(into=TrainingState(dataset=batches, rng=False))
        checkpointer.load(into=new_state(batches))
    with reading(batches) as stream:
        assert sorted(read + [key for batch in stream for key in batch]) == keys


@pytest.mark.parametrize("num_workers", [0, 2])
def test_a_dataset_without_a_loader_goes_on_in_one_and_back(
    samples: tuple[str, list[str]], num_workers: int
) -> None:
    uri, keys = samples
    dataset = IterableDataset(uri, transform=key_of)
    stream = iter(dataset)
    read = list(islice(stream, 7))
    saved = new_state(dataset).state_dict()
    stream.close()  # type: ignore[attr-defined]
    batches = new_loader_of(IterableDataset(uri, transform=key_of), num_workers)
    load(new_state(batches), saved)
    with reading(batches) as items:
        read += [key for batch in islice(items, 4) for key in batch]
        saved = new_state(batches).state_dict()
    last = IterableDataset(uri, transform=key_of)
    load(new_state(last), saved)
    assert sorted([*read, *last]) == keys


def test_a_load_ends_what_the_loader_has_begun(samples: tuple[str, list[str]]) -> None:
    uri, keys = samples
    read, saved = read_and_save(IterableDataset, uri, (2, 0), 4)
    batches = new_loader(IterableDataset, uri, 2)
    with reading(batches) as stream:
        next(stream)
        load(new_state(batches), saved)
    with reading(batches) as stream:
        assert sorted(read + [key for batch in stream for key in batch]) == keys


def test_a_checkpoint_of_an_earlier_version_goes_on_with_as_many(
    samples: tuple[str, list[str]],
) -> None:
    uri, keys = samples
    read, saved = read_and_save(IterableDataset, uri, (2, 2), 4)
    del saved["dataset-form"]
    rest, _ = read_rest(IterableDataset, uri, (2, 2), saved)
    assert sorted(read + rest) == keys

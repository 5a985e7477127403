"""loader: a DataLoader that is set up for these datasets.

Its many parameters are those of DataLoader that remain to be chosen, under DataLoader's names.
"""

from __future__ import annotations

import os
import warnings
from importlib import import_module
from typing import TYPE_CHECKING, Any

import torch
from torch.utils.data import DataLoader

from aioflux.data._map_dataset import MapDataset
from aioflux.data._sampler import ObjectSampler

if TYPE_CHECKING:
    from collections.abc import Callable

    from aioflux.data._iterable_dataset import IterableDataset
    from aioflux.data._sharding import Tail

__all__ = ["loader"]

_MAX_WORKERS = 8
"""Workers by default, at most: each prefetches batches."""


def loader(
    dataset: MapDataset[Any] | IterableDataset[Any],
    *,
    batch_size: int | None = 1,
    num_workers: int | None = None,
    shuffle: bool | None = None,
    seed: int = 0,
    tail: Tail | None = None,
    drop_last: bool = False,
    collate_fn: Callable[[list[Any]], Any] | None = None,
    pin_memory: bool | None = None,
    prefetch_factor: int | None = None,
    start_method: str | None = None,
    resumable: bool = False,
) -> DataLoader[Any]:
    """Return a DataLoader that is shared among ranks, seeded, and keeps its workers over epochs.

        batches = loader(dataset, batch_size=64, num_workers=4)
        for epoch in range(3):
            dataset.set_epoch(epoch)  # of a MapDataset: batches.sampler.set_epoch(epoch)
            for batch in batches: ...

    Args:
        dataset: Dataset of aioflux. An `IterableDataset` shuffles and shares by itself.
        batch_size: Items of a batch; None yields items one by one.
        num_workers: Processes that read and transform; 0 for this process itself. By default as
            many as this rank has CPUs, 8 at most.
        shuffle: For a `MapDataset`: whether its objects are permuted again in each epoch; False by
            default.
        seed: Seed of the shuffle, and of the random numbers in workers, which differ from rank to
            rank.
        tail: For a `MapDataset`: how to treat a number of objects that is no multiple of the number
            of ranks; "pad" by default, as in `IterableDataset`.
        drop_last: Whether a last batch that is not full is left out; for an `IterableDataset` that
            of each worker.
        collate_fn: Makes a batch of a list of items; by default torch's, or the list itself if the
            items are `Sample` or records without a transform.
        pin_memory: Whether batches are put in pinned memory; by default if CUDA is available.
        prefetch_factor: Batches that each worker prefetches; 2 by default.
        start_method: How workers start: "fork", "spawn" or "forkserver"; by default the platform's.
        resumable: Return torchdata's `StatefulDataLoader`, whose `state_dict` resumes at any batch.

    Raises:
        ModuleNotFoundError: `resumable`, and torchdata is not installed.
        ValueError: A setting has no effect with this dataset.
    """
    options = _sampling_options(dataset, shuffle=shuffle, seed=seed, tail=tail)
    options |= _worker_options(
        num_workers, prefetch_factor=prefetch_factor, start_method=start_method
    )
    if collate_fn is None and batch_size is not None and not dataset.has_transform:
        collate_fn = list
    return _loader_class(is_resumable=resumable)(
        dataset,
        batch_size=batch_size,
        drop_last=drop_last,
        collate_fn=collate_fn,
        pin_memory=torch.cuda.is_available() if pin_memory is None else pin_memory,
        **options,
    )


def _sampling_options(
    dataset: MapDataset[Any] | IterableDataset[Any],
    *,
    shuffle: bool | None,
    seed: int,
    tail: Tail | None,
) -> dict[str, Any]:
    """Return the options that order a dataset, share it among ranks, and seed its workers."""
    options: dict[str, Any] = {}
    if isinstance(dataset, MapDataset):
        options["sampler"] = sampler = ObjectSampler(
            dataset, shuffle=bool(shuffle), seed=seed, tail=tail or "pad"
        )
        rank, _ = sampler.rank_and_world_size()
    elif shuffle is not None or tail is not None:
        raise ValueError(
            "shuffle and tail of an IterableDataset are set where it is built: "
            "IterableDataset(uri, shuffle=True, tail=...)"
        )
    else:
        rank, _ = dataset.rank_and_world_size()
    options["generator"] = generator = torch.Generator()
    generator.manual_seed((seed * 1_000_003 + rank) % (1 << 63))
    return options


def _worker_options(
    num_workers: int | None, *, prefetch_factor: int | None, start_method: str | None
) -> dict[str, Any]:
    """Return the options that set number, start method and prefetch of workers."""
    if num_workers is None:
        num_workers = _default_num_workers()
    if prefetch_factor is not None and prefetch_factor < 1:
        raise ValueError(f"prefetch_factor must be above 0, not {prefetch_factor!r}")
    if num_workers:
        return {
            "num_workers": num_workers,
            "persistent_workers": True,
            "prefetch_factor": prefetch_factor or 2,
            "multiprocessing_context": start_method,
        }
    if prefetch_factor is not None or start_method is not None:
        raise ValueError("prefetch_factor and start_method have no effect with num_workers=0")
    return {"num_workers": 0}


def _loader_class(*, is_resumable: bool) -> type[DataLoader[Any]]:
    if not is_resumable:
        return DataLoader
    try:
        with warnings.catch_warnings():
            # torchdata 0.11 imports a name of torch that torch 2.13 has deprecated.
            warnings.filterwarnings("ignore", "'set_vital' is deprecated", UserWarning)
            module = import_module("torchdata.stateful_dataloader")
    except ModuleNotFoundError as exc:
        raise ModuleNotFoundError(
            "a resumable loader needs torchdata: pip install torchdata", name=exc.name
        ) from exc
    loader_class: type[DataLoader[Any]] = module.StatefulDataLoader
    return loader_class


def _default_num_workers() -> int:
    """Return the CPUs of this process, divided by the ranks of this machine."""
    cpus = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    ranks = int(os.environ.get("LOCAL_WORLD_SIZE") or 1)
    return max(1, min(_MAX_WORKERS, cpus // max(ranks, 1)))

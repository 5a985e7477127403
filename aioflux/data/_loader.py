"""loader: a DataLoader with settings for the datasets of this package.

Most of its many parameters are parameters of DataLoader, with the same names.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Iterator
from importlib import import_module
from typing import TYPE_CHECKING, Any

import torch
from torch.utils.data import DataLoader

from aioflux.data._map_dataset import MapDataset
from aioflux.data._resume import STATE_KEY, merge_states
from aioflux.data._sampler import ObjectSampler
from aioflux.data._thread_loader import ThreadLoader, stateful_of
from aioflux.options import check_count

if TYPE_CHECKING:
    from aioflux.data._counters import LoadCounters
    from aioflux.data._iterable_dataset import IterableDataset
    from aioflux.data._sharding import Tail

_MAX_WORKERS = 8
"""Largest default of `num_workers`. More are rarely useful, because each worker prefetches several
objects at a time."""

_REPLACED = {
    "multiprocessing_context": "pass start_method",
    "generator": "pass seed",
    "sampler": "pass shuffle, seed and tail, or build DataLoader(dataset, sampler=...)",
    "batch_sampler": "pass batch_size, drop_last and shuffle, or build a DataLoader",
}
"""Parameters of DataLoader, with what takes their place."""


def loader(
    dataset: MapDataset[Any] | IterableDataset[Any],
    *,
    batch_size: int | None = 1,
    num_workers: int | None = None,
    num_threads: int | None = None,
    shuffle: bool | None = None,
    seed: int = 0,
    tail: Tail | None = None,
    drop_last: bool = False,
    collate_fn: Callable[[list[Any]], Any] | None = None,
    pin_memory: bool | None = None,
    prefetch_factor: int | None = None,
    start_method: str | None = None,
    resumable: bool = False,
    **worker_options: Any,
) -> DataLoader[Any]:
    """Return a DataLoader for one rank, with seeded and persistent workers, or with threads.

        batches = loader(dataset, batch_size=64, num_workers=4)  # or num_threads=4
        for epoch in range(3):
            dataset.set_epoch(epoch)  # of a MapDataset: batches.sampler.set_epoch(epoch)
            for batch in batches: ...

    Args:
        dataset: A `MapDataset` or an `IterableDataset`. The constructor of `IterableDataset` sets
            its order and shares; a `MapDataset` is shuffled and shared by an `ObjectSampler`.
        batch_size: Number of items in a batch; None yields single items.
        num_workers: Number of worker processes; 0 reads in this process. By default the number of
            CPUs for this rank, at most 8.
        num_threads: Number of threads of this process that transform and collate, while an event
            loop reads; 0 transforms in the consumer's thread. There are no worker processes then:
            nothing is pickled, limits of `TransferOptions` apply once, and the loader has
            `state_dict` and `load_state_dict`. Threads run in parallel while the transform has
            released the GIL, as image decoders, numpy and torch do. The transform must be safe to
            call in several threads; their random numbers are not seeded.
        shuffle: Whether a `MapDataset` is permuted differently in each epoch; False by default.
        seed: Seed of the shuffle of a `MapDataset`, and of the random numbers in workers, which
            differ between ranks.
        tail: Treatment of the last objects of a `MapDataset` if they do not divide evenly among
            the ranks; "pad" by default, as in `IterableDataset`.
        drop_last: Whether a last batch that is not full is left out; with an `IterableDataset`, the
            last batch of each worker.
        collate_fn: Makes a batch of a list of items. By default torch's `default_collate`, or
            `list` if the dataset has no transform.
        pin_memory: Whether batches are copied to pinned memory; by default if CUDA is available.
        prefetch_factor: Number of batches that each worker prefetches, or that threads finish in
            advance; 2 by default.
        start_method: Start method of workers: "fork", "spawn" or "forkserver"; by default the start
            method of the platform.
        resumable: Whether to return torchdata's `StatefulDataLoader`, which can save its state
            after any batch and resume from it. A loader with `num_threads` always can. Each of them
            also resumes from a state of the other.
        **worker_options: Further parameters of DataLoader for its workers: `worker_init_fn`,
            `timeout`, `in_order`, and `persistent_workers`, which is True by default.

    Raises:
        ModuleNotFoundError: `resumable` is True, and torchdata is not installed.
        TypeError: `num_threads` or `prefetch_factor` is not an int, or another keyword takes the
            place of a parameter of DataLoader.
        ValueError: A setting has no effect with this dataset, with `num_workers=0` or with
            `num_threads`, or is not valid.
    """
    for name in worker_options.keys() & _REPLACED.keys():
        raise TypeError(f"loader takes no {name}; {_REPLACED[name]}")
    options = _sampling_options(dataset, shuffle=shuffle, seed=seed, tail=tail)
    if prefetch_factor is not None:
        check_count("prefetch_factor", prefetch_factor)
        worker_options["prefetch_factor"] = prefetch_factor
    if start_method is not None:
        worker_options["start_method"] = start_method
    if num_threads is None:
        loader_class = _loader_class(is_resumable=resumable)
        options |= _worker_options(num_workers, worker_options)
    else:
        loader_class = _TimedThreadLoader
        options |= _thread_options(num_threads, num_workers, worker_options)
    if collate_fn is None and batch_size is not None and not dataset.has_transform:
        collate_fn = list
    return loader_class(
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
            "pass shuffle and tail of an IterableDataset to its constructor: "
            "IterableDataset(uri, shuffle=True, tail=...)"
        )
    else:
        rank, _ = dataset.rank_and_world_size()
    options["generator"] = generator = torch.Generator()
    generator.manual_seed((seed * 1_000_003 + rank) % (1 << 63))
    return options


def _worker_options(num_workers: int | None, given: dict[str, Any]) -> dict[str, Any]:
    """Return the options of workers: their number, defaults, and those that are given."""
    num_workers = _default_num_workers() if num_workers is None else num_workers
    if num_workers:
        context = given.pop("start_method", None)
        defaults = {"persistent_workers": True, "prefetch_factor": 2}
        return {"num_workers": num_workers, "multiprocessing_context": context, **defaults, **given}
    if given:
        raise ValueError(f"no effect with num_workers=0: leave out {', '.join(given)}")
    return {"num_workers": 0}


def _thread_options(
    num_threads: int, num_workers: int | None, given: dict[str, Any]
) -> dict[str, Any]:
    """Return the options for the number of threads, and of the batches that they prefetch."""
    check_count("num_threads", num_threads, least=0)
    prefetch_batches = given.pop("prefetch_factor", 2) if num_threads else 2
    if num_workers:
        given["num_workers"] = num_workers
    if given:
        raise ValueError(f"no effect with num_threads={num_threads}: leave out {', '.join(given)}")
    return {"num_threads": num_threads, "prefetch_batches": prefetch_batches}


class _TimedBatches:
    """An iterator over batches that counts the time of `next`, with the attributes of torch's."""

    def __init__(self, batches: Iterator[Any], counters: LoadCounters) -> None:
        self._batches, self._counters = batches, counters

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        return self._counters.next_batch(self._batches)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._batches, name)


class _TimedLoader(DataLoader[Any]):
    """A DataLoader that counts the time for which the loop over its batches waits."""

    def __iter__(self) -> Iterator[Any]:  # type: ignore[override]  # no iterator of torch
        counters: LoadCounters = self.dataset._counters  # type: ignore[attr-defined]  # noqa: SLF001
        counters.start_epoch()
        return _TimedBatches(super().__iter__(), counters)


class _TimedThreadLoader(_TimedLoader, ThreadLoader):
    """A `ThreadLoader` that counts the time for which the loop over its batches waits."""


def _loader_class(*, is_resumable: bool) -> type[DataLoader[Any]]:
    if not is_resumable:
        return _TimedLoader
    try:
        with warnings.catch_warnings():
            # torchdata 0.11 imports a name of torch that torch 2.13 has deprecated.
            warnings.filterwarnings("ignore", "'set_vital' is deprecated", UserWarning)
            module = import_module("torchdata.stateful_dataloader")
    except ModuleNotFoundError as exc:
        from aioflux._values.distribution import pip_install

        raise ModuleNotFoundError(
            f"a resumable loader needs torchdata: {pip_install('torch')}", name=exc.name
        ) from exc

    class ResumableLoader(_TimedLoader, module.StatefulDataLoader):  # type: ignore[misc, name-defined]
        """A `StatefulDataLoader` that also resumes from a state of its dataset or sampler."""

        def load_state_dict(self, state_dict: dict[str, Any]) -> None:
            super().load_state_dict(state_dict)
            # At the end of an epoch, torchdata would read the epoch again, or leave out the next.
            fetcher = state_dict.get("fetcher_state") or {}
            is_at_end = state_dict.get("_iterator_finished") or fetcher.get("fetcher_ended")
            # Other states are of a `ThreadLoader`, or from `merge_states`.
            if is_at_end or STATE_KEY in state_dict:
                self.next_iter_state = None
                stateful_of(self).load_state_dict(merge_states([state_dict]))

    return ResumableLoader


def _default_num_workers() -> int:
    """Return the number of CPUs of this process, divided by the number of ranks on this machine."""
    cpus = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    ranks = int(os.environ.get("LOCAL_WORLD_SIZE") or 1)
    return max(1, min(_MAX_WORKERS, cpus // max(ranks, 1)))

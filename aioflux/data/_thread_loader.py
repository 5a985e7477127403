"""ThreadLoader: a DataLoader whose batches are made in threads of its own process.

    event loop    reads objects, within the limits of the stores
    batch thread  iterates over samples or records, in order, and forms batches
    N threads     transform the samples and collate the batches
    consumer      receives finished batches, or collates a batch that still waits for a thread; the
                  progress counts only these

There are no worker processes, so that nothing is pickled or copied between processes.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator, Mapping
from contextlib import closing
from functools import partial
from typing import TYPE_CHECKING, Any, TypeAlias

import torch
from torch.utils.data import DataLoader
from torch.utils.data._utils.pin_memory import pin_memory

from aioflux import _bridge
from aioflux.data._map_dataset import MapDataset
from aioflux.data._resume import merge_states
from aioflux.data._transform import TransformThreads

if TYPE_CHECKING:
    from concurrent.futures import Future

Batches: TypeAlias = "Generator[tuple[list[Any], Callable[[], None]], None, None]"
"""Items of each batch, and a function that marks them as read when they were yielded. Without items
it only marks, for samples that were skipped or dropped at the end."""


class ThreadLoader(DataLoader[Any]):
    """A DataLoader that reads on the event loop, and transforms and collates in threads.

    Its state is the state of its dataset, or of its sampler if the dataset is a `MapDataset`. It
    counts the samples of the batches that were yielded, so that it can be saved after any batch.
    """

    def __init__(
        self, dataset: Any, *, num_threads: int, prefetch_batches: int, **options: Any
    ) -> None:
        """Create a loader; its threads exist only while it is iterated.

        Args:
            dataset: A `MapDataset`, with an `ObjectSampler` in `options`, or an `IterableDataset`.
            num_threads: Number of threads that transform; 0 transforms in the consumer's thread.
            prefetch_batches: Largest number of finished batches that wait for the consumer.
            options: Other parameters of DataLoader.
        """
        super().__init__(dataset, num_workers=0, **options)
        self.num_threads = num_threads
        self.prefetch_batches = prefetch_batches

    def state_dict(self) -> dict[str, Any]:
        """Return the progress in the epoch: the samples of the batches that were yielded."""
        state: dict[str, Any] = stateful_of(self).state_dict()
        return state

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Resume from a state in the next iteration.

        Args:
            state: State of this loader, of its dataset or sampler, or of the `StatefulDataLoader`
                of `loader(dataset, resumable=True)`. An empty state has no effect.

        Raises:
            ValueError: The state was saved for other objects or another order.
        """
        if state:
            stateful_of(self).load_state_dict(merge_states([state]))

    def __iter__(self) -> Iterator[Any]:  # type: ignore[override]  # no iterator of torch
        """Plan an epoch, or the rest of a resumed epoch, and return an iterator over its batches.

        If the iteration is left early, reads are cancelled, and the threads end after the
        transforms in progress.
        """
        has_cuda = self.pin_memory and torch.cuda.is_available()
        device = torch.cuda.current_device() if has_cuda else None  # other in other threads
        if not self.num_threads:
            return self._collated_inline(self._batches(None), device)
        dataset: Any = self.dataset
        max_bytes = dataset._source.transfer.max_in_flight_bytes  # noqa: SLF001  same package
        threads = TransformThreads(self.num_threads, max_bytes=max_bytes)
        return self._collated_ahead(self._batches(threads), threads, device)

    def _collated_inline(self, batches: Batches, device: int | None) -> Iterator[Any]:
        with closing(batches):
            for items, mark_read in batches:
                batch = self._collate([items], device) if items else None
                mark_read()
                if items:
                    yield batch

    def _collated_ahead(
        self, batches: Batches, threads: TransformThreads, device: int | None
    ) -> Iterator[Any]:
        collated = self._submit_collates(batches, threads, device)
        ahead = _bridge.run_ahead(collated, max_ahead=self.prefetch_batches, stop=threads.stop)
        with closing(ahead) as ready:
            for collate, result, mark_read in ready:
                if result is None:
                    mark_read()
                    continue
                # Do not wait while the threads transform samples of later batches.
                batch = collate() if result.cancel() else _bridge.wait_for_result(result)
                mark_read()
                del collate, result
                yield batch

    def _collate(self, waiting: list[list[Any]], device: int | None) -> Any:
        items = waiting.pop()  # a cancelled call stays in the queue of the threads, without items
        batch = self.collate_fn(items if self.batch_size is not None else items[0])
        if device is None:
            return batch
        with torch.cuda.device(device):  # the device of a new thread is 0
            return pin_memory(batch)  # type: ignore[no-untyped-call]

    def _submit_collates(
        self, batches: Batches, threads: TransformThreads, device: int | None
    ) -> Generator[tuple[Callable[[], Any], Future[Any] | None, Callable[[], None]], None, None]:
        try:
            with closing(batches):
                for items, mark_read in batches:
                    collate = partial(self._collate, [items], device)
                    yield collate, threads.submit(collate) if items else None, mark_read
        finally:
            threads.join()

    def _batches(self, threads: TransformThreads | None) -> Batches:
        dataset: Any = self.dataset
        if not isinstance(dataset, MapDataset):
            return self._stream_batches(dataset._read_batches(threads, self.batch_size))  # noqa: SLF001
        sampler: Any = self.sampler
        indices, mark_read = sampler._start_epoch()  # noqa: SLF001  of the same package
        return self._map_batches(dataset, indices, mark_read, threads)

    def _stream_batches(self, batches: Batches) -> Batches:
        with closing(batches):
            for items, mark_read in batches:
                is_short = self.batch_size is not None and len(items) < self.batch_size
                yield [] if is_short and self.drop_last else items, mark_read

    def _map_batches(
        self,
        dataset: Any,
        indices: list[int],
        mark_read: Callable[[int], None],
        threads: TransformThreads | None,
    ) -> Batches:
        size, num_indices = self.batch_size or 1, len(indices)
        end = num_indices - num_indices % size if self.drop_last else num_indices
        with closing(dataset._read_batches(threads, indices[:end], size)) as batches:  # noqa: SLF001
            for number, items in enumerate(batches, 1):
                yield items, partial(mark_read, min(number * size, end))
        yield [], partial(mark_read, num_indices)


def stateful_of(loader: DataLoader[Any]) -> Any:
    """Return the sampler or the dataset of a loader, which has the state of the epoch."""
    return loader.sampler if isinstance(loader.dataset, MapDataset) else loader.dataset

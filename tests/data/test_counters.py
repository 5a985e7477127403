"""LoadCounters: counts of all processes; and the progress bar that shows them."""

from __future__ import annotations

import dataclasses
import io
import pickle
import time
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset, get_worker_info

from aioflux import TransferOptions
from aioflux.data import IterableDataset as AioIterableDataset
from aioflux.data import LoadStats, MapDataset, loader
from aioflux.data._counters import LoadCounters
from aioflux.data._progress import ProgressBar, render, show_progress
from tests.data.transforms import key_of

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from tests.data.conftest import Bucket

pytestmark = [
    pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning"),
    # torchdata 0.11 takes a name from torch that torch 2.13 has deprecated.
    pytest.mark.filterwarnings("ignore:'set_vital' is deprecated:UserWarning"),
]


class Counted(Dataset):
    """Counts its items."""

    def __init__(self, num_objects: int) -> None:
        self.counters = LoadCounters()
        self.num_objects = num_objects

    def __len__(self) -> int:
        return self.num_objects

    def __getitem__(self, index: int) -> int:
        self.counters.count(1, 10, num_cache_hits=index % 2)
        self.counters.count_wait(time.monotonic() - 0.5)
        self.counters.update_retries(3)
        return index


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_new_counters_are_zero() -> None:
    stats = LoadCounters().snapshot()
    assert stats == LoadStats()
    assert stats.objects_per_second == stats.bytes_per_second == 0.0


def test_counts_add_up() -> None:
    counters = LoadCounters().start_clock()
    counters.count(3, 300, num_cache_hits=1)
    counters.count(1, 50)
    counters.count_skipped()
    counters.count_wait(time.monotonic() - 1.5)
    stats = counters.snapshot()
    assert stats.seconds > 0
    assert stats.waited_seconds >= 1.5
    assert stats.worker_seconds == stats.seconds
    timeless = dataclasses.replace(stats, seconds=0.0, waited_seconds=0.0, worker_seconds=0.0)
    assert timeless == LoadStats(num_objects=4, num_bytes=350, num_cache_hits=1, num_skipped=1)
    assert stats.objects_per_second == 4 / stats.seconds
    assert stats.bytes_per_second == 350 / stats.seconds


def test_time_between_iterations_is_left_out() -> None:
    counters, started = LoadCounters(), time.monotonic()
    for _ in range(2):
        counters.start_clock().count(1, 1)
        time.sleep(0.05)
    counters.start_clock().count(1, 1)
    assert 0 < counters.snapshot().seconds <= time.monotonic() - started - 0.1


def test_large_sums_are_exact() -> None:
    counters = LoadCounters()
    counters.count(1, 2**52)
    counters.count(1, 1)
    assert counters.snapshot().num_bytes == 2**52 + 1


def test_retries_are_counted_as_they_rise() -> None:
    counters = LoadCounters()
    for seen in (2, 2, 5):
        counters.update_retries(seen)
    assert counters.snapshot().num_retries == 5


def test_waiting_is_a_part_of_the_time() -> None:
    counters, started = LoadCounters().start_clock(), time.monotonic()
    since = time.monotonic()
    time.sleep(0.05)
    counters.count_wait(since)
    time.sleep(0.05)
    counters.count(1, 1)
    stats = counters.snapshot()
    assert 0.05 <= stats.waited_seconds <= stats.seconds - 0.05
    assert stats.seconds <= time.monotonic() - started


def test_stats_of_ranks_add_up() -> None:
    one = LoadStats(
        num_objects=1,
        num_bytes=2,
        seconds=3.0,
        waited_seconds=4.0,
        num_cache_hits=5,
        num_retries=6,
        num_skipped=7,
        worker_seconds=8.0,
        loop_seconds=9.0,
        loop_waited_seconds=3.0,
    )
    assert one + dataclasses.replace(one, seconds=2.0) == LoadStats(
        num_objects=2,
        num_bytes=4,
        seconds=3.0,
        waited_seconds=8.0,
        num_cache_hits=10,
        num_retries=12,
        num_skipped=14,
        worker_seconds=16.0,
        loop_seconds=18.0,
        loop_waited_seconds=6.0,
    )
    assert one + one - one == dataclasses.replace(one, seconds=0.0)
    assert sum([one, one], LoadStats()).num_objects == 2
    with pytest.raises(TypeError):
        _ = one + 1


@pytest.mark.parametrize(
    ("times", "share"),
    [
        ({}, 0.0),
        ({"worker_seconds": 20.0, "waited_seconds": 5.0, "seconds": 4.0}, 0.25),
        ({"worker_seconds": 10.0, "waited_seconds": 30.0}, 1.0),  # waits of several threads
        ({"worker_seconds": 10.0, "waited_seconds": 9.0, "loop_seconds": 8.0}, 0.0),
        ({"worker_seconds": 9.0, "loop_seconds": 8.0, "loop_waited_seconds": 6.0}, 0.75),
    ],
)
def test_the_share_of_waiting_is_that_of_the_loop_or_of_the_workers(
    times: dict[str, float], share: float
) -> None:
    assert LoadStats(**times).waited_share == share  # type: ignore[arg-type]


def test_stats_are_printed_in_three_lines_and_flat_in_a_dict() -> None:
    stats = LoadStats(
        num_objects=5000,
        num_bytes=5 << 30,
        seconds=10.0,
        num_retries=3,
        num_skipped=1,
        loop_seconds=8.0,
        loop_waited_seconds=6.0,
    )
    assert str(stats).splitlines() == [
        "read        5,000 objects, 5.0 GiB, in 10.0 s (500.0/s, 512.0 MiB/s)",
        "waited      75% of the time",
        "problems    3 retries, 1 skipped",
    ]
    numbers = stats.as_dict()
    assert numbers["num_objects"] == 5000
    assert numbers["objects_per_second"] == 500
    assert numbers["waited_share"] == 0.75
    assert all(isinstance(value, int | float) for value in numbers.values())


def test_stats_pickle() -> None:
    stats = LoadStats(num_objects=1)
    assert pickle.loads(pickle.dumps(stats)) == stats


@pytest.mark.parametrize("start", ["fork", "forkserver"])
def test_the_main_process_knows_the_counts_of_its_workers(start: str) -> None:
    dataset = Counted(20)
    dataset.counters.count(1, 10)
    dataset.counters.update_retries(2)
    loader = DataLoader(dataset, batch_size=2, num_workers=2, multiprocessing_context=start)
    assert torch.cat(list(loader)).tolist() == list(range(20))
    stats = dataset.counters.snapshot()
    assert stats.num_objects == 21
    assert stats.num_bytes == 210
    assert stats.num_cache_hits == 10
    assert stats.waited_seconds == pytest.approx(10.0, abs=0.5)
    assert stats.num_retries == 2 + 2 * 3


def test_a_pickle_counts_by_itself() -> None:
    counters = LoadCounters()
    counters.count(1, 1)
    other = pickle.loads(pickle.dumps(counters))
    assert other.snapshot() == LoadStats()
    other.count(5, 5)
    assert counters.snapshot().num_objects == 1


def test_a_line_has_percentage_rates_and_time_left() -> None:
    before = LoadStats(num_objects=100)
    stats = LoadStats(
        num_objects=350, num_bytes=5 * 2**20, waited_seconds=0.25, num_cache_hits=4, num_skipped=1
    )
    assert render(stats, before, 10.0, label="gs://b/train", total=1000) == (
        "gs://b/train  25% [#####...............] 250 of 1,000 objects, 5.0 MiB, 25/s, "
        "512.0 KiB/s, waited 0.2 s, 4 from cache, 1 skipped, 0:30 left"
    )


@pytest.mark.parametrize("total", [None, 0])
def test_a_line_without_a_total_has_no_percentage(total: int | None) -> None:
    line = render(LoadStats(num_objects=2), LoadStats(), 0.0, label="x", total=total)
    assert line == "x 2 objects, 0 B, 0/s, 0 B/s, waited 0.0 s"


def test_a_terminal_has_one_line_that_is_redrawn() -> None:
    terminal, counters = Terminal(), LoadCounters()
    for _ in show_progress(range(5), counters, label="x", total_objects=5, file=terminal):
        counters.count(1, 1)
    text = terminal.getvalue()
    assert text.startswith("\rx   0% ")
    assert text.count("\n") == 1
    assert text.rsplit("\r", 1)[1].startswith("x 100% [####################] 5 of 5 objects")


LABEL = "gs://bucket/some/longer/prefix/ epoch 3"


def line_of(width: int | None) -> str:
    stats = LoadStats(num_objects=2_500, num_bytes=5 << 30, waited_seconds=12.5, num_retries=2)
    return render(stats, LoadStats(), 100.0, label=LABEL, total=3_000, width=width)


def test_a_line_fits_the_width_that_there_is() -> None:
    """The share, the count and the time left stay longest."""
    whole = line_of(None)
    assert line_of(len(whole)) == line_of(500) == whole
    assert all(len(line_of(width)) <= width for width in range(1, len(whole)))
    assert line_of(120).endswith("] 2,500 of 3,000 objects, 5.0 GiB, 25/s, 0:20 left")
    assert line_of(79) == f"{LABEL}  83% 2,500 of 3,000 objects, 0:20 left"
    assert line_of(60) == "...er/prefix/ epoch 3  83% 2,500 of 3,000 objects, 0:20 left"
    assert line_of(40) == "83% 2,500 of 3,000 objects, 0:20 left"


def test_a_line_is_never_wider_than_the_terminal() -> None:
    """It may be another size from one line to the next."""
    pty = pytest.importorskip("pty")
    termios = pytest.importorskip("termios")
    ours, theirs = pty.openpty()
    with open(theirs, "w") as terminal, open(ours, "rb", buffering=0) as screen:
        termios.tcsetwinsize(theirs, (24, 80))
        with ProgressBar(LoadCounters(), label=LABEL, total_objects=3_000, file=terminal) as bar:
            bar.update()
            assert len(screen.read(4096).removeprefix(b"\r")) == 79
            termios.tcsetwinsize(theirs, (24, 110))
        assert len(screen.read(4096).strip(b"\r\n")) == 109


class Shared(IterableDataset):
    """Counts shares of different size, and shows that; each worker takes its time."""

    def __init__(self, path: Path) -> None:
        self.counters = LoadCounters()
        self.path = path

    def __iter__(self) -> Iterator[int]:
        worker = get_worker_info()
        share = range(worker.id, 11, worker.num_workers)
        with self.path.open("a") as file:
            yield from show_progress(
                self.counted(share),
                self.counters,
                label="x",
                total_objects=len(share),
                num_workers=worker.num_workers,
                file=file,
            )

    def counted(self, share: range) -> Iterator[int]:
        for each in share:
            self.counters.count(1, 1)
            yield each


@pytest.mark.parametrize("persistent", [False, True])
def test_the_last_line_of_workers_has_all_objects(tmp_path: Path, persistent: bool) -> None:
    """Whichever of them began first or ended last, in each epoch."""
    path = tmp_path / "lines"
    dataset = Shared(path)
    loader = DataLoader(dataset, num_workers=2, batch_size=1, persistent_workers=persistent)
    for epoch in range(1, 3):
        assert len(list(loader)) == 11
        lines = path.read_text().splitlines()
        assert len(lines) >= epoch
        assert lines[-1].startswith("x 100% [####################] 11 of 11 objects, 11 B")


def test_without_a_terminal_there_is_a_line_at_the_end() -> None:
    file, counters = io.StringIO(), LoadCounters()
    for _ in show_progress(range(5), counters, label="x", file=file):
        counters.count(1, 1)
    assert file.getvalue().count("\n") == 1
    assert file.getvalue().startswith("x 5 objects, 5 B")


def test_a_line_that_becomes_shorter_leaves_nothing_behind() -> None:
    terminal, counters = Terminal(), LoadCounters()
    counters.count(1_000_000, 0)
    with ProgressBar(counters, label="x", file=terminal) as bar:
        counters.count(1_000_000, 0)
        bar.update()
        counters.count(-999_999, 0)
    first, last = terminal.getvalue().split("\r")[1:]
    assert len(last.removesuffix("\n")) >= len(first)


def test_a_bar_ends_its_line_when_the_body_fails() -> None:
    terminal = Terminal()
    with pytest.raises(KeyError), ProgressBar(LoadCounters(), label="x", file=terminal):
        raise KeyError
    assert terminal.getvalue().endswith("\n")


# --- of a loader, and of an epoch -------------------------------------------------------------


LOADERS: dict[str, dict[str, Any]] = {
    "inline": {"num_workers": 0},
    "workers": {"num_workers": 2, "start_method": "fork"},
    "threads": {"num_threads": 2},
    "stateful": {"num_workers": 0, "resumable": True},
}


@pytest.mark.clouds("gs")
@pytest.mark.parametrize("how", LOADERS)
@pytest.mark.parametrize("kind", [MapDataset, AioIterableDataset])
def test_the_wait_of_a_loop_over_a_loader_is_measured(
    bucket: Bucket, kind: type[Any], how: str
) -> None:
    """Slow objects are waited for; while the loop itself is slow, nothing is."""
    bucket.fill(16)
    with bucket.server.faults.inject("*objects.get", delay_seconds=0.2):
        slow = kind(bucket.uri, transform=key_of, transfer=TransferOptions(max_in_flight=2))
        for _ in loader(slow, batch_size=2, **LOADERS[how]):
            pass
    assert 0.8 < slow.stats.waited_share <= 1
    assert slow.stats.loop_seconds >= slow.stats.loop_waited_seconds >= 0.4

    fast = kind(bucket.uri, transform=key_of)
    started_at = time.monotonic()
    for _ in loader(fast, batch_size=2, **LOADERS[how]):
        time.sleep(0.2)
    seconds = time.monotonic() - started_at
    assert 8 * 0.2 <= fast.stats.loop_seconds <= seconds
    assert fast.stats.loop_seconds - fast.stats.loop_waited_seconds >= 8 * 0.2
    assert 0 < fast.stats.waited_share < 1


@pytest.mark.clouds("gs")
@pytest.mark.parametrize("how", LOADERS)
@pytest.mark.parametrize("kind", [MapDataset, AioIterableDataset])
def test_an_epoch_has_its_own_stats(bucket: Bucket, kind: type[Any], how: str) -> None:
    bucket.fill(10)
    dataset = kind(bucket.uri, transform=key_of)
    batches = loader(dataset, batch_size=2, **LOADERS[how])
    for epoch in range(1, 4):
        assert sum(map(len, batches)) == 10
        stats = dataset.epoch_stats
        assert (stats.num_objects, dataset.stats.num_objects) == (10, 10 * epoch)
        assert 0 < stats.loop_seconds <= dataset.stats.loop_seconds
        assert 0 <= stats.waited_share <= 1


@pytest.mark.clouds("gs")
def test_a_loop_that_ends_early_has_waited_no_longer_than_it_ran(bucket: Bucket) -> None:
    bucket.fill(10)
    dataset = AioIterableDataset(bucket.uri, transform=key_of)
    for _ in loader(dataset, batch_size=2, num_workers=0):
        break
    assert dataset.stats.waited_share == 1.0


@pytest.mark.clouds("gs")
@pytest.mark.parametrize("kind", [MapDataset, AioIterableDataset])
def test_without_a_loader_an_iteration_is_an_epoch(bucket: Bucket, kind: type[Any]) -> None:
    bucket.fill(10)
    dataset = kind(bucket.uri, transform=key_of)
    for epoch in range(1, 3):
        assert len(list(dataset)) == 10
        assert (dataset.epoch_stats.num_objects, dataset.stats.num_objects) == (10, 10 * epoch)
        assert 0 < dataset.stats.waited_share <= 1


@pytest.mark.clouds("gs")
def test_set_epoch_starts_the_stats_of_an_epoch(bucket: Bucket) -> None:
    """Of other loaders, too, whose workers read."""
    bucket.fill(10)
    dataset = AioIterableDataset(bucket.uri, transform=key_of)
    batches = DataLoader(dataset, batch_size=2, num_workers=2, multiprocessing_context="fork")
    for epoch in range(2):
        dataset.set_epoch(epoch)
        assert sum(len(batch) for batch in batches) == 10
        assert dataset.epoch_stats.num_objects == 10
    assert dataset.stats.loop_seconds == 0
    assert 0 < dataset.stats.waited_share <= 1

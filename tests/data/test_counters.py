"""LoadCounters: counts of all processes; and the progress bar that shows them."""

from __future__ import annotations

import dataclasses
import io
import pickle
import time
from typing import TYPE_CHECKING

import pytest
import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset, get_worker_info

from aioflux.data import LoadStats
from aioflux.data._counters import LoadCounters
from aioflux.data._progress import ProgressBar, render, show_progress

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

pytestmark = pytest.mark.filterwarnings(
    "ignore:This process .* is multi-threaded:DeprecationWarning"
)


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
    assert dataclasses.replace(stats, seconds=0.0, waited_seconds=0.0) == LoadStats(
        num_objects=4, num_bytes=350, num_cache_hits=1, num_skipped=1
    )
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
    )
    assert one + dataclasses.replace(one, seconds=2.0) == LoadStats(
        num_objects=2,
        num_bytes=4,
        seconds=3.0,
        waited_seconds=8.0,
        num_cache_hits=10,
        num_retries=12,
        num_skipped=14,
    )
    assert sum([one, one], LoadStats()).num_objects == 2
    with pytest.raises(TypeError):
        _ = one + 1


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

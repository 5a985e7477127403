"""loader(num_threads=): the batches of an inline loader, and no thread that runs on after them."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
import time
from contextlib import closing
from itertools import chain, islice
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch.utils.data import DataLoader

import aioflux
from aioflux.data import IterableDataset, MapDataset, loader, merge_states
from aioflux.errors import NotFoundError
from tests.bridge.patience import FAR_SECONDS, PATIENT_CLEANUP
from tests.bridge.scripts import finish, line, running
from tests.data.transforms import key_of, lines_of, refuse_odd

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator
    from pathlib import Path

    from aioflux.data import Sample
    from tests.data.conftest import Bucket

pytestmark = pytest.mark.filterwarnings("ignore:'set_vital' is deprecated:UserWarning")

KINDS = [MapDataset, IterableDataset]
MOST_SECONDS = 100.0
"""Time to end an iteration; the server answers later, or never."""


def threads() -> list[str]:
    names = (thread.name for thread in threading.enumerate())
    return [name for name in names if name.startswith(("aioflux-batches", "aioflux-transform"))]


@pytest.fixture(autouse=True)
def no_thread_is_left() -> Iterator[None]:
    yield
    assert threads() == []


def read_all(batches: Iterable[list[str]], read: list[str]) -> None:
    for batch in batches:
        read += batch


def build(kind: type[Any], bucket: Bucket, num_threads: int = 2, **options: Any) -> Any:
    """A loader of shuffled keys, of either kind of dataset."""
    if kind is MapDataset:
        dataset = MapDataset(bucket.uri, transform=key_of)
        shuffle = {"shuffle": True, "seed": 3}
    else:
        dataset = IterableDataset(bucket.uri, transform=key_of, shuffle=True, seed=3)
        shuffle = {}
    return loader(dataset, num_threads=num_threads, **{"batch_size": 4, **shuffle, **options})


@pytest.mark.clouds("gs", "s3", "az")
@pytest.mark.parametrize("num_threads", [0, 1, 3])
@pytest.mark.parametrize("kind", KINDS)
def test_batches_are_those_of_a_dataloader(
    bucket: Bucket, kind: type[Any], num_threads: int
) -> None:
    bucket.fill(42)
    for options in ({}, {"drop_last": True}, {"batch_size": None}, {"batch_size": 100}):
        batches = build(kind, bucket, num_threads, **options)
        assert isinstance(batches, DataLoader)
        source = build(kind, bucket, **options)
        inline = DataLoader(
            source.dataset,
            batch_size=source.batch_size,
            sampler=source.sampler if kind is MapDataset else None,
            drop_last=source.drop_last,
        )
        expected = list(inline)
        assert list(batches) == expected
        assert list(batches) == expected, "a second iteration"


def test_samples_and_tensors(bucket: Bucket) -> None:
    keys = bucket.fill(5)
    samples = list(loader(MapDataset(bucket.uri), batch_size=3, num_threads=2))
    assert [[sample.key for sample in batch] for batch in samples] == [keys[:3], keys[3:]]
    dataset = IterableDataset(bucket.uri, transform=lambda sample: torch.tensor(int(sample.key)))
    numbers = list(loader(dataset, batch_size=3, num_threads=2))
    assert [batch.tolist() for batch in numbers] == [[0, 1, 2], [3, 4]]


@pytest.mark.parametrize("kind", KINDS)
def test_a_slow_sample_keeps_its_place(bucket: Bucket, kind: type[Any]) -> None:
    keys, others = bucket.fill(6), threading.Event()

    def hold_first(sample: Sample) -> str:
        if sample.key == keys[0]:
            assert others.wait(60)
        elif sample.key == keys[2]:
            others.set()
        return sample.key

    batches = loader(kind(bucket.uri, transform=hold_first), batch_size=None, num_threads=2)
    assert list(batches) == keys


@pytest.mark.parametrize("num_threads", [1, 3])
@pytest.mark.parametrize("kind", KINDS)
def test_a_batch_is_not_collated_after_later_transforms(
    bucket: Bucket, kind: type[Any], num_threads: int
) -> None:
    keys, is_received = bucket.fill(20), threading.Event()

    def hold_others(sample: Sample) -> str:
        assert sample.key == keys[0] or is_received.wait(60)
        return sample.key

    batches = loader(kind(bucket.uri, transform=hold_others), num_threads=num_threads)
    for number, batch in enumerate(batches):
        is_received.set()
        assert batch == [keys[number]]
    assert number == 19


@pytest.mark.parametrize("num_threads", [0, 3])
@pytest.mark.parametrize("kind", KINDS)
def test_a_state_after_any_batch_resumes_the_epoch(
    bucket: Bucket, kind: type[Any], num_threads: int
) -> None:
    keys = bucket.fill(42)
    whole = list(build(kind, bucket))
    for num_read in (0, 1, 5, 11):
        batches = build(kind, bucket, num_threads, prefetch_factor=None)
        with closing(iter(batches)) as stream:
            assert list(islice(stream, num_read)) == whole[:num_read]
            state = json.loads(json.dumps(batches.state_dict()))
        assert batches.state_dict() == state, "also after the end of the iteration"
        other = build(kind, bucket, 3 - num_threads)
        other.load_state_dict(state)
        assert list(other) == whole[num_read:]
        assert sorted(key for batch in other for key in batch) == keys, "the next epoch is whole"


@pytest.mark.parametrize("num_threads", [0, 2])
@pytest.mark.parametrize("kind", KINDS)
def test_an_iteration_is_planned_when_it_is_created(
    bucket: Bucket, kind: type[Any], num_threads: int
) -> None:
    """As in a DataLoader: neither a new epoch nor a new state changes it before its first batch."""
    bucket.fill(12)
    batches = build(kind, bucket, num_threads)
    order = batches.sampler if kind is MapDataset else batches.dataset
    expected = list(batches)
    with closing(iter(batches)) as stream:
        order.set_epoch(1)
        assert batches.state_dict()["epoch"] == 0
        assert list(stream) == expected
    assert list(batches) != expected


@pytest.mark.parametrize("kind", KINDS)
def test_the_state_of_a_loader_with_workers_continues_in_threads(
    bucket: Bucket, kind: type[Any]
) -> None:
    pytest.importorskip("torchdata")
    keys = bucket.fill(42)
    options = {"num_workers": 0, "resumable": True}
    batches = build(kind, bucket, None, **options)
    read = list(islice(stream := iter(batches), 5))
    state = json.loads(json.dumps(batches.state_dict()))
    other = build(kind, bucket, 2)
    other.load_state_dict(state)
    read += list(other)
    assert sorted(key for batch in read for key in batch) == keys
    del stream


@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
@pytest.mark.parametrize("num_workers", [0, 2])
@pytest.mark.parametrize("kind", KINDS)
def test_the_state_of_threads_continues_in_a_resumable_loader(
    bucket: Bucket, kind: type[Any], num_workers: int
) -> None:
    """A state of that loader continues in another one."""
    pytest.importorskip("torchdata")
    keys = bucket.fill(42)
    batches = build(kind, bucket, 2)
    with closing(iter(batches)) as stream:
        read = list(islice(stream, 4))
    options = {"num_workers": num_workers, "resumable": True, "start_method": None}
    for num_read in (3, 100):
        state = json.loads(json.dumps(batches.state_dict()))
        batches = build(kind, bucket, None, **options)
        batches.load_state_dict(state)
        read += islice(batches, num_read)
    assert sorted(key for batch in read for key in batch) == keys


@pytest.mark.parametrize("buffer", [0, 8])
def test_records_in_order_and_read_once_after_a_resume(bucket: Bucket, buffer: int) -> None:
    """Also those in the shuffle buffer, in threads, and in batches that nobody received."""
    for number in range(6):
        bucket.put(f"{number}", b"".join(b"%d-%02d\n" % (number, row) for row in range(15)))

    def make() -> IterableDataset[str]:
        return IterableDataset(
            bucket.uri, records=lines_of, transform=str.upper, shuffle_buffer=buffer
        )

    inline = list(loader(make(), batch_size=4, num_workers=0))
    assert list(loader(make(), batch_size=4, num_threads=3)) == inline
    for num_read in (1, 9, 15):
        batches: Any = loader(make(), batch_size=4, num_threads=3)
        with closing(iter(batches)) as stream:
            read = list(islice(stream, num_read))
            state = json.loads(json.dumps(merge_states([batches.state_dict()])))
        assert read == inline[:num_read]
        other: Any = loader(make(), batch_size=4, num_threads=2)
        other.load_state_dict(state)
        rest = list(other)
        if not buffer:
            assert read + rest == inline
        assert sorted(chain(*read, *rest)) == sorted(chain(*inline))


@pytest.mark.parametrize("kind", KINDS)
def test_each_epoch_has_its_own_order(bucket: Bucket, kind: type[Any]) -> None:
    keys = bucket.fill(30)
    batches = build(kind, bucket, batch_size=None)
    epochs = []
    for epoch in (0, 1, 0):
        (batches.sampler if kind is MapDataset else batches.dataset).set_epoch(epoch)
        epochs.append(list(batches))
    assert epochs[0] == epochs[2] != epochs[1]
    assert [sorted(read) for read in epochs] == [keys] * 3


@pytest.mark.parametrize("kind", KINDS)
def test_ranks_share_the_objects(
    bucket: Bucket, kind: type[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    keys = bucket.fill(22)
    monkeypatch.setenv("WORLD_SIZE", "2")
    shares = []
    for rank in ("0", "1"):
        monkeypatch.setenv("RANK", rank)
        shares.append(list(build(kind, bucket, batch_size=None)))
    assert [len(share) for share in shares] == [11, 11]
    assert sorted(shares[0] + shares[1]) == keys


@pytest.mark.parametrize("num_threads", [0, 2])
@pytest.mark.parametrize("kind", KINDS)
def test_an_error_is_raised_in_its_batch_and_names_the_sample(
    bucket: Bucket, kind: type[Any], num_threads: int
) -> None:
    keys = bucket.fill(20)

    def refuse_tenth(sample: Sample) -> str:
        if sample.key == keys[10]:
            raise StopIteration if kind is MapDataset else ArithmeticError("no such number")
        return sample.key

    dataset = kind(bucket.uri, transform=refuse_tenth)
    read: list[str] = []
    with pytest.raises((ArithmeticError, RuntimeError)) as caught:
        read_all(loader(dataset, batch_size=4, num_threads=num_threads), read)
    assert read == keys[:8]
    assert keys[10] in "".join([str(caught.value), *getattr(caught.value, "__notes__", [])])


@pytest.mark.parametrize("kind", KINDS)
def test_an_object_that_is_gone_is_an_error_at_its_place(bucket: Bucket, kind: type[Any]) -> None:
    keys = bucket.fill(20)
    dataset = kind(bucket.uri, transform=key_of)
    with aioflux.sync.open_store(bucket.uri) as store:
        store.delete(keys[10])
    read: list[str] = []
    with pytest.raises(NotFoundError) as caught:
        read_all(loader(dataset, batch_size=4, num_threads=2), read)
    assert read == keys[:8]
    assert caught.value.uri == f"{bucket.uri}/{keys[10]}"


@pytest.mark.parametrize("num_threads", [0, 2])
@pytest.mark.parametrize("kind", KINDS)
def test_skipped_samples_are_counted_as_inline(
    bucket: Bucket, kind: type[Any], num_threads: int
) -> None:
    """A batch of a MapDataset lacks them; a batch of a stream has the next samples instead."""
    keys = bucket.fill(12)
    seen: list[str] = []

    def note(error: Exception, uri: str) -> None:
        seen.append(uri)

    for on_error in ("skip", note):
        dataset = kind(bucket.uri, transform=refuse_odd, on_error=on_error)
        batches: Any = loader(dataset, batch_size=4, num_threads=num_threads)
        sizes = [2, 2, 2] if kind is MapDataset else [4, 2]
        read = list(batches)
        assert [len(batch) for batch in read] == sizes
        assert [key for batch in read for key in batch] == keys[::2]
        assert dataset.stats.num_skipped == 6
        assert dataset.stats.num_objects == 12
        rest = loader(kind(bucket.uri, transform=key_of), batch_size=4, num_threads=num_threads)
        rest.load_state_dict(batches.state_dict())  # type: ignore[attr-defined]
        assert list(rest) == [], "skipped samples were read, too"
    assert seen == [f"{bucket.uri}/{key}" for key in keys[1::2]]


def test_an_error_of_the_collate_function_is_raised(bucket: Bucket) -> None:
    bucket.fill(8)

    def refuse(items: list[Any]) -> Any:
        raise ArithmeticError("no batch")

    dataset = IterableDataset(bucket.uri, transform=key_of)
    with pytest.raises(ArithmeticError, match="no batch"):
        list(loader(dataset, batch_size=4, num_threads=2, collate_fn=refuse))


class Counter:
    """A transform that counts its calls, and waits for an event."""

    def __init__(self) -> None:
        self.num_begun = self.num_running = 0
        self.lock = threading.Lock()
        self.is_open = threading.Event()
        self.is_open.set()

    def __call__(self, sample: Sample) -> str:
        with self.lock:
            self.num_begun += 1
            self.num_running += 1
        assert self.is_open.wait(60)
        with self.lock:
            self.num_running -= 1
        return sample.key


@pytest.mark.parametrize("kind", KINDS)
def test_a_slow_consumer_bounds_what_is_transformed(bucket: Bucket, kind: type[Any]) -> None:
    bucket.fill(200)
    counter, num_read = Counter(), 0
    batches = loader(
        kind(bucket.uri, transform=counter), batch_size=5, num_threads=2, prefetch_factor=3
    )
    for batch in batches:
        num_read += len(batch)
        time.sleep(0.005)
        # Three batches that are finished, and four samples for each thread.
        assert counter.num_begun <= num_read + 3 * 5 + 4 * 2
    assert num_read == counter.num_begun == 200


@pytest.mark.parametrize("kind", KINDS)
def test_bytes_that_wait_for_a_thread_are_bounded(bucket: Bucket, kind: type[Any]) -> None:
    for number in range(12):
        bucket.put(f"{number:02}", b"x" * 1000)
    counter, most_running = Counter(), 0

    def transform(sample: Sample) -> str:
        nonlocal most_running
        with counter.lock:
            counter.num_running += 1
            most_running = max(most_running, counter.num_running)
        time.sleep(0.01)
        with counter.lock:
            counter.num_running -= 1
        return sample.key

    transfer = aioflux.TransferOptions(max_in_flight_bytes=3500)
    dataset = kind(bucket.uri, transform=transform, transfer=transfer)
    assert len(list(loader(dataset, batch_size=None, num_threads=8))) == 12
    assert most_running <= 4


@pytest.mark.parametrize("kind", KINDS)
def test_leaving_the_iteration_early_waits_only_for_running_transforms(
    bucket: Bucket, kind: type[Any]
) -> None:
    keys, counter = bucket.fill(300), Counter()
    dataset = kind(bucket.uri, transform=counter)
    for batch in loader(dataset, batch_size=4, num_threads=2):
        assert list(batch) == keys[:4]
        break
    assert threads() == []
    assert counter.num_running == 0
    assert counter.num_begun < 100


@pytest.mark.parametrize("kind", KINDS)
def test_leaving_the_iteration_cancels_a_read_that_waits(bucket: Bucket, kind: type[Any]) -> None:
    keys = bucket.fill(40)
    bucket.server.faults.add("objects.media", key=f"train/{keys[20]}", delay_seconds=3600.0)
    timeouts = aioflux.Timeouts(
        progress_seconds=FAR_SECONDS, idle_seconds=FAR_SECONDS, cleanup=PATIENT_CLEANUP
    )
    dataset = kind(bucket.uri, transform=key_of, timeouts=timeouts)
    stream = iter(loader(dataset, batch_size=2, num_threads=2))
    assert list(next(stream)) == keys[:2]
    begun = time.monotonic()
    stream.close()  # type: ignore[attr-defined]
    assert time.monotonic() - begun < MOST_SECONDS
    assert dataset._source._stores[0].reader.store.stats.num_in_flight == 0


SCRIPT = """
import threading, time
from aioflux.data import IterableDataset, MapDataset, loader

def threads():
    names = (thread.name for thread in threading.enumerate())
    return [name for name in names if name.startswith(("aioflux-batches", "aioflux-transform"))]

dataset = {"map": MapDataset, "iterable": IterableDataset}[sys.argv[2]](
    "gs://bucket/train", transform=lambda sample: sample.key, **settings
)
batches = loader(dataset, batch_size=4, num_threads=2)
"""
INTERRUPTED = """
say("built")
try:
    for batch in batches:
        say(len(batch))
except KeyboardInterrupt:
    say(threads())
"""
FORKED = """
stream = iter(batches)
first = next(stream)
warnings.simplefilter("ignore", DeprecationWarning)  # of a fork beside threads
if not (child := os.fork()):
    try:
        next(stream)
    except RuntimeError as exc:
        say("open it again" in str(exc))
    say(sum(len(batch) for batch in batches), threads())
    os._exit(0)
os.waitpid(child, 0)
say(len(first) + sum(len(batch) for batch in stream))
abandoned = iter(batches)
next(abandoned)  # the process ends nevertheless
"""


@pytest.mark.timeout(300)
@pytest.mark.parametrize("kind", ["map", "iterable"])
def test_ctrl_c_leaves_no_thread(bucket: Bucket, kind: str) -> None:
    keys = bucket.fill(40)
    bucket.server.faults.add("objects.media", key=f"train/{keys[20]}", delay_seconds=3600.0)
    with running(SCRIPT + INTERRUPTED, bucket.server, kind) as process:
        assert line(process) == "built"
        assert line(process) == "4"
        process.send_signal(2)
        assert finish(process)[-1].endswith("[]")  # after a line that Ctrl-C has cut short


@pytest.mark.timeout(300)
@pytest.mark.parametrize("kind", ["map", "iterable"])
def test_parent_and_forked_child_both_iterate(bucket: Bucket, kind: str) -> None:
    bucket.fill(40)
    with running(SCRIPT + FORKED, bucket.server, kind) as process:
        assert finish(process) == ["True", "40 []", "40"]


def test_settings_without_effect_are_rejected(bucket: Bucket) -> None:
    bucket.fill(1)
    dataset = IterableDataset(bucket.uri)
    for options in ({"num_workers": 2}, {"start_method": "fork"}):
        with pytest.raises(ValueError, match="no effect with num_threads"):
            loader(dataset, num_threads=2, **options)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="num_threads must be 0 or more, not -1"):
        loader(dataset, num_threads=-1)
    for value in ("2", 2.5, True):
        with pytest.raises(TypeError, match=f"num_threads must be an int, not {value!r}"):
            loader(dataset, num_threads=value)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="prefetch_factor must be 1 or more, not 0"):
        loader(dataset, num_threads=1, prefetch_factor=0)
    with pytest.raises(ValueError, match="no effect with num_threads=0"):
        loader(dataset, num_threads=0, prefetch_factor=2)


EXIT = """
import sys, threading, time
from aioflux.data import IterableDataset, MapDataset, loader

kind, uri = {"MapDataset": MapDataset, "IterableDataset": IterableDataset}[sys.argv[1]], sys.argv[2]
batches = loader(kind(uri, transform=lambda sample: 1), batch_size=8, num_threads=2)
started = threading.Event()

def read():
    for _ in batches:
        started.set()

threading.Thread(target=read, daemon=True).start()
started.wait()
"""


@pytest.mark.parametrize("kind", ["MapDataset", "IterableDataset"])
def test_a_daemon_thread_that_iterates_at_exit_prints_nothing(tmp_path: Path, kind: str) -> None:
    for number in range(4000):
        (tmp_path / f"{number:04d}").write_bytes(b"1")
    command = [sys.executable, "-c", EXIT, kind, f"file://{tmp_path}"]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=FAR_SECONDS)
    assert (ended.returncode, ended.stderr) == (0, "")

"""Cache: it returns the stored bytes, within its bound, with any writers, deaths and damage."""

from __future__ import annotations

import multiprocessing
import os
import pickle
import resource
import signal
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import google_crc32c
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

import aioflux
from aioflux.data._cache.cache import Cache

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    Damage = Callable[[Path], None]

pytestmark = pytest.mark.filterwarnings(
    "ignore:This process .* is multi-threaded:DeprecationWarning"
)

FOOTER_BYTES = 20


def meta_of(key: str, data: bytes, *, generation: str = "1") -> aioflux.ObjectMeta:
    return aioflux.ObjectMeta(
        key=key,
        uri=f"gs://bucket/{key}",
        size=len(data),
        generation=generation,
        crc32c=google_crc32c.value(data),
    )


def stored(directory: Path) -> list[Path]:
    return sorted(path for path in (directory / "objects").rglob("*") if path.is_file())


def stored_bytes(directory: Path) -> int:
    return sum(path.stat().st_size for path in stored(directory))


def grow_old(directory: Path, seconds: float) -> None:
    """Let entries be as if so much more time had gone by since their last use."""
    for path in stored(directory):
        used = path.stat().st_mtime - seconds
        os.utime(path, (used, used))


def test_stored_bytes_are_returned(tmp_path: Path) -> None:
    cache, meta = Cache(tmp_path / "cache", max_bytes=1000), meta_of("a", b"data")
    assert cache.get(meta) is None
    assert cache.put(meta, b"data")
    assert cache.get(meta) == b"data"


@pytest.mark.parametrize("kind", [bytearray, memoryview])
def test_any_memory_is_kept(tmp_path: Path, kind: type[bytearray]) -> None:
    cache, meta = Cache(tmp_path, max_bytes=1000), meta_of("a", b"data")
    assert cache.put(meta, kind(b"data"))
    assert cache.get(meta) == b"data"


def test_an_empty_object_is_kept(tmp_path: Path) -> None:
    cache, meta = Cache(tmp_path, max_bytes=1000), meta_of("a", b"")
    assert cache.put(meta, b"")
    assert cache.get(meta) == b""


def test_a_later_run_finds_what_an_earlier_one_kept(tmp_path: Path) -> None:
    Cache(tmp_path, max_bytes=1000).put(meta_of("a", b"data"), b"data")
    assert Cache(tmp_path, max_bytes=1000).get(meta_of("a", b"data")) == b"data"


def test_another_generation_is_another_object(tmp_path: Path) -> None:
    cache = Cache(tmp_path, max_bytes=1000)
    cache.put(meta_of("a", b"old"), b"old")
    assert cache.get(meta_of("a", b"new", generation="2")) is None


def test_objects_without_generation_etag_and_checksum_are_not_kept(tmp_path: Path) -> None:
    cache, meta = Cache(tmp_path, max_bytes=1000), meta_of("a", b"data", generation="")
    unknown = replace(meta, crc32c=None)
    assert not cache.put(unknown, b"data")
    assert cache.get(unknown) is None
    assert cache.put(meta, b"data")
    assert cache.get(meta) == b"data"
    assert cache.get(meta_of("a", b"dbta", generation="")) is None


def test_an_object_larger_than_the_bound_is_not_kept(tmp_path: Path) -> None:
    cache, meta = Cache(tmp_path, max_bytes=100), meta_of("a", b"x" * 100)
    assert not cache.put(meta, b"x" * 100)
    assert stored(tmp_path) == []


@pytest.mark.parametrize("data", [b"dat", b"dota"], ids=["short", "wrong"])
def test_bytes_that_are_not_the_object_are_rejected(tmp_path: Path, data: bytes) -> None:
    cache = Cache(tmp_path, max_bytes=1000)
    with pytest.raises(aioflux.ChecksumError, match="gs://bucket/a is not cached"):
        cache.put(meta_of("a", b"data"), data)
    assert stored(tmp_path) == []


def test_a_bound_of_zero_is_rejected(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="max_bytes of a cache must be above 0, not 0"):
        Cache(tmp_path, max_bytes=0)


def test_a_pickle_opens_the_same_cache(tmp_path: Path) -> None:
    cache = Cache(tmp_path, max_bytes=1000)
    cache.put(meta_of("a", b"data"), b"data")
    other = pickle.loads(pickle.dumps(cache))
    assert other.max_bytes == 1000
    assert other.get(meta_of("a", b"data")) == b"data"


def test_the_least_recently_used_goes_first(tmp_path: Path) -> None:
    data = b"x" * (100 - FOOTER_BYTES)
    cache = Cache(tmp_path, max_bytes=400)
    metas = [meta_of(str(number), data) for number in range(5)]
    for meta in metas[:4]:
        assert cache.put(meta, data)
        grow_old(tmp_path, 60)
    assert cache.get(metas[0]) == data
    assert cache.put(metas[4], data)
    assert [cache.get(meta) is not None for meta in metas] == [True, False, True, True, True]


def test_a_use_updates_the_time_of_entries_that_are_seconds_old(tmp_path: Path) -> None:
    """To note each would cost every hit a system call."""
    cache, meta = Cache(tmp_path, max_bytes=1000), meta_of("a", b"data")
    cache.put(meta, b"data")
    grow_old(tmp_path, -60)  # young for as long as this takes
    stored_at = stored(tmp_path)[0].stat().st_mtime_ns
    assert cache.get(meta) == b"data"
    assert stored(tmp_path)[0].stat().st_mtime_ns == stored_at
    grow_old(tmp_path, 3600)
    begun = time.time()
    assert cache.get(meta) == b"data"
    assert stored(tmp_path)[0].stat().st_mtime >= begun - 1


def test_an_eviction_makes_room_for_several(tmp_path: Path) -> None:
    """Each looks at all entries: one for every object that comes would be dear."""
    data = b"x" * (10 - 1)
    cache = Cache(tmp_path, max_bytes=100 * (FOOTER_BYTES + len(data)))
    counts = []
    for number in range(109):
        assert cache.put(meta_of(str(number), data), data)
        if number >= 99:
            counts.append(len(stored(tmp_path)))
    assert counts == [100, *range(91, 100)]


def test_reservations_stay_within_the_bound(tmp_path: Path) -> None:
    data, max_bytes = b"x", 1 << 15
    for run in range(2):
        cache = Cache(tmp_path, max_bytes=max_bytes)
        for number in range(1000):
            assert cache.put(meta_of(f"{run}-{number}", data), data)
    assert max_bytes * 0.85 < stored_bytes(tmp_path) <= max_bytes


@pytest.mark.parametrize("size", [0, 1, (1 << 18) - 1, 1 << 18, (1 << 18) + 1, 1 << 20])
def test_any_size_is_returned_whole_and_damage_is_detected(tmp_path: Path, size: int) -> None:
    cache, data = Cache(tmp_path, max_bytes=1 << 21), b"x" * size
    meta = meta_of("a", data)
    cache.put(meta, data)
    assert cache.get(meta) == data
    damage_tail(stored(tmp_path)[0])
    assert cache.get(meta) is None


def test_other_files_in_the_directory_stay(tmp_path: Path) -> None:
    (tmp_path / "mine").write_bytes(b"x" * 1000)
    cache = Cache(tmp_path, max_bytes=100)
    for number in range(10):
        cache.put(meta_of(str(number), b"data"), b"data")
    assert (tmp_path / "mine").exists()


def damage_byte(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[0] ^= 1
    path.write_bytes(content)


def damage_size(path: Path) -> None:
    os.truncate(path, path.stat().st_size - 1)


def damage_whole(path: Path) -> None:
    os.truncate(path, 3)


def damage_tail(path: Path) -> None:
    path.write_bytes(path.read_bytes() + b"?")


def damage_magic(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[-FOOTER_BYTES] ^= 1
    path.write_bytes(content)


def damage_checksum(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)


DAMAGES = [damage_byte, damage_size, damage_whole, damage_tail]


@pytest.mark.parametrize(
    ("damage", "has_checksum"),
    [(damage, has) for damage in DAMAGES for has in (True, False)]
    + [(damage_magic, False), (damage_checksum, False)],
)
def test_a_damaged_entry_is_removed_logged_and_stored_anew(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, damage: Damage, has_checksum: bool
) -> None:
    """Some services have no checksum of an object; then that of the entry decides."""
    cache, meta = Cache(tmp_path, max_bytes=1000), meta_of("a", b"data")
    if not has_checksum:
        meta = replace(meta, crc32c=None)
    cache.put(meta, b"data")
    damage(stored(tmp_path)[0])
    assert cache.get(meta) is None
    assert "the cached copy of gs://bucket/a is damaged" in caplog.text
    assert stored(tmp_path) == []
    assert cache.put(meta, b"data")
    assert cache.get(meta) == b"data"


def test_the_same_name_on_another_service_is_another_object(tmp_path: Path) -> None:
    """Two test servers both begin to count generations at 1."""
    cache = Cache(tmp_path, max_bytes=1000)
    cache.put(meta_of("a", b"here"), b"here")
    assert cache.get(meta_of("a", b"else")) is None


def test_a_directory_that_was_removed_is_made_again(tmp_path: Path) -> None:
    cache = Cache(tmp_path / "cache", max_bytes=1000)
    cache.put(meta_of("a", b"data"), b"data")
    (tmp_path / "cache").rename(tmp_path / "away")
    assert cache.get(meta_of("a", b"data")) is None
    assert cache.put(meta_of("a", b"data"), b"data")
    assert cache.get(meta_of("a", b"data")) == b"data"


def test_unfinished_entries_of_dead_processes_are_deleted(tmp_path: Path) -> None:
    cache = Cache(tmp_path, max_bytes=1000)
    old, young = tmp_path / "objects" / "00" / "~old", tmp_path / "objects" / "00" / "~young"
    old.write_bytes(b"torn")
    young.write_bytes(b"torn")
    long_ago = time.time() - 3600
    os.utime(old, (long_ago, long_ago))
    cache.put(meta_of("a", b"data"), b"data")
    assert not old.exists()
    assert young.exists()


@contextmanager
def limited_files(num_bytes: int) -> Iterator[None]:
    """Let writes beyond some size of a file fail, as on a full disk, without a signal.

    Not as a fixture: what pytest itself writes before it ends those would fail as well.
    """
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        signal.signal(signal.SIGXFSZ, handler)


def test_a_full_disk_is_logged_and_not_fatal(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    cache, data = Cache(tmp_path, max_bytes=100_000), b"x" * 5000
    with limited_files(4096):
        cache.put(meta_of("small", b"data"), b"data")
        assert not cache.put(meta_of("a", data), data)
    assert "stores nothing for the next 30 seconds" in caplog.text
    assert len(stored(tmp_path)) == 1
    caplog.clear()
    assert not cache.put(meta_of("b", b"data"), b"data")
    assert caplog.text == ""
    assert cache.get(meta_of("small", b"data")) == b"data"


def entry_of(directory: Path, meta: aioflux.ObjectMeta, data: bytes) -> Path:
    """Return the place of an entry, which is empty again."""
    Cache(directory, max_bytes=1000).put(meta, data)
    (path,) = stored(directory)
    path.unlink()
    return path


def test_a_directory_in_the_place_of_an_entry_costs_this_entry_alone(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    meta = meta_of("a", b"data")
    entry_of(tmp_path, meta, b"data").mkdir()
    cache = Cache(tmp_path, max_bytes=1000)
    for _ in range(3):
        assert cache.get(meta) is None
        assert not cache.put(meta, b"data")
    assert [record.getMessage() for record in caplog.records] == [
        message for message in caplog.messages if "remove the file or directory" in message
    ]
    assert len(caplog.records) == 1
    assert cache.put(meta_of("b", b"more"), b"more")
    assert cache.get(meta_of("b", b"more")) == b"more"


def test_a_directory_among_entries_stops_no_eviction(tmp_path: Path) -> None:
    data = b"x" * (100 - FOOTER_BYTES)
    entry_of(tmp_path, meta_of("a", b"data"), b"data").mkdir()
    grow_old(tmp_path, 60)
    cache = Cache(tmp_path, max_bytes=300)
    for number in range(10):
        assert cache.put(meta_of(str(number), data), data)
    assert stored_bytes(tmp_path) <= 300


def make_pipe(path: Path) -> None:
    os.mkfifo(path)


def make_link_to_nothing(path: Path) -> None:
    path.symlink_to(path.parent / "nothing")


def make_link_to_itself(path: Path) -> None:
    path.symlink_to(path)


@pytest.mark.parametrize("make", [make_pipe, make_link_to_nothing, make_link_to_itself])
def test_a_special_file_in_the_place_of_an_entry_is_replaced(tmp_path: Path, make: Damage) -> None:
    """A pipe is not waited for."""
    meta = meta_of("a", b"data")
    make(entry_of(tmp_path, meta, b"data"))
    cache = Cache(tmp_path, max_bytes=1000)
    assert cache.get(meta) is None
    assert cache.put(meta, b"data")
    assert cache.get(meta) == b"data"


def test_a_file_in_the_place_of_a_directory_of_entries_costs_these_alone(tmp_path: Path) -> None:
    meta = meta_of("a", b"data")
    parent = entry_of(tmp_path, meta, b"data").parent
    parent.rmdir()
    parent.write_bytes(b"mine")
    cache = Cache(tmp_path, max_bytes=1000)
    assert cache.get(meta) is None
    assert not cache.put(meta, b"data")
    assert cache.put(meta_of("b", b"more"), b"more")
    assert parent.read_bytes() == b"mine"


def test_many_occupied_paths_pause_the_cache(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Otherwise there would be a warning for each of a million objects."""
    cache = Cache(tmp_path, max_bytes=100_000)
    cache.put(meta_of("a", b"data"), b"data")
    (tmp_path / "objects").rename(tmp_path / "away")
    (tmp_path / "objects").write_bytes(b"mine")
    for number in range(100):
        assert cache.get(meta_of(str(number), b"data")) is None
        assert not cache.put(meta_of(str(number), b"data"), b"data")
    assert "stores nothing for the next 30 seconds" in caplog.text
    assert len(caplog.records) < 100


def test_a_partly_written_change_spoils_no_later_one(
    tmp_path: Path,
) -> None:
    cache = Cache(tmp_path, max_bytes=2000)
    with limited_files(20):  # two changes of the ledger and a half; or an entry of nothing
        for number in range(20):
            cache.put(meta_of(str(number), b""), b"")
            assert (tmp_path / "ledger").stat().st_size % 8 == 0
    assert len(stored(tmp_path)) == 20


@pytest.fixture
def quick_switches() -> Iterator[None]:
    """Let threads take turns as often as can be."""
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(interval)


def test_threads_share_a_cache(
    tmp_path: Path, quick_switches: None, caplog: pytest.LogCaptureFixture
) -> None:
    """One must not close the ledger that another is about to write to."""
    data, max_bytes = b"x" * (100 - FOOTER_BYTES), 1000
    cache = Cache(tmp_path, max_bytes=max_bytes)

    def work(seed: int) -> bool:
        kept = [cache.put(meta_of(f"{seed}-{number}", data), data) for number in range(25)]
        return all(kept)

    with ThreadPoolExecutor(6) as threads:
        assert all(threads.map(work, range(6)))
    assert caplog.text == ""
    # As many as threads may have been about to be written when the last eviction looked.
    assert 0 < stored_bytes(tmp_path) <= max_bytes + 6 * 100


def test_a_child_does_not_wait_for_a_lock_held_at_the_fork(tmp_path: Path) -> None:
    cache, context = Cache(tmp_path, max_bytes=1000), multiprocessing.get_context("fork")

    def work() -> None:
        os._exit(0 if cache.put(meta_of("a", b"data"), b"data") else 1)

    process = context.Process(target=work)
    with cache._locked_ledger():
        process.start()
        process.join(100)
    is_alive = process.is_alive()
    process.kill()
    process.join()
    assert not is_alive
    assert process.exitcode == 0


OBJECTS = {key: key.encode() * (20 + 7 * number) for number, key in enumerate("abcdefgh")}


class CacheMachine(RuleBasedStateMachine):
    """Several caches on one directory, against what was put."""

    @initialize(max_bytes=st.integers(100, 600))
    def begin(self, max_bytes: int) -> None:
        self.room = tempfile.TemporaryDirectory()
        self.directory = Path(self.room.name)
        self.max_bytes = max_bytes
        self.caches = [Cache(self.directory, max_bytes=max_bytes) for _ in range(3)]

    def teardown(self) -> None:
        self.room.cleanup()

    @rule(which=st.integers(0, 2), key=st.sampled_from(sorted(OBJECTS)))
    def put(self, which: int, key: str) -> None:
        data = OBJECTS[key]
        fits = FOOTER_BYTES + len(data) <= self.max_bytes
        assert self.caches[which].put(meta_of(key, data), data) is fits
        assert (self.caches[which].get(meta_of(key, data)) == data) is fits

    @rule(which=st.integers(0, 2), key=st.sampled_from(sorted(OBJECTS)))
    def get(self, which: int, key: str) -> None:
        assert self.caches[which].get(meta_of(key, OBJECTS[key])) in (None, OBJECTS[key])

    @rule(which=st.integers(0, 2))
    def reopen(self, which: int) -> None:
        self.caches[which] = pickle.loads(pickle.dumps(self.caches[which]))

    @rule(data=st.data())
    def damage(self, data: st.DataObject) -> None:
        if paths := [path for path in stored(self.directory) if path.stat().st_size]:
            path = data.draw(st.sampled_from(paths))
            os.truncate(path, data.draw(st.integers(0, path.stat().st_size - 1)))

    @invariant()
    def keeps_to_the_bound(self) -> None:
        if hasattr(self, "directory"):
            assert stored_bytes(self.directory) <= self.max_bytes


CacheMachine.TestCase.settings = settings(
    max_examples=20,
    stateful_step_count=20,
    deadline=None,
)
TestCacheMachine = CacheMachine.TestCase


def content_of(number: int) -> bytes:
    return str(number).encode() * 400


def churn(directory: Path, max_bytes: int, seed: int, num_turns: int) -> None:
    """Read and keep objects as a worker does; end with status 1 where one is wrong."""
    cache = Cache(directory, max_bytes=max_bytes)
    state = seed
    for _ in range(num_turns):
        state = (state * 1103515245 + 12345) % 2**31
        number = state % 300
        data = content_of(number)
        found = cache.get(meta_of(str(number), data))
        if found is None:
            cache.put(meta_of(str(number), data), data)
        elif found != data:
            os._exit(1)
    os._exit(0)


def test_processes_together_stay_near_the_bound(tmp_path: Path) -> None:
    max_bytes, num_workers, context = 50_000, 4, multiprocessing.get_context("fork")
    workers = [
        context.Process(target=churn, args=(tmp_path, max_bytes, seed, 10**9))
        for seed in range(num_workers)
    ]
    for worker in workers:
        worker.start()
    while not stopped_bytes(tmp_path):  # a slow machine takes its time to fork
        time.sleep(0.01)
    sizes = []
    for _ in range(15):
        time.sleep(0.03)
        for worker in workers:
            os.kill(worker.pid, signal.SIGSTOP)
        sizes.append(stopped_bytes(tmp_path))
        for worker in workers:
            os.kill(worker.pid, signal.SIGCONT)
    assert [worker.is_alive() for worker in workers] == [True] * num_workers
    for worker in workers:
        worker.kill()
        worker.join()
    # An eviction may miss two objects of each other process: one that is written while it measures,
    # and one that is reserved between its last sum and the new ledger.
    missed = 2 * (FOOTER_BYTES + len(content_of(299)) + max_bytes // 1024)
    assert 0 < max(sizes) <= max_bytes + (num_workers - 1) * missed


def stopped_bytes(directory: Path) -> int:
    """Sizes of the entries; a process that is stopping may still finish one."""
    total = 0
    for path in (directory / "objects").glob("*/[!~]*"):
        with suppress(FileNotFoundError):
            total += path.stat().st_size
    return total


def test_a_later_process_does_not_look_at_all_entries(tmp_path: Path) -> None:
    """The ledger says what they take; to look would cost seconds where there are a million."""
    Cache(tmp_path, max_bytes=1000).put(meta_of("a", b"data"), b"data")
    unknown = tmp_path / "objects" / "00" / "unknown"
    unknown.write_bytes(b"x" * 900)
    cache = Cache(tmp_path, max_bytes=1000)
    assert cache.put(meta_of("b", b"more"), b"more")
    assert unknown.exists()
    # One that is lost is made anew from what is there.
    (tmp_path / "ledger").unlink()
    os.utime(unknown, (0, 0))
    assert Cache(tmp_path, max_bytes=1000).put(meta_of("c", b"x" * 50), b"x" * 50)
    assert not unknown.exists()


def test_a_kill_at_any_moment_leaves_a_cache_that_is_right(tmp_path: Path) -> None:
    """Each of the killed goes on with what those before it left."""
    context = multiprocessing.get_context("fork")
    for seed in range(6):
        process = context.Process(target=churn, args=(tmp_path, 50_000, seed, 10**9))
        process.start()
        time.sleep(0.01 + 0.014 * seed)
        process.kill()
        process.join()
        assert process.exitcode == -signal.SIGKILL
        cache = Cache(tmp_path, max_bytes=50_000)
        for number in range(300):
            data = content_of(number)
            assert cache.get(meta_of(str(number), data)) in (None, data)
    assert cache.put(meta_of("after", b"data"), b"data")
    assert cache.get(meta_of("after", b"data")) == b"data"
    assert stored_bytes(tmp_path) <= 50_000


def test_no_process_waits_for_the_lock(tmp_path: Path) -> None:
    """A process that is stopped in the middle of an eviction, for ever."""
    script = (
        "import fcntl, os, sys\n"
        "file = os.open(sys.argv[1], os.O_RDWR | os.O_CREAT)\n"
        "fcntl.lockf(file, fcntl.LOCK_EX)\n"
        "print('held', flush=True)\n"
        "sys.stdin.read()\n"
    )
    data = b"x" * (100 - FOOTER_BYTES)
    cache = Cache(tmp_path, max_bytes=200)
    with subprocess.Popen(
        [sys.executable, "-c", script, str(tmp_path / "lock")],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    ) as holder:
        assert holder.stdout.readline() == b"held\n"
        kept = [cache.put(meta_of(key, data), data) for key in "abc"]
        holder.stdin.close()
    assert kept == [True, True, False]
    assert cache.put(meta_of("c", data), data)
    assert stored_bytes(tmp_path) <= 200


def test_forked_workers_share_what_the_parent_opened(tmp_path: Path) -> None:
    cache, context = Cache(tmp_path, max_bytes=100_000), multiprocessing.get_context("fork")
    cache.put(meta_of("a", b"data"), b"data")

    def work() -> None:
        found = cache.get(meta_of("a", b"data"))
        kept = cache.put(meta_of("b", b"more"), b"more")
        os._exit(0 if found == b"data" and kept else 1)

    process = context.Process(target=work)
    process.start()
    process.join()
    assert process.exitcode == 0
    assert cache.get(meta_of("b", b"more")) == b"more"

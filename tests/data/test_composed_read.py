"""Composed reads: permissions are checked at once, and `auto` measures."""

from __future__ import annotations

import os
import signal
from typing import TYPE_CHECKING

import pytest
from hypothesis import given
from hypothesis import strategies as st

from aioflux import PermissionDeniedError, sync
from aioflux.data import IterableDataset
from aioflux.data._composed_read import ComposeTrials, fetch_batches, prepare
from aioflux.store import COMPOSITE_PREFIX
from aioflux.testing.gcs_server import Network
from tests.bridge.scripts import finish, line, running, tell

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from tests.data.conftest import Bucket

CREATE, DELETE = "storage.objects.create", "storage.objects.delete"


@pytest.fixture
def store(bucket: Bucket) -> Iterator[sync.Store]:
    with sync.open_store(bucket.uri) as opened:
        yield opened


def num_composes(bucket: Bucket) -> int:
    return bucket.server.stats.operation("objects.compose").requests


def composites(bucket: Bucket) -> list[str]:
    return bucket.server.keys("bucket", f"train/{COMPOSITE_PREFIX}")


@pytest.mark.parametrize(
    "denied", [{CREATE}, {DELETE}, {CREATE, DELETE}], ids=["create", "delete", "both"]
)
def test_missing_permissions_are_named_at_once(
    bucket: Bucket, store: sync.Store, denied: set[str]
) -> None:
    bucket.server.state.denied_permissions |= denied
    assert store.missing_permissions([CREATE, DELETE]) == sorted(denied)
    with pytest.raises(PermissionDeniedError, match=" and ".join(sorted(denied))) as caught:
        prepare(store, "on")
    assert caught.value.uri == store.uri
    assert prepare(store, "auto") == "off"
    assert prepare(store, "off") == "off"


def test_permissions_that_may_not_be_queried(bucket: Bucket, store: sync.Store) -> None:
    with bucket.server.faults.inject("storage.buckets.testIamPermissions", status=403):
        assert prepare(store, "auto") == "off"
        with pytest.raises(PermissionDeniedError, match="gs://bucket"):
            prepare(store, "on")


def test_a_clean_up_without_permission_is_logged(
    bucket: Bucket, store: sync.Store, caplog: pytest.LogCaptureFixture
) -> None:
    with bucket.server.faults.inject("objects.list", status=403):
        assert prepare(store, "on") == "on"
    assert "are not deleted" in caplog.text


def test_without_composing_no_request_is_sent(bucket: Bucket, store: sync.Store) -> None:
    assert prepare(store, "off") == "off"
    assert not bucket.server.stats.operations


def test_a_service_that_cannot_compose_says_so(tmp_path: Path) -> None:
    with sync.open_store(tmp_path.as_uri()) as store:
        assert prepare(store, "auto") == "off"
        with pytest.raises(ValueError, match="cannot compose"):
            prepare(store, "on")
        with pytest.raises(ValueError, match="'yes'"):
            prepare(store, "yes")  # type: ignore[arg-type]


def test_orphaned_composites_are_deleted_below_the_own_prefix(
    bucket: Bucket, store: sync.Store, caplog: pytest.LogCaptureFixture
) -> None:
    own = f"train/{COMPOSITE_PREFIX}run/1"
    others = [f"{COMPOSITE_PREFIX}run/1", f"train2/{COMPOSITE_PREFIX}run/1", "train/a"]
    for key in (own, *others):
        bucket.server.put("bucket", key, b"1")
    assert prepare(store, "on") == "on"
    assert own in bucket.server.keys("bucket")  # of today
    with bucket.server.faults.inject("objects.delete", status=403):
        assert prepare(store, "on", older_than_seconds=0) == "on"
    assert "could not be deleted" in caplog.text
    # Who may not see uploads, may sweep composites.
    with bucket.server.faults.inject("xml.multipart.list", status=403):
        assert prepare(store, "auto", older_than_seconds=0) == "auto"
    assert bucket.server.keys("bucket") == sorted(others)


@pytest.mark.parametrize("compose", ["off", "on", "auto"])
@pytest.mark.parametrize("batch_size", [7, 1000])
def test_each_way_reads_the_same(
    bucket: Bucket, store: sync.Store, compose: str, batch_size: int
) -> None:
    keys = bucket.fill(70)
    metas = list(store.list_all())
    got = []
    for at in range(0, len(metas), batch_size):
        for batch in fetch_batches(store, metas[at : at + batch_size], compose=compose):
            got += batch
    assert got == [(meta, f"data of {key}".encode()) for meta, key in zip(metas, keys, strict=True)]
    # The first trial of "auto" takes up to 1024 objects, and reads directly.
    is_composed = compose == "on" or (compose == "auto" and batch_size == 7)
    assert bool(num_composes(bucket)) == is_composed
    assert composites(bucket) == []


def test_names_are_read_directly(bucket: Bucket, store: sync.Store) -> None:
    keys = bucket.fill(5)
    for compose in ("off", "auto"):
        batches = fetch_batches(store, keys, compose=compose)
        assert [meta.key for batch in batches for meta, _ in batch] == keys
    assert not num_composes(bucket)
    with pytest.raises(TypeError, match="ObjectMeta"):
        list(fetch_batches(store, keys, compose="on"))


RATES = st.lists(st.integers(1, 1000), min_size=2, max_size=2)


@given(direct=RATES, composed=RATES)
def test_the_better_trial_of_each_counts_and_a_tenth_is_chance(
    direct: list[int], composed: list[int]
) -> None:
    trials, left = ComposeTrials(), {"off": iter(direct), "on": iter(composed)}
    while (mode := trials.next_mode()) is not None:
        trials.add(mode, num_objects=next(left[mode]), seconds=1.0)
    assert trials.best_mode == ("on" if max(composed) > 1.1 * max(direct) else "off")


@pytest.mark.parametrize("is_slow", ["objects.compose", "objects.get"])
def test_auto_keeps_the_faster(bucket: Bucket, is_slow: str) -> None:
    """By a clock that goes on by a second with each request of the slow operation."""
    bucket.fill(400)

    def seconds() -> float:
        return bucket.server.stats.operation(is_slow).requests

    with sync.open_store(bucket.uri) as store:
        metas = list(store.list_all())
        for at in range(0, 200, 50):
            list(fetch_batches(store, metas[at : at + 50], compose="auto", clock=seconds))
        tried = num_composes(bucket)
        list(fetch_batches(store, metas[200:], compose="auto", clock=seconds))
    assert tried == 4
    assert (num_composes(bucket) > tried) == (is_slow == "objects.get")
    assert composites(bucket) == []


def test_auto_reads_directly_if_composing_is_rejected(
    bucket: Bucket, store: sync.Store, caplog: pytest.LogCaptureFixture
) -> None:
    keys = bucket.fill(60)
    with bucket.server.faults.inject("objects.compose", status=403):
        tried = []
        for _ in range(4):
            batches = fetch_batches(store, store.list_all(), compose="auto")
            assert [meta.key for batch in batches for meta, _ in batch] == keys
            tried.append(num_composes(bucket))
    assert tried == [0, 2, 2, 2]
    assert "read directly" in caplog.text


LOADING = """
import time
warnings.simplefilter("default")
warnings.filterwarnings("ignore", "This process .* is multi-threaded", DeprecationWarning)
from torch.utils.data import DataLoader, _utils
_utils.MP_STATUS_CHECK_INTERVAL = 600  # workers that end are not killed before they have
from aioflux.data import IterableDataset, MapDataset
options = {"transfer": aioflux.TransferOptions(max_in_flight=2), "compose": "on", **settings}
dataset = IterableDataset("gs://bucket/train", **options)
loader = DataLoader(dataset, batch_size=50, num_workers=2, collate_fn=list)
for batch in loader:
    break
say("left")
try:
    for number, batch in enumerate(loader):
        if number == 3:
            say("started")
        time.sleep(0.03)
except KeyboardInterrupt:
    say("interrupted")
sys.stdin.readline()
dataset = MapDataset("gs://bucket/train", **options)
loader = DataLoader(dataset, 50, num_workers=2, collate_fn=list, persistent_workers=True)
batches = iter(loader)
next(batches), next(batches), next(batches)
say("started")
raise SystemExit
"""


def test_workers_that_end_early_leave_no_composite(bucket: Bucket) -> None:
    """An iteration that is left; Ctrl-C, which every process of the terminal gets; and the end.

    At the end of the script multiprocessing terminates the workers: nothing has dropped the loader
    that keeps them alive.
    """
    bucket.fill(1500)
    bucket.server.network = Network(latency_seconds=0.01)
    with running(LOADING, bucket.server) as process:
        assert line(process) == "left"
        before = num_composes(bucket)
        assert line(process) == "started"
        assert num_composes(bucket) > before > 0
        os.killpg(process.pid, signal.SIGINT)
        assert line(process) == "interrupted"
        assert composites(bucket) == []
        before = num_composes(bucket)
        tell(process)
        assert line(process) == "started"
        assert num_composes(bucket) > before
        assert finish(process) == []
    assert composites(bucket) == []


def test_deleted_objects_can_be_skipped_and_are_counted(bucket: Bucket) -> None:
    """Of a group with one object that is gone, the others are not lost."""
    keys = bucket.fill(100)
    dataset = IterableDataset(bucket.uri, compose="on", on_error="skip")
    with bucket.server.state.lock:
        bucket.server.state.delete("bucket", "train/017")
    assert [sample.key for sample in dataset] == [key for key in keys if key != "017"]
    assert dataset.stats.num_skipped == 1
    assert composites(bucket) == []

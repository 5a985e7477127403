"""Composed reads: permissions are checked at once, and nothing is left behind."""

from __future__ import annotations

import os
import signal
from typing import TYPE_CHECKING

import pytest

from aioflux import PermissionDeniedError, sync
from aioflux.data import IterableDataset
from aioflux.data._store_reader import FetchConfig, StoreReader, prepare_composing
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
        prepare_composing(store)
    assert caught.value.uri == store.uri


def test_permissions_that_may_not_be_queried(bucket: Bucket, store: sync.Store) -> None:
    denied = bucket.server.faults.inject("storage.buckets.testIamPermissions", status=403)
    with denied, pytest.raises(PermissionDeniedError, match="gs://bucket"):
        prepare_composing(store)


def test_a_clean_up_without_permission_is_logged(
    bucket: Bucket, store: sync.Store, caplog: pytest.LogCaptureFixture
) -> None:
    with bucket.server.faults.inject("objects.list", status=403):
        prepare_composing(store)
    assert "are not deleted" in caplog.text


def test_a_service_that_cannot_compose_says_so(tmp_path: Path) -> None:
    with (
        sync.open_store(tmp_path.as_uri()) as store,
        pytest.raises(ValueError, match="cannot compose"),
    ):
        prepare_composing(store)
    with pytest.raises(ValueError, match="'auto'"):
        IterableDataset(tmp_path.as_uri(), compose="auto")  # type: ignore[arg-type]


def test_orphaned_composites_are_deleted_below_the_own_prefix(
    bucket: Bucket, store: sync.Store, caplog: pytest.LogCaptureFixture
) -> None:
    own = f"train/{COMPOSITE_PREFIX}run/1"
    others = [f"{COMPOSITE_PREFIX}run/1", f"train2/{COMPOSITE_PREFIX}run/1", "train/a"]
    for key in (own, *others):
        bucket.server.put("bucket", key, b"1")
    prepare_composing(store)
    assert own in bucket.server.keys("bucket")  # of today
    with bucket.server.faults.inject("objects.delete", status=403):
        prepare_composing(store, older_than_seconds=0)
    assert "could not be deleted" in caplog.text
    # Who may not see uploads, may sweep composites.
    with bucket.server.faults.inject("xml.multipart.list", status=403):
        prepare_composing(store, older_than_seconds=0)
    assert bucket.server.keys("bucket") == sorted(others)


@pytest.mark.parametrize("compose", ["off", "on"])
def test_each_way_reads_the_same(bucket: Bucket, store: sync.Store, compose: str) -> None:
    keys = bucket.fill(70)
    metas = list(store.list_all())
    reader = StoreReader(store, FetchConfig(compose=compose))
    got = [
        (sample.key, sample.data)
        for at in range(0, len(metas), 7)
        for sample in reader.read_batch(metas[at : at + 7])
    ]
    assert got == [(key, f"data of {key}".encode()) for key in keys]
    assert bool(num_composes(bucket)) == (compose == "on")
    assert composites(bucket) == []


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

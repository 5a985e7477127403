"""Three nodes: reads and writes while nodes, workers and drivers are killed."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import ray.data

from aioflux.data import parquet
from aioflux.errors import NotFoundError
from aioflux.integrations.ray import read_objects, write_objects
from aioflux.testing.gcs_server import Network
from tests.integrations.ray.cluster import quiet, three_nodes
from tests.patience import wait_until

if TYPE_CHECKING:
    from collections.abc import Iterator

    from aioflux import sync
    from aioflux.data import Sample
    from aioflux.testing import GCSServer
    from tests.integrations.ray.cluster import Nodes

pytestmark = pytest.mark.more
DATA = "out/data-"


@pytest.fixture(scope="module")
def running_nodes() -> Iterator[Nodes]:
    with three_nodes() as nodes:
        yield nodes


@pytest.fixture
def nodes(running_nodes: Nodes) -> Nodes:
    """Three nodes; tests may kill some."""
    running_nodes.add_workers()
    return running_nodes


def test_each_object_is_read_once_although_a_node_is_killed(
    nodes: Nodes, server: GCSServer, bucket: sync.Store, tmp_path: Path
) -> None:
    keys = [f"{number:05d}" for number in range(10_000)]
    bucket.put_many((f"in/{key}", key.encode()) for key in keys)
    marker, driver_id = tmp_path / "node", ray.get_runtime_context().get_node_id()

    def is_first(node_id: str) -> bool:
        try:
            marker.symlink_to(node_id)
        except FileExistsError:
            return False
        return True

    def rows_of(sample: Sample) -> Iterator[dict[str, Any]]:
        node_id = ray.get_runtime_context().get_node_id()
        if node_id != driver_id and is_first(node_id):
            threading.Event().wait()  # until the node is killed, in the middle of a task
        yield {"key": sample.key, "bytes": sample.data}

    dataset = read_objects(
        "gs://bucket/in", records=rows_of, parallelism=60, endpoint_url=server.url
    )
    before = server.stats.total.requests

    def kill_in_the_middle() -> None:
        wait_until(marker.is_symlink)
        nodes.kill_worker(os.readlink(marker))

    with ThreadPoolExecutor(1) as executor:
        killed = executor.submit(kill_in_the_middle)
        rows = dataset.take_all()
        killed.result()
    assert sorted((row["key"], row["bytes"]) for row in rows) == [
        (key, key.encode()) for key in keys
    ]
    assert server.stats.total.requests - before > 10_000  # some were read again


def test_each_row_is_written_once_although_workers_and_a_node_are_killed(
    nodes: Nodes,
    server: GCSServer,
    bucket: sync.Store,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    context = quiet()
    # Small blocks: an attempt has stored objects before it fails.
    monkeypatch.setattr(context, "target_max_block_size", 8)
    monkeypatch.setattr(context, "retried_map_errors", True)
    monkeypatch.setattr(context, "max_map_retries", 1)
    server.network = Network(latency_seconds=0.02)
    directory = str(tmp_path)

    def is_first(name: str) -> bool:
        try:
            os.close(os.open(f"{directory}/{name}", os.O_CREAT | os.O_EXCL))
        except FileExistsError:
            return False
        return True

    def fail_once(row: dict[str, int]) -> dict[str, int]:
        if row["id"] == 77 and is_first("kill"):
            os.kill(os.getpid(), signal.SIGKILL)
        if row["id"] == 227 and is_first("raise"):
            raise OSError("one failure")
        return row

    dataset = ray.data.range(300, override_num_blocks=12).map(fail_once)

    def kill_in_the_middle() -> None:
        wait_until(lambda: len(bucket.list_all(DATA)) > 50)
        nodes.kill_worker()

    with ThreadPoolExecutor(1) as executor:
        killed = executor.submit(kill_in_the_middle)
        write_objects(dataset, "gs://bucket/out", max_object_bytes=1, endpoint_url=server.url)
        killed.result()
    assert sorted(os.listdir(tmp_path)) == ["kill", "raise"]
    back = read_objects("gs://bucket/out", records=parquet(), endpoint_url=server.url)
    listed = len(back._logical_plan.dag.datasource._listing)
    assert sorted(row["id"] for row in back.take_all()) == [*range(300)]
    names = ("objects.insert", "xml.objects.insert")
    num_stored = sum(server.stats.operation(name).requests for name in names)
    assert num_stored > listed + 1  # other attempts stored objects, too
    # The driver has deleted the objects of other attempts, but those of a worker that was still
    # running then.
    bucket.clean(older_than_seconds=0)
    assert len(bucket.list_all(DATA)) == listed
    assert sorted(row["id"] for row in back.take_all()) == [*range(300)]


DRIVER = """
import sys, time, ray, ray.data
from aioflux.integrations.ray import write_objects

def slow(row):
    time.sleep(0.02)
    return row

ray.init(address=sys.argv[1], _node_ip_address="127.0.0.2", log_to_driver=False)
ray.data.DataContext.get_current().target_max_block_size = 8
write_objects(
    ray.data.range(10_000, override_num_blocks=12).map(slow),
    "gs://bucket/out",
    max_object_bytes=1,
    endpoint_url=sys.argv[2],
)
"""


def test_a_killed_driver_leaves_nothing_that_clean_does_not_find(
    nodes: Nodes, server: GCSServer, bucket: sync.Store
) -> None:
    command = [sys.executable, "-c", DRIVER, nodes.address, server.url]
    with subprocess.Popen(command, env=os.environ | {"PYTHONPATH": str(Path.cwd())}) as driver:
        wait_until(lambda: len(bucket.list_all(DATA)) > 20 or driver.poll() is not None)
        driver.kill()
    assert driver.returncode == -signal.SIGKILL
    assert len(bucket.list_all(DATA)) > 20
    assert bucket.list_all("out/aioflux-manifest").keys[:] == []
    with pytest.raises(NotFoundError):
        read_objects("gs://bucket/out", records=parquet(), endpoint_url=server.url)
    # Ray ends the workers of the job.
    wait_until(lambda: server.stats.connections_open <= 1)
    bucket.clean(older_than_seconds=0)
    assert len(bucket.list_all(DATA)) == 0
    assert bucket.clean(older_than_seconds=0, dry_run=True).aborted == ()

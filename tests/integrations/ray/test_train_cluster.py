"""One run of Ray Train on three nodes: a worker is killed, then a node, then a node is drained.

attempt 1   3 workers   steps 1 to 7     the save of step 6 cannot complete; a worker is killed
attempt 2   3 workers   steps 5 to 9     a node is killed after the commit of step 8
attempt 3   2 workers   steps 9 to 11    in step 9, Ray is told that a node will be taken away
"""

from __future__ import annotations

import os
import signal
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import pytest
import ray
import ray.train
from ray.core.generated import autoscaler_pb2
from ray.train import CheckpointConfig, FailureConfig, RunConfig, ScalingConfig
from ray.train.torch import TorchTrainer

from aioflux import sync
from aioflux.integrations.ray import storage_filesystem
from aioflux.testing import GCSServer
from tests.integrations.ray.cluster import three_nodes
from tests.integrations.ray.train_task import records, train
from tests.patience import wait_until

if TYPE_CHECKING:
    from pathlib import Path

    from tests.integrations.ray.cluster import Nodes

pytestmark = pytest.mark.more

KEYS = [f"{number:02d}" for number in range(30)]
EVENTS = {"0": {"block_at": 7}, "4": {"block_at": 9}, "8": {"preempted_at": 9}}
"""What happens in the attempt that has restored a step."""


@dataclass
class Run:
    """A run of three attempts, and the committed steps at some times."""

    lines: list[dict[str, Any]]
    result: ray.train.Result
    steps_at_first_kill: list[int]
    steps_at_end: list[int]

    def of(self, event: str, restored: int) -> list[dict[str, Any]]:
        """Return the lines of an attempt."""
        return [
            each for each in self.lines if (each["event"], each["restored"]) == (event, restored)
        ]


def committed(bucket: sync.Store) -> list[int]:
    """Return the steps that a new job would find."""
    found = bucket.list_all("runs/run/", match_glob="**/.metadata")
    return [int(meta.key.split("/")[2].removeprefix("step-")) for meta in found]


def drain(node: Any) -> None:
    """Tell Ray that a node will be taken away in ten minutes."""
    client = ray._raylet.GcsClient(address=ray.get_runtime_context().gcs_address)
    reason = autoscaler_pb2.DrainNodeReason.Value("DRAIN_NODE_REASON_PREEMPTION")
    is_accepted, message = client.drain_node(
        node.node_id, reason, "", int((time.time() + 600) * 1000)
    )
    assert is_accepted, message


class Disruptions:
    """The kills of the run, each when the workers have reached its step."""

    def __init__(
        self, nodes: Nodes, server: GCSServer, bucket: sync.Store, directory: Path
    ) -> None:
        self._nodes, self._server, self._bucket = nodes, server, bucket
        self._directory = directory

    def run(self) -> list[int]:
        """Kill a worker, kill a node, and drain a node; return the steps at the first kill."""
        self._wait_for_step(7, restored=0)
        wait_until(lambda: self._server.faults.injected["delay"] >= 3)
        steps = committed(self._bucket)
        pids = [each["pid"] for each in records(self._directory) if each["event"] == "start"]
        os.kill(pids[-1], signal.SIGKILL)
        self._server.faults.clear()
        self._wait_for_step(9, restored=4)
        wait_until(lambda: 8 in committed(self._bucket))
        self._nodes.kill_worker()
        self._wait_for_step(9, restored=8)
        drain(self._nodes.workers[0])
        return steps

    def _wait_for_step(self, step: int, *, restored: int) -> None:
        reached = ("step", step, restored, 0)
        wait_until(
            lambda: (
                reached
                in [
                    (each["event"], each.get("step"), each["restored"], each["rank"])
                    for each in records(self._directory)
                ]
            )
        )


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    directory = tmp_path_factory.mktemp("records")
    with (
        pytest.MonkeyPatch.context() as patch,
        GCSServer(buckets=("bucket",)) as server,
        sync.open_store("gs://bucket", endpoint_url=server.url) as bucket,
        three_nodes() as nodes,
        ThreadPoolExecutor(1) as executor,
    ):
        patch.setenv("RAY_TRAIN_HEALTH_CHECK_INTERVAL_S", "0.5")
        # For a while after a node has died, Ray tries to start as many workers as before.
        patch.setenv("RAY_TRAIN_WORKER_GROUP_START_TIMEOUT_S", "3")
        patch.setenv("RAY_TRAIN_PREEMPTION_POLL_INTERVAL_S", "0.5")
        bucket.put_many((f"in/{key}", key.encode() * 4) for key in KEYS)
        server.faults.add("*insert*", key="*step-00000006/*.distcp", delay_seconds=1000.0)
        trainer = TorchTrainer(
            train,
            train_loop_config={
                "directory": str(directory),
                "endpoint_url": server.url,
                "events": EVENTS,
            },
            scaling_config=ScalingConfig(num_workers=(2, 3)),
            run_config=RunConfig(
                name="run",
                storage_path="bucket/runs",
                storage_filesystem=storage_filesystem("gs://bucket", endpoint_url=server.url),
                failure_config=FailureConfig(max_failures=2),
                checkpoint_config=CheckpointConfig(num_to_keep=2),
            ),
        )
        disruptions = executor.submit(Disruptions(nodes, server, bucket, directory).run)
        result = trainer.fit()
        return Run(records(directory), result, disruptions.result(), committed(bucket))


def test_an_interrupted_save_is_not_visible(run: Run) -> None:
    assert run.steps_at_first_kill == [2, 4]


def test_after_a_killed_worker_the_training_repeats_the_same_bits(run: Run) -> None:
    """Weights, optimizer, dropout and the order of samples are those of the first attempt."""
    assert {each["world_size"] for each in run.of("start", 4)} == {3}
    first, second = (
        {(each["rank"], each["step"]): (each["key"], each["digest"]) for each in run.of("step", r)}
        for r in (0, 4)
    )
    repeated = first.keys() & second.keys()
    assert {(rank, step) for rank in range(3) for step in (5, 6, 7)} <= repeated
    assert {place: first[place] for place in repeated} == {
        place: second[place] for place in repeated
    }


def test_after_a_killed_node_fewer_workers_continue_from_the_same_bits(run: Run) -> None:
    assert {each["world_size"] for each in run.of("start", 8)} == {2}
    (saved,) = {each["digest"] for each in run.of("step", 4) if each["step"] == 8}
    assert {each["digest"] for each in run.of("start", 8)} == {saved}


def test_each_sample_is_trained_on_once(run: Run) -> None:
    lasting = {0: range(1, 5), 4: range(5, 9), 8: range(9, 100)}
    keys = [
        each["key"]
        for restored, steps in lasting.items()
        for each in run.of("step", restored)
        if each["step"] in steps
    ]
    assert sorted(keys) == KEYS


def test_a_preemption_is_answered_by_a_save(run: Run) -> None:
    assert {each["step"] for each in run.of("report", 8)} == {9, 10}


def test_ray_keeps_the_last_steps(run: Run) -> None:
    assert run.steps_at_end == [9, 10]
    assert [metrics["step"] for _, metrics in run.result.best_checkpoints] == [9, 10]
    assert run.result.checkpoint.path == "bucket/runs/run/step-00000010"
